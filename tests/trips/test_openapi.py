"""A model's own OpenAPI document: it says what the server takes and answers, and can be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver.signature import parse_inputs
from modelyard.base.plugins import registered
from modelyard.serve.api.description import DOCUMENT
from modelyard.serve.api.schemas import body_and_answer, tensor_schemas
from modelyard.serve.control.preload import OUR_HANDLERS
from tests.serve.live import LiveServer
from tests.shared import DIGITS

FORMATS = ("onnx",)
OF_NUMBERS = {"base_handler", "mlflow_scoring"}
"""Handlers whose bodies are what the signature says, and other forms of it."""
SCAN = DIGITS / "scans" / "7.png"


def document(server: LiveServer, model: str = "onnx") -> dict[str, Any]:
    answer = server.client.get(f"/openapi/{model}.json")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "number": (int, float), "integer": int,
    "boolean": bool, "null": type(None),
}  # fmt: skip


def problems(value: Any, schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[str]:
    """Yield how a value is not of a schema: the words of JSON Schema that our documents use."""
    if "$ref" in schema:
        schema = whole["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema and all(any(problems(value, each, whole)) for each in schema["anyOf"]):
        yield f"{value!r:.80} is none of {schema['anyOf']}"
    kinds = schema.get("type", [])
    allowed = [TYPES[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds)]
    if allowed and not any(isinstance(value, kind) for kind in allowed):
        yield f"{value!r:.80} is not {kinds}"
    if value not in schema.get("enum", [value]):
        yield f"{value!r:.80} is not one of {schema['enum']}"
    if isinstance(value, dict):
        yield from (f"no {name}" for name in schema.get("required", ()) if name not in value)
        for name, each in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
            yield from problems(each, inner, whole)
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1 << 30):
            yield f"{len(value)} items"
        for each in value:
            yield from problems(each, schema.get("items", {}), whole)


@pytest.mark.parametrize(
    ("model", "explains"),
    [("onnx", False), pytest.param("onnx/1.0", True, marks=pytest.mark.nightly)],
)
def test_what_a_model_answers_is_what_its_document_says(
    server: LiveServer, model: str, explains: bool
) -> None:
    whole = document(server, model)
    names = {f"#/components/schemas/{name}" for name in whole["components"]["schemas"]}
    assert set(references(whole)) <= names
    ids = [each["operationId"] for item in whole["paths"].values() for each in item.values()]
    assert ids == ["predict", "explain", "infer", "metadata"]
    tensor = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": [0.0] * 64}
    sent: dict[str, dict[str, Any]] = {
        "predict": {"content": SCAN.read_bytes()},
        "explain": {"content": SCAN.read_bytes(), "params": {"n_steps": 10}},
        "infer": {"json": {"inputs": [tensor]}},
        "metadata": {},
    }
    for path, item in whole["paths"].items():
        for method, operation in item.items():
            if operation["operationId"] == "explain" and not explains:
                continue  # it starts a worker of its own
            given = sent[operation["operationId"]]
            answer = server.client.request(method, path, **given)
            assert answer.status_code == 200, answer.text
            schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
            assert list(problems(answer.json(), schema, whole)) == []
            if "json" in given:
                body = operation["requestBody"]["content"]["application/json"]["schema"]
                assert list(problems(given["json"], body, whole)) == []
                for wrong in ({"name": "picture"}, {"datatype": "INT8"}, {"shape": [8, 8]}):
                    assert list(problems({"inputs": [{**tensor, **wrong}]}, body, whole))
            failed = server.client.request(method, f"{path}-none", **given)
            schema = operation["responses"]["404"]["content"]["application/json"]["schema"]
            assert list(problems(failed.json(), schema, whole)) == []
    for name, schema in whole["components"]["schemas"].items():
        is_class = not {"properties", "anyOf"} <= schema.keys() and not [*arrays_of_nothing(schema)]
        assert is_class, f"generators make no class of {name}"
    if explains:
        query = "target=top-2&n_steps=10"
        several = server.client.post(f"/explanations/{model}?{query}", content=SCAN.read_bytes())
        explained = whole["components"]["schemas"]["ExplanationsOfTargets"]
        assert list(problems(several.json(), explained, whole)) == []
    (place,) = whole["servers"]
    base = f"{server.about['inference']}/openapi/{model}.json"
    assert (
        str(server.client.base_url.join(base).join(place["url"])).rstrip("/")
        == server.about["inference"]
    )


def test_a_model_that_is_not_there_has_no_document(server: LiveServer) -> None:
    for model in ("nope", "onnx/9"):
        answer = server.client.get(f"/openapi/{model}.json")
        assert (answer.status_code, answer.json()["code"]) == (404, 404)


def test_every_built_in_handler_has_its_schemas() -> None:
    assert set(DOCUMENT["handlers"]) >= OUR_HANDLERS - OF_NUMBERS
    if registered("tasks"):
        assert set(DOCUMENT["handlers"]) == (OUR_HANDLERS | {"text_classifier"}) - OF_NUMBERS


def test_numbers_are_as_the_signature_has_them() -> None:
    signature = parse_inputs(["ids:int64[batch=1..4,7]", "mask:bool[batch,length=1..9]"])
    bodies, _ = body_and_answer("base_handler", signature)
    row = bodies["application/json"]["properties"]
    assert row["ids"] == {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 7,
        "maxItems": 7,
    }
    assert row["mask"] == {
        "type": "array",
        "items": {"type": "boolean"},
        "minItems": 1,
        "maxItems": 9,
    }
    schemas = tensor_schemas(signature)
    assert schemas["IdsInput"]["properties"]["datatype"]["enum"] == ["INT64"]
    either = schemas["InferRequest"]["properties"]["inputs"]["items"]["anyOf"]
    assert [each["$ref"].rpartition("/")[2] for each in either] == ["IdsInput", "MaskInput"]


def arrays_of_nothing(schema: Any) -> Iterator[Any]:
    """Yield the schemas inside one of arrays that do not say what they hold."""
    if isinstance(schema, dict):
        if "array" in (schema.get("type") or ()) and not {"items", "prefixItems"} & schema.keys():
            yield schema
        for each in schema.values():
            yield from arrays_of_nothing(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from arrays_of_nothing(each)


USE = """
import io, sys
from onnx_client import Client
from onnx_client.api.default import explain, infer, metadata, predict
from onnx_client.models import (
    Explanation, ImageInput, ImageInputDatatype, ImageInputName, InferRequest, InferResponse,
    Metadata, Prediction,
)
from onnx_client.types import File

