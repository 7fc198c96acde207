"""Model folders of SageMaker, Vertex AI and Azure ML: functions in every shape, health, errors."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelyard.archiver import open_archive
from modelyard.handlers import Context
from modelyard.handlers.errors import BadInput
from modelyard.plugins.clouds import cli
from modelyard.plugins.clouds.contract import read_azureml, read_sagemaker, read_vertex
from modelyard.serve.errors import StartError
from plugins.clouds.tests.containers import container, write_folder

ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
JSON, CSV, NPY = "application/json", "text/csv", "application/x-npy"
LINEAR = """
import torch
def model_fn(model_dir):
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 10.0]])), model.bias.zero_()
    return model
"""
"""(a, b) → a + 10 b; all other steps are the defaults."""
OF_FOLDERS = (
    *("sagemaker_inference", "sagemaker_pytorch_serving_container", "cloud_handler"),
    *("inference", "score", "helper", "serve_me"),
)
"""Modules that each test imports anew."""
Ask = Callable[..., Any]


def npy(values: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """Return what loads a model folder in this process, as a worker does, and asks it once."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    before = {*sys.modules}

    def call(
        files: Mapping[str, str], *bodies: bytes, contract: str = "sagemaker",
        headers: Mapping[str, str] | None = None, **variables: str,
    ) -> Any:  # fmt: skip
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PYTHONPATH", "")
        folder = write_folder(tmp_path / "model", files)
        monkeypatch.syspath_prepend(Path(__file__).parents[1])
        own = importlib.import_module("cloud_handler").CloudHandler()
        stated = {"handler": {"folder": str(folder), "contract": contract}}
        context = Context("model", str(tmp_path), {}, model_yaml_config=stated)
        own.initialize(context)
        sent = headers or {"Content-Type": JSON}
        context.reset([str(at) for at in range(len(bodies))], [dict(sent) for _ in bodies])
        answers = own.handle([{"body": bytearray(body)} for body in bodies], context)
        found = [
            (context.get_response_status(at)[0], context.get_response_content_type(at), answer)
            for at, answer in enumerate(answers)
        ]
        return found[0] if len(bodies) == 1 else found

    yield call
    for name in {*sys.modules} - before:
        if name.split(".")[0] in OF_FOLDERS:
            del sys.modules[name]


