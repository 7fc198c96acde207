"""Whether an answer is as the description of the API says: the part of JSON Schema used there."""

from typing import Any

from modelyard.serve.api.description import DOCUMENT, SCHEMAS

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "number": (int, float),
    "integer": (int,), "boolean": (bool,), "null": (type(None),),
}  # fmt: skip
_WORDS = {
    *("type", "enum", "const", "required", "properties", "additionalProperties", "items"),
    *("anyOf", "$ref", "description"),
}


def wrong(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    """Return what of a value is not as a schema says, a sentence each."""
    assert set(schema) <= _WORDS, f"{set(schema) - _WORDS} is not known here"
    if "$ref" in schema:
        return wrong(value, SCHEMAS[schema["$ref"].rpartition("/")[2]], place)
    found: list[str] = []
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        is_bool = isinstance(value, bool)
        if not any(
            isinstance(value, _TYPES[name]) and is_bool <= (name == "boolean") for name in names
        ):
            return [f"{place} is {value!r}, not {names}"]
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{place} is {value!r}, not one of {schema['enum']}")
    if "const" in schema and value != schema["const"]:
        found.append(f"{place} is {value!r}, not {schema['const']}")
    if "anyOf" in schema and all(wrong(value, each, place) for each in schema["anyOf"]):
        found.append(f"{place} is as none of {schema['anyOf']}")
    if isinstance(value, dict):
        own, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [
            f"{place} lacks {name}" for name in schema.get("required", ()) if name not in value
        ]
        for name, each in value.items():
            if name in own or others is not False:
                further = own.get(name, others if isinstance(others, dict) else {})
                found += wrong(each, further, f"{place}.{name}")
            else:
                found.append(f"{place}.{name} is not known")
    if isinstance(value, list) and "items" in schema:
        for at, each in enumerate(value):
            found += wrong(each, schema["items"], f"{place}[{at}]")
    return found


def wrong_in(answer: Any) -> list[str]:
    """Return what of an explanation's answer is not as it is described."""
    several = "explanations" in answer
    (schema,) = (
        each for each in DOCUMENT["answers"]["explain"]["anyOf"]
        if each["$ref"].endswith("OfTargets") == several
    )  # fmt: skip
    found = wrong(answer, schema)
    for each in answer["explanations"] if several else [answer]:
        # Of a schema that says so generators make no class.
        if not ({"attributions", "shape"} <= each.keys() or "regions" in each):
            found.append("is neither numbers nor regions")
    return found
