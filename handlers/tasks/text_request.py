"""A request's body → texts: our form, and those that clients of Hugging Face send.

Those are {"inputs": …}, with a text, an object or a list inside, and a list of texts by itself.
"""

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

from modelyard.handlers.body import body_of, decode_text, parse_json
from modelyard.handlers.errors import BadInput

INPUTS, PARAMETERS = "inputs", "parameters"


def read_body(row: Mapping[str, Any], names: Collection[str]) -> Any:
    """Return a text, an object, or the list of several of them, whatever the content type says.

    Args:
        row: the request.
        names: keys of an object.

    Raises:
        BadInput: the body is empty, not text, or has parameters beside its `inputs`.
    """
    body = body_of(row)
    if isinstance(body, bytes | bytearray):
        body = decode_text(body)
        if body.lstrip()[:1] in ('"', "{", "["):
            # Else it is a text that begins with such a character.
            with contextlib.suppress(BadInput):
                value = parse_json(body)
                if _is_meant(value, names):
                    body = value
    if isinstance(body, dict) and INPUTS in body and not set(body) & set(names):
        if others := sorted(set(map(str, body)) - {INPUTS, PARAMETERS}):
            raise BadInput(f'{others[0]} is unknown beside "{INPUTS}"; leave it out')
        if given := body.get(PARAMETERS):
            shown = ", ".join(map(str, given)) if isinstance(given, dict) else given
            raise BadInput(
                f"{PARAMETERS} are {shown}; expected none: handler in model-config.yaml sets what "
                "this model does"
            )
        return body[INPUTS]
    return body


def _is_meant(value: Any, names: Collection[str]) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, str | dict) for each in value)
    return isinstance(value, str) or bool({INPUTS, *names} & set(value))
