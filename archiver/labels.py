"""`index_to_name.json`: the names of a model's outputs, by their index."""

import json
from collections.abc import Mapping
from typing import Any

from modelyard.archiver.handler_files import LABELS_FILE, MAX_JSON_BYTES
from modelyard.archiver.untrusted.json import parse_json

_NAMES = "object_type_names"
_FORM = 'expected indices from "0" and names, as in {"0": "cat", "1": "dog"}'
_SHOWN = 10


def parse_labels(data: bytes) -> dict[str, str]:
    """Read labels: index as str → name.

    There are three forms: {"0": "cat"}, {"0": ["n02123045", "tabby"]} (the last name
    counts) and {"object_type_names": ["cat", …]}.

    Raises:
        ValueError: it is something else; the message names the file.
    """
    return {key: _name(entry) for key, entry in _entries(data).items()}


def doubled_labels(data: bytes) -> str | None:
    """Return which name stands for two outputs; lists that differ before their last name may.

    Raises:
        ValueError: as `parse_labels`.
    """
    places: dict[str, str] = {}
    for key, entry in _entries(data).items():
        first = places.setdefault(json.dumps(entry), key)
        if first != key:
            return (
                f"{LABELS_FILE} names outputs {first} and {key} both {json.dumps(_name(entry))}, "
                "and an answer holds a name once; expected a name of its own for each, as "
                f"{json.dumps(f'{_name(entry)} ({key})')}"
            )
    return None


def count_problem(labels: Mapping[str, str], count: int) -> str | None:
    """Return why labels do not fit so many outputs."""
    missing = [str(at) for at in range(count) if str(at) not in labels]
    beyond = [key for key in labels if int(key) >= count]
    if not missing and not beyond:
        return None
    of = f"{LABELS_FILE} names {count - len(missing)} of the model's {count} outputs"
    lacks = f"; {_listed(missing)} {'has' if len(missing) == 1 else 'have'} none" if missing else ""
    more = f"; the model does not have {_listed(beyond)}" if beyond else ""
    from_1 = ", counting from 0" if missing == ["0"] and beyond == [str(count)] else ""
    return f"{of}{lacks}{more}; name each of 0 to {count - 1}{from_1}, or leave the file out"


def _listed(keys: list[str]) -> str:
    shown = ", ".join(keys[:_SHOWN])
    return f"{shown} and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else shown


def _entries(data: bytes) -> dict[str, Any]:
    try:
        content = parse_json(data, MAX_JSON_BYTES)
    except ValueError as error:
        raise ValueError(f"{LABELS_FILE}: {error}; {_FORM}") from error
    if isinstance(content, dict) and isinstance(content.get(_NAMES), list):
        content = {str(at): name for at, name in enumerate(content[_NAMES])}
    if not isinstance(content, dict) or not content:
        seen = f"a {type(content).__name__}" if content else "nothing"
        raise ValueError(f"{LABELS_FILE} holds {seen}; {_FORM}")
    if wrong := [key for key in content if not _is_index(key)]:
        if all(_is_index(str(value)) for value in content.values()):
            raise ValueError(_inverted(content))
        raise ValueError(f"{LABELS_FILE} has the key {json.dumps(wrong[0])}; {_FORM}")
    for key, entry in content.items():
        last = entry[-1] if isinstance(entry, list) and entry else entry
        if not isinstance(last, str | int | float):
            raise ValueError(f'{LABELS_FILE} names output "{key}" {json.dumps(entry)}; {_FORM}')
    return content


def _inverted(content: Mapping[str, Any]) -> str:
    name, index = next(iter(content.items()))
    said = f"{LABELS_FILE} is the wrong way round: it says {json.dumps({name: index})}; "
    if len(content) > _SHOWN:
        turn = "{str(i): n for n, i in json.load(open(f)).items()}"
        return (
            f"{said}{_FORM}; turn it with python -c 'import json; "
            f'f = "{LABELS_FILE}"; d = {turn}; json.dump(d, open(f, "w"))\''
        )
    turned = {str(value): key for key, value in content.items()}
    return f"{said}expected {json.dumps(turned, ensure_ascii=False)}; write that"


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdecimal() and str(int(text)) == text


def _name(entry: Any) -> str:
    return str(entry[-1] if isinstance(entry, list) else entry)
