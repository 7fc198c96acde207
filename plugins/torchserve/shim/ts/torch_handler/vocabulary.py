"""Token → index."""


class Vocabulary(dict[str, int]):
    """A vocabulary in which unknown tokens have the index of "<unk>", if that is in it."""

    def __missing__(self, token: str) -> int:
        if "<unk>" in self:
            return self["<unk>"]
        raise KeyError(token)
