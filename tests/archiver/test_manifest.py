import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from modelyard.archiver.errors import BadManifest
from modelyard.archiver.manifest import (
    Golden,
    Manifest,
    format_manifest,
    parse_manifest,
)
from modelyard.archiver.signature import Batching, Dim

TORCHSERVE = {
    "createdOn": "17/08/2024 12:00:00",
    "runtime": "python",
    "model": {
        "modelName": "noop",
        "serializedFile": "model.pt",
        "handler": "noop_handler.py:handle",
        "modelFile": "model.py",
        "modelVersion": "1.11",
    },
    "archiverVersion": "0.12.0",
}
SHA = "0" * 64
SEALED: dict[str, Any] = {
    **TORCHSERVE,
    "modelyard": {
        "schema": 1,
        "digests": {"digits.onnx": SHA, "r.json": SHA, "q": SHA, "a": SHA},
        "report": "r.json",
        "signature": {
            "inputs": [{"name": "image", "dtype": "float32", "shape": ["batch", 1]}],
            "outputs": [{"name": "logits", "dtype": "float32", "shape": ["batch", 10]}],
            "dims": {"batch": {"min": 1, "max": 8}},
            "batching": {"batchable": False, "reason": "rows mix"},
        },
        "explain": {"artifact": "digits.onnx", "report": "r.json"},
        "golden": [
            {"request": "q", "content_type": "image/png", "expected": "a", "tolerance": 1e-3}
        ],
        "requirements": [f"pillow==11.0 --hash=sha256:{'b' * 64}"],
    },
}


def parse(document: Any) -> Manifest:
    return parse_manifest(json.dumps(document).encode())


def problems(data: bytes) -> tuple[str, ...]:
    with pytest.raises(BadManifest) as caught:
        parse_manifest(data)
    return caught.value.problems


def with_value(document: Any, path: tuple[str | int, ...], value: Any) -> Any:
    changed = copy.deepcopy(document)
    place = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return changed


def paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if path:
        yield path
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys:
            yield from paths(value[key], (*path, key))


def test_torchserves_manifest_is_read() -> None:
    manifest = parse(TORCHSERVE)

    assert manifest == Manifest(
        model_name="noop",
        model_version="1.11",
        handler="noop_handler.py:handle",
        serialized_file="model.pt",
        model_file="model.py",
        runtime="python",
        created_on="17/08/2024 12:00:00",
        archiver_version="0.12.0",
        modelyard=None,
    )


def test_only_model_and_runtime_are_required() -> None:
    assert parse({"runtime": "LSP", "model": {}}) == Manifest(
        model_name=None, model_version="1.0", runtime="LSP"
    )


def test_unknown_keys_of_old_archivers_are_ignored() -> None:
    old = {"description": 3, "model": {**TORCHSERVE["model"], "sourceVocab": 1}}  # type: ignore[dict-item]

    assert parse({**TORCHSERVE, **old, "version": []}).model_name == "noop"


def test_sealed_manifest_is_read() -> None:
    seal = parse(SEALED).modelyard

    assert seal is not None
    assert seal.digests["digits.onnx"] == SHA
    assert seal.signature is not None
    assert seal.signature.inputs[0].shape == (Dim("batch", 1, 8), 1)
    assert seal.signature.dims == {"batch": Dim("batch", 1, 8)}
    assert seal.signature.batching == Batching(False, "rows mix")
    assert seal.golden == (Golden("q", "image/png", "a", 1e-3),)


def test_a_signature_of_an_older_export_says_nothing_of_batching() -> None:
    old = copy.deepcopy(SEALED)
    del old["modelyard"]["signature"]["batching"]
    manifest = parse(old)
    assert manifest.modelyard is not None
    assert manifest.modelyard.signature is not None
    assert manifest.modelyard.signature.batching is None
    assert parse_manifest(format_manifest(manifest)) == manifest