STEP_BY_STEP = """
import json, torch
def model_fn(model_dir): return lambda x: x.sum()
def input_fn(request_body, request_content_type):
    assert request_content_type == "application/json"
    return torch.tensor(json.loads(request_body)["inputs"], dtype=torch.float32)
def predict_fn(input_data, model):
    with torch.no_grad(): return model(input_data)
def output_fn(prediction, content_type): return json.dumps({"sum": prediction.item()})
"""
SHAPES: dict[str, tuple[dict[str, str], bytes, dict[str, str], dict[str, str], Any]] = {
    "model_fn alone": (
        {"inference.py": LINEAR}, b"[[1, 2]]", {"Content-Type": JSON}, {}, "[[21.0]]"
    ),
    "all four": (
        {"inference.py": STEP_BY_STEP}, b'{"inputs": [1, 2]}', {"Content-Type": JSON}, {},
        '{"sum": 3.0}',
    ),
    "a context more": (
        {"inference.py": "def model_fn(model_dir, context): return context.model_name\n"
         "def input_fn(body, kind, context): return body.decode() + context.model_name\n"
         "def predict_fn(data, model, context): return data + model\n"
         "def output_fn(prediction, accept, context):\n"
         f"    return prediction + context.get_request_header(0, '{ATTRIBUTES}')"},
        b"a ", {"Content-Type": "text/plain", ATTRIBUTES: " b"}, {},
        "a modelmodel b",
    ),
    "transform_fn": (
        {"inference.py": "def model_fn(model_dir): return 2\n"
         "def transform_fn(model, body, kind, accept):\n"
         "    return str(model * len(body)), 'text/plain'"},
        b"abc", {"Content-Type": "application/octet-stream"}, {}, "6",
    ),
    "CSV to CSV": (
        {"inference.py": LINEAR}, b"1,2\n3,4\n", {"Content-Type": CSV, "Accept": CSV}, {},
        b"21.0\n43.0\n",
    ),
    "NPY": (
        {"inference.py": LINEAR}, npy(np.ones((1, 2), np.float32)),
        {"Content-Type": NPY, "Accept": JSON}, {}, "[[11.0]]",
    ),
    "any answer": (
        {"inference.py": LINEAR}, b"[[1, 2]]", {"Content-Type": JSON, "Accept": "*/*"},
        {"SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": CSV}, b"21.0\n",
    ),
    "first of several": (
        {"inference.py": LINEAR}, b"[[1, 2]]",
        {"content-type": JSON, "accept": "image/png, application/json"}, {}, "[[21.0]]",
    ),
    "another program": (
        {"serve_me.py": LINEAR}, b"[[1, 2]]", {"Content-Type": JSON},
        {"SAGEMAKER_PROGRAM": "serve_me.py"}, "[[21.0]]",
    ),
    "a module beside it": (
        {"inference.py": "from helper import model_fn", "helper.py": LINEAR}, b"[[1, 2]]",
        {"Content-Type": JSON}, {}, "[[21.0]]",
    ),
    "the toolkit's own": (
        {"inference.py": "from sagemaker_inference import content_types, decoder, encoder\n"
         "from sagemaker_pytorch_serving_container import (\n"
         "    default_pytorch_inference_handler as own)\n"
         "class Mine(own.DefaultPytorchInferenceHandler): pass\n"
         "def model_fn(model_dir): return Mine().VALID_CONTENT_TYPES\n"
         "def input_fn(body, kind): return decoder.decode(body, content_types.CSV)\n"
         "def predict_fn(data, model): return data * 2\n"
         "def output_fn(data, accept): return encoder.encode(data, content_types.JSON)"},
        b"1,2", {"Content-Type": CSV}, {}, "[2, 4]",
    ),
    "files of its folder": (
        {
            "inference.py": "import os, json, pathlib\n"
            "def model_fn(model_dir):\n"
            "    return json.loads(pathlib.Path(model_dir, 'code', 'w.json').read_text())\n"
            "def predict_fn(data, model):\n"
            "    return data * model + len(pathlib.Path('code/w.json').read_text())",
            "w.json": "3",
        },
        b"[1.0, 2.0]",
        {"Content-Type": JSON},
        {},
        "[4.0, 7.0]",
    ),
    "before and after": (
        {"inference.py": "seen = []\ndef pre_model_fn(model_dir): seen.append('before')\n"
         "def model_fn(model_dir): return seen\n"
         "def model_warmup_fn(model_dir, model): model.append('after')\n"
         "def predict_fn(data, model): return model"},
        b"[1]", {"Content-Type": JSON}, {}, '["before", "after"]',
    ),
    "a variable of its own": (
        {"inference.py": "import os\ndef model_fn(model_dir): return os.environ['MY_WORD']\n"
         "def predict_fn(data, model): return model"},
        b"[1]", {"Content-Type": JSON}, {"MY_WORD": "hello"}, '"hello"',
    ),
}  # fmt: skip
"""Shape of a model folder's code → its files, a request, headers, variables, and the answer."""


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_functions(ask: Ask, shape: str) -> None:
    files, body, headers, variables, expected = SHAPES[shape]
    inside = {f"code/{name}": text for name, text in files.items()}
    status, _, answer = ask(inside, body, headers=headers, **variables)
    assert (status, answer) == (200, expected)