url, scan = sys.argv[1:]
with Client(base_url=url) as client, open(scan, "rb") as file:
    content = file.read()
    prediction = predict.sync(client=client, body=File(io.BytesIO(content)))
    assert isinstance(prediction, Prediction), prediction
    chances: dict[str, float] = prediction.additional_properties
    image = ImageInput(ImageInputName.IMAGE, [1, 1, 8, 8], ImageInputDatatype.FP32, [0.0] * 64)
    answer = infer.sync(client=client, body=InferRequest([image]))
    assert isinstance(answer, InferResponse), answer
    logits = answer.outputs[0].data
    assert isinstance(logits, list)
    explanation = explain.sync(client=client, body=File(io.BytesIO(content)), n_steps=10)
    assert isinstance(explanation, Explanation), explanation
    about = metadata.sync(client=client)
    assert isinstance(about, Metadata), about
print(max(chances, key=chances.__getitem__), len(logits), explanation.label)
"""


@pytest.mark.nightly
@pytest.mark.network
@pytest.mark.timeout(600)
def test_a_client_is_generated_typed_and_used(server: LiveServer, tmp_path: Path) -> None:
    """With openapi-python-client, in an environment of its own."""
    file, place = tmp_path / "onnx.json", tmp_path / "client"
    file.write_text(json.dumps(document(server)))

    place.mkdir()

    def run(*command: object) -> str:
        given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ran = subprocess.run(
            [*map(str, command)], capture_output=True, text=True, cwd=place, env=given, timeout=500
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    tools = tmp_path / "venv" / "bin"
    run(tools / "pip", "install", "-q", "openapi-python-client", "openapi-spec-validator", "mypy")
    run(tools / "openapi-spec-validator", file)
    generate = ("generate", "--path", file, "--output-path", place, "--overwrite")
    made = run(tools / "openapi-python-client", *generate)
    assert "WARNING" not in made.upper(), made
    (place / "use.py").write_text(USE)
    run(tools / "mypy", "use.py")
    said = run(tools / "python", place / "use.py", server.about["inference"], SCAN)
    assert said.split() == ["7", "10", "7"]