def test_manifest_written_is_the_manifest_read() -> None:
    manifest = parse(SEALED)

    assert parse_manifest(format_manifest(manifest)) == manifest
    assert list(json.loads(format_manifest(manifest))) == list(SEALED)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("modelyard", "golden", 0, "tolerance"), "x", 'expected a number, found "x"'),
        (
            ("modelyard", "golden", 0, "tolerance"),
            -1,
            "expected a number of at least 0, found -1.0",
        ),
        (("modelyard", "golden", 0), [], "expected an object, found a list"),
        (("modelyard", "schema"), True, "expected a whole number, found true"),
        (
            ("modelyard", "schema"),
            2,
            "this version reads 1, found 2; update modelyard or write the archive again",
        ),
        (
            ("modelyard", "digests", "q"),
            "ABC",
            'expected 64 lower-case hexadecimal digits, found "ABC"',
        ),
        (("modelyard", "report"), "lost", '"lost" has no digest in modelyard.digests'),
        (("modelyard", "report"), "../r.json", '"../r.json": the path holds the part ".."'),
        (("modelyard", "explain", "artifact"), "", 'expected a string that is not empty, found ""'),
        (
            ("modelyard", "requirements", 0),
            1,
            "expected NAME==VERSION --hash=sha256:DIGEST, found 1",
        ),
        (
            ("modelyard", "signature", "inputs", 0, "shape", 1),
            -1,
            "expected a size of at least 0 or a dimension's name, found -1",
        ),
        (
            ("modelyard", "signature", "dims", "batch"),
            {"min": 3, "max": 2},
            "expected 0 <= min <= max, found 3 and 2",
        ),
        (
            ("modelyard", "signature", "batching", "batchable"),
            "no",
            'expected true or false, found "no"',
        ),
        (("modelyard",), None, "expected an object, found null"),
        (("runtime",), "COBOL", 'expected one of python, python3, LSP, found "COBOL"'),
        (("model",), "noop", 'expected an object, found "noop"'),
        (("model", "modelVersion"), "", 'expected a string that is not empty, found ""'),
        (("model", "modelVersion"), 1.0, "expected a string that is not empty, found 1.0"),
        (("model", "serializedFile"), "/etc/shadow", '"/etc/shadow": the name is an absolute path'),
        (("model", "handler"), "../h.py:run", '"../h.py:run": the path holds the part ".."'),
    ],
)
def test_wrong_value_is_named_by_its_field(
    path: tuple[str | int, ...], value: Any, problem: str
) -> None:
    field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)[1:]
    found = problems(json.dumps(with_value(SEALED, path, value)).encode())

    assert f"{field}: {problem}" in found


@pytest.mark.parametrize("value", [7.5, ["x", None], {"x": 1}], ids=["number", "list", "object"])
def test_no_field_of_any_type_escapes_as_another_error(value: Any) -> None:
    for path in paths(SEALED):
        field = ".".join(map(str, path))
        try:
            parse(with_value(SEALED, path, value))
        except BadManifest as error:
            assert str(path[0]) in str(error), field
        except Exception as error:
            pytest.fail(f"{field}: {error!r}")


def test_name_outside_the_rule_is_refused() -> None:
    document = with_value(TORCHSERVE, ("model", "modelName"), "a b")

    assert problems(json.dumps(document).encode())[0].startswith(
        'model.modelName: model name "a b"'
    )


def test_all_wrong_fields_are_named_at_once() -> None:
    document = {"runtime": 1, "model": {"handler": 2, "modelName": 3}}

    assert len(problems(json.dumps(document).encode())) == 3


@pytest.mark.parametrize("key", ["digests", "golden", "requirements", "schema"])
def test_missing_field_of_the_seal_is_named(key: str) -> None:
    document = copy.deepcopy(SEALED)
    del document["modelyard"][key]

    assert any(
        p.startswith(f"modelyard.{key}: expected") for p in problems(json.dumps(document).encode())
    )


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        pytest.param(b"{not json", "not JSON", id="not JSON"),
        pytest.param(b"", "not JSON", id="empty"),
        pytest.param(b"[]", "expected an object, found a list", id="list"),
        pytest.param(b" " * (1024 * 1024 + 1), "at most 1048576 are read", id="over 1 MiB"),
        pytest.param(b"[" * 100_000, "nested deeper than 64 levels", id="deep"),
        pytest.param(b'{"a":' * 100_000, "nested deeper than 64 levels", id="deep objects"),
        pytest.param(b'"' + b'\\"' * 400_000, "not JSON", id="one endless string"),
        pytest.param(b'{"a": 1, "a": 2}', 'the key "a" is given twice', id="duplicate key"),
        pytest.param(b'{"a": NaN}', "NaN is not a JSON number", id="NaN"),
        pytest.param(b'{"a": -Infinity}', "-Infinity is not a JSON number", id="infinity"),
        pytest.param(b'{"a": 1e400}', "the number 1e400 is too large", id="overflow"),
        pytest.param(b'{"a": ' + b"9" * 100_000 + b"}", "9… is too large", id="huge integer"),
        pytest.param(b'{"a": "\\ud800"}', "half a character", id="lone surrogate"),
        pytest.param(b"\xef\xbb\xbf{}", "byte order mark", id="BOM"),
        pytest.param(b'{"a": "\xff"}', "not UTF-8: byte 7", id="not UTF-8"),
        pytest.param("{}".encode("utf-16"), "not UTF-8", id="UTF-16"),
    ],
)
def test_unreadable_manifest_says_why(data: bytes, problem: str) -> None:
    assert any(problem in found for found in problems(data))


def test_brackets_inside_strings_are_no_nesting() -> None:
    document = {**TORCHSERVE, "description": '["' * 1000}

    assert parse(document).model_name == "noop"