WRONG = {
    "it raises": ("def predict_fn(data, model): raise RuntimeError('too hot')", 500, "too hot"),
    "it says how": (
        "from sagemaker_inference.errors import BaseInferenceToolkitError\n"
        "def predict_fn(data, model): raise BaseInferenceToolkitError(422, 'no cat', 'no cat')",
        422, "no cat",
    ),
    "a type that is not known": ("", 500, "Content type image/png is not supported"),
    "too few parameters": ("def predict_fn(data): return 1", 500, "takes 1 arguments but 2"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_has_status_message_and_traceback(ask: Ask, wrong: str) -> None:
    """As the toolkit answers it: what SageMaker's clients get as `OriginalMessage`."""
    code, expected, says = WRONG[wrong]
    kind = "image/png" if "type" in wrong else JSON
    status, _, answer = ask(
        {"code/inference.py": LINEAR + code}, b"[[1, 2]]", headers={"Content-Type": kind}
    )
    assert status == expected
    assert answer.splitlines()[0].startswith(says) or says in answer.splitlines()[0]
    assert "Traceback (most recent call last)" in answer


def test_requests_of_a_batch_have_answers_of_their_own(ask: Ask) -> None:
    good, bad, last = ask({"code/inference.py": LINEAR}, b"[[1, 2]]", b"{", b"[[3, 4]]")
    assert [good[2], last[2]] == ["[[21.0]]", "[[43.0]]"] and good[0] == last[0] == 200
    assert bad[0] == 500 and "Traceback" in bad[2]


def test_nothing_that_a_client_sends_is_unpickled(ask: Ask) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, ("evil",)

    body = npy(np.array([Evil()], dtype=object))
    status, _, answer = ask({"code/inference.py": LINEAR}, body, headers={"Content-Type": NPY})
    assert status == 500 and "allow_pickle=False" in answer
    assert not Path("evil").exists() and not Path("model/evil").exists()


@pytest.mark.parametrize("kind", ["torchscript", "pt2", "onnx"])
def test_a_program_needs_no_code(ask: Ask, digits_artifacts: dict[str, Path], kind: str) -> None:
    name = {"torchscript": "model.pth", "pt2": "digits.pt2", "onnx": "digits.onnx"}[kind]
    Path("model").mkdir()
    Path("model", name).write_bytes(digits_artifacts[kind].read_bytes())
    status, _, answer = ask({}, json.dumps(np.ones((2, 1, 8, 8)).tolist()).encode())
    assert status == 200, answer
    assert np.array(json.loads(answer)).shape == (2, 10)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ((), r"Exactly one .pth or .pt file is required for PyTorch models: \[\]"),
        (("a.pt", "b.pth"), "Exactly one"),
        (("model.pth",), "Please ensure model is saved using torchscript.*modelyard export"),
    ],
)
def test_what_is_not_a_program_is_not_loaded(ask: Ask, weights: tuple[str, ...], says: str) -> None:
    Path("model").mkdir()
    for name in weights:
        torch.save(torch.nn.Linear(2, 1).state_dict(), Path("model", name))
    with pytest.raises(Exception, match=says):
        ask({}, b"[[1, 2]]")


def test_vertex_answers_instances_with_predictions(ask: Ask) -> None:
    files = {"code/inference.py": LINEAR}
    bodies = (b'{"instances": [[1, 2], [3, 4]], "parameters": {}}', b'{"instances": [["x"]]}')
    good, bad = ask(files, *bodies, contract="vertex", headers={"Accept": CSV})
    assert good == (200, JSON, {"predictions": [[21.0], [43.0]]})
    assert bad[:2] == (500, JSON) and "Traceback" in bad[2]["error"]
    with pytest.raises(BadInput, match='no list "instances"'):
        ask(files, b"{}", contract="vertex")


SCORE = "import json, os\ndef init():\n    global factor\n    factor = 3\n"


@pytest.mark.parametrize(
    ("run", "body", "expected"),
    [
        ("def run(raw_data): return [factor * x for x in json.loads(raw_data)['data']]",
         b'{"data": [1, 2]}', (200, JSON, "[3, 6]")),
        ("def run(data, request_headers): return data + request_headers['Content-Type']",
         b"a ", (200, JSON, '"a application/json"')),
        ("def run(data): return os.environ['AZUREML_MODEL_DIR'].rpartition('/')[2]", b"",
         (200, JSON, '"model"')),
        ("def run(data): raise ValueError('no data')", b"",
         (500, JSON, '{"message": "no data"}')),
    ],
)  # fmt: skip
def test_azure_runs_the_entry_script(ask: Ask, run: str, body: bytes, expected: Any) -> None:
    found = ask(
        {"src/score.py": SCORE + run}, body, contract="azureml",
        AZUREML_ENTRY_SCRIPT="src/score.py",
    )  # fmt: skip
    assert found == expected


