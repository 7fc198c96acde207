"""Tokens and n-grams, as torchtext makes them."""

from collections.abc import Callable, Iterator, Sequence

Tokenizer = Callable[[str], list[str]]

_BASIC_ENGLISH = str.maketrans(
    {"'": " '  ", '"': "", ";": " ", ":": " ", **{mark: f" {mark} " for mark in ".,()!?"}}
)


def get_tokenizer(tokenizer: str | Tokenizer | None, language: str = "en") -> Tokenizer:
    """Return a function text → tokens.

    Args:
        tokenizer: "basic_english" (lower case, punctuation apart), None (split at spaces), or a
            function, which is returned as it is.
        language: "en".

    Raises:
        ValueError: another tokenizer or language.
    """
    if callable(tokenizer):
        return tokenizer
    if tokenizer is None:
        return str.split
    if tokenizer != "basic_english" or language != "en":
        raise ValueError(
            f"there is no tokenizer {tokenizer!r} for {language!r}; expected basic_english for en"
        )
    return _basic_english


def ngrams_iterator(token_list: Sequence[str], ngrams: int) -> Iterator[str]:
    """Yield the tokens, then their 2-grams, and so on up to `ngrams`, each joined by spaces."""
    for size in range(1, ngrams + 1):
        for begin in range(len(token_list) - size + 1):
            yield " ".join(token_list[begin : begin + size])


def _basic_english(text: str) -> list[str]:
    return text.lower().replace("<br />", " ").translate(_BASIC_ENGLISH).split()
