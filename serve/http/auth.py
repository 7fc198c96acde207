"""Bearer tokens, checked before any route."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from modelyard.serve.errors import Forbidden, Unauthorized
from modelyard.serve.http.tokens import Grant, find_grant

Grants = Callable[[], Sequence[Grant]]
"""Returns the tokens that are known now."""

CHANGES = "/v2/repository/models/"
"""What paths of the inference API begin with that change what is served."""


def changes_models(path: str) -> bool:
    """Return whether a path of the inference API changes what is served."""
    return path.startswith(CHANGES)


def check_changes(
    clients: Callable[..., None],
    operators: Callable[..., None],
    is_change: Callable[[str], bool] = changes_models,
) -> Callable[..., None]:
    """Return a check that asks for the operators' token where something is changed."""

    def check(path: str, headers: list[tuple[bytes, bytes]]) -> None:
        (operators if is_change(path) else clients)(path, headers)

    return check


class TokenCheck:
    """Refuses requests without a token, and those whose token has not the right.

    Args:
        grants: the tokens, or None to let everybody in.
        right: returns the right that a path needs; None where any token will do.
        open_paths: paths that need none.
    """

    def __init__(
        self,
        grants: Grants | None,
        right: Callable[[str], str | None],
        open_paths: Iterable[str] = (),
    ) -> None:
        self._grants = grants
        self._right = right
        self._open_paths = frozenset(open_paths)

    def __call__(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise Unauthorized or Forbidden unless the request may pass."""
        if self._grants is not None and path not in self._open_paths:
            self.check_right(self._right(path), headers)

    def check_right(self, right: str | None, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise Unauthorized or Forbidden unless a token of the headers has a right, or any."""
        if self._grants is None:
            return
        unfit = None
        for name, value in headers:
            scheme, _, token = value.partition(b" ")
            if name == b"authorization" and scheme.lower() == b"bearer":
                grant = find_grant(self._grants(), token.lstrip(b" "))
                if grant is not None and (right is None or right in grant.rights):
                    return
                unfit = unfit or grant
        if unfit is not None:
            raise Forbidden(
                f"the token {unfit.name!r} may {', '.join(sorted(unfit.rights))}; this needs one "
                f"that may {right}"
            )
        raise Unauthorized(
            "this API needs the header `Authorization: Bearer TOKEN` with a token that it knows; "
            "`modelyard serve token` prints the one of this start, `modelyard token new` makes "
            "one that stays"
        )