def test_variables_say_ports_workers_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    told = {
        "SAGEMAKER_BIND_TO_PORT": "9000", "SAGEMAKER_SAFE_PORT_RANGE": "9100-9200",
        "SAGEMAKER_MODEL_SERVER_WORKERS": "3", "SAGEMAKER_MODEL_SERVER_TIMEOUT": "20",
        "SAGEMAKER_MAX_PAYLOAD_IN_MB": "50", "SAGEMAKER_TS_BATCH_SIZE": "4",
        "SAGEMAKER_TS_MAX_BATCH_DELAY": "7", "SAGEMAKER_TS_MAX_WORKERS": "2",
        "AIP_HTTP_PORT": "9001", "AIP_HEALTH_ROUTE": "/h", "AIP_PREDICT_ROUTE": "/p",
        "AIP_STORAGE_URI": "/models/vertex", "AML_APP_ROOT": "/app", "WORKER_COUNT": "2",
        "AZUREML_MODEL_DIR": "/models/azure",
    }  # fmt: skip
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    amazon, google, microsoft = read_sagemaker(None), read_vertex(None), read_azureml(None)
    assert amazon.folder == Path("/opt/ml/model") and not amazon.has_several
    assert amazon.settings == {
        "port": "9000", "workers": "3", "max_request_bytes": 50 << 20,
        "management_port": 9100, "metrics_port": 9101,
    }  # fmt: skip
    assert amazon.run == {
        "batchSize": 4, "maxBatchDelay": 7, "maxWorkers": 2, "responseTimeout": 20
    }  # fmt: skip
    assert (google.folder, google.health, google.predict) == (Path("/models/vertex"), "/h", "/p")
    assert google.settings["port"] == "9001"
    assert (microsoft.folder, microsoft.reads) == (Path("/app"), (Path("/models/azure"),))
    assert (microsoft.health, microsoft.predict) == ("/", "/score")


FATE = """
import os, pathlib, time
folder = pathlib.Path(__file__).parents[1]
def model_fn(model_dir):
    while not (folder / "go").exists():
        time.sleep(0.02)
    if (folder / "bad").exists():
        raise RuntimeError("planted")
    return 0
def input_fn(body, kind): return body
def predict_fn(data, model): return os._exit(3) if data == b"die" else data
def output_fn(data, accept): return bytes(data)
"""


@pytest.mark.slow
def test_healthy_is_what_answers(tmp_path: Path) -> None:
    """Not while it loads, nor while it failed, nor while its worker is dead; 200 afterwards."""
    folder = write_folder(tmp_path / "model", {"code/inference.py": FATE, "bad": ""})
    with (
        container("sagemaker", folder, tmp_path / "state", {}) as amazon,
        ThreadPoolExecutor() as threads,
    ):
        amazon.wait_for(503, says="model: no worker is ready")
        (folder / "go").touch()
        amazon.wait_for(503, says="RuntimeError: planted")
        (folder / "bad").unlink()
        amazon.wait_for(200)
        assert amazon.client.post("/invocations", content=b"hello").content == b"hello"
        assert amazon.client.get("/invocations").status_code == 405
        (folder / "go").unlink()  # the next worker loads for as long as we look
        dying = threads.submit(amazon.client.post, "/invocations", content=b"die")
        amazon.wait_for(503)
        (folder / "go").touch()
        assert dying.result().status_code in (400, 500)
        amazon.wait_for(200)
        assert amazon.client.post("/invocations", content=b"again").content == b"again"


PLANTED = {
    "a syntax error": ("def model_fn(model_dir) return 1", "SyntaxError"),
    "no weights": (
        "import torch\ndef model_fn(model_dir): return torch.load(model_dir + '/model.pth')",
        "No such file or directory",
    ),
    "a package that is not here": ("import no_such_package", "No module named 'no_such_package'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED)
def test_what_is_wrong_is_told(tmp_path: Path, plant: str) -> None:
    code, says = PLANTED[plant]
    folder = write_folder(tmp_path / "model", {"code/inference.py": code})
    with container("sagemaker", folder, tmp_path / "state", {}) as amazon:
        amazon.wait_for(503, says=says)
        assert amazon.client.post("/invocations", content=b"[1]").status_code == 503


@pytest.mark.slow
def test_models_come_and_go(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name, code in {"a": LINEAR, "b": STEP_BY_STEP, "bad": "1 / 0"}.items():
        write_folder(models / name, {"code/inference.py": code})
    several = {"SAGEMAKER_MULTI_MODEL": "true"}
    with container("sagemaker", models, tmp_path / "state", several) as amazon:
        client = amazon.client

        def load(name: str, url: str | None = None) -> tuple[int, Any]:
            told = {"model_name": name, "url": url or str(models / name)}
            answer = client.post("/models", json=told)
            return answer.status_code, answer.json()

        amazon.wait_for(200)
        assert client.get("/models").json() == {"models": []}
        registered = 'Model "a" Version: 1.0 registered with 1 initial workers'
        assert load("a") == (200, {"status": registered})
        assert load("a")[0] == 409
        assert load("b")[0] == 200
        status, said = load("bad")
        assert status == 500 and "ZeroDivisionError" in said["message"]
        assert load("banana")[0] == 404
        for outside in ("/etc", str(models / ".." / ".."), "s3://bucket/model"):
            assert load("evil", outside)[0] == 404, outside
        assert client.post("/models", content=b"{}").status_code == 400
        described = [{"modelName": name, "modelUrl": str(models / name)} for name in "ab"]
        assert client.get("/models").json() == {"models": described}
        assert client.get("/models/b").json() == described[1]
        header = {"X-Amzn-SageMaker-Target-Model": "a.tar.gz"}
        answer = client.post("/models/a/invoke", json=[[1, 2]], headers=header)
        assert answer.json() == [[21.0]]
        assert client.post("/models/b/invoke", json={"inputs": [1, 2]}).json() == {"sum": 3.0}
        assert client.post("/models/banana/invoke", json=[]).status_code == 404
        assert client.post("/invocations", json=[]).status_code == 404
        assert client.delete("/models/a").json() == {"status": 'Model "a" unregistered'}
        assert client.delete("/models/a").status_code == 404
        assert client.get("/models").json() == {"models": described[1:]}
        assert load("a")[0] == 200
        assert amazon.ping() == (200, "")


@pytest.mark.slow
@pytest.mark.parametrize("cloud", ["vertex", "azureml"])
def test_other_clouds_live(tmp_path: Path, cloud: str) -> None:
    files = {
        "code/inference.py": LINEAR,
        "score.py": SCORE + "def run(raw_data): return json.loads(raw_data) * factor",
    }
    folder = write_folder(tmp_path / "model", files)
    told = {"AIP_HEALTH_ROUTE": "/v1/health", "AIP_PREDICT_ROUTE": "/v1/endpoints/1:predict"}
    with container(cloud, folder, tmp_path / "state", told) as other:
        if cloud == "vertex":
            other.wait_for(200, "/v1/health")
            sent = {"instances": [[1, 2], [3, 4]], "parameters": {"k": 1}}
            answer = other.client.post("/v1/endpoints/1:predict", json=sent)
            assert answer.json() == {"predictions": [[21.0], [43.0]]}
            assert other.client.post("/v1/endpoints/1:predict", json=[]).status_code == 400
        else:
            other.wait_for(200, "/")
            answer = other.client.post("/score", json=[1, 2])
            assert answer.json() == [1, 2] * 3
            assert other.client.post("/score", content=b"{").json() == {
                "message": "Expecting property name enclosed in double quotes: line 1 column 2 "
                "(char 1)"
            }


def test_requirements_are_installed_by_the_users_word_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the archive names none, and the command says so."""
    files = {"code/inference.py": LINEAR, "code/requirements.txt": "no-such-package==1.0\n"}
    folder = write_folder(tmp_path / "model", files)
    monkeypatch.setattr(cli, "run_attached", lambda settings, make: 0)
    monkeypatch.setenv("MODELYARD_STATE_DIR", str(tmp_path / "state"))
    contract = read_vertex(folder)
    assert cli.run(contract, None) == 0
    assert "is not installed; --install-requirements does it" in capfd.readouterr().err
    with open_archive(tmp_path / "state" / "model_store" / "model.mar") as archive:
        assert archive.manifest.requirements_file is None
    with pytest.raises(StartError, match="no-such-package"):
        cli.run(contract, True)
