"""What others send to the container word for word: KServe's documents, its router, ModelMesh."""

import base64
import io
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from modelyard.archiver import write_archive
from plugins.cluster.tests.kserve.test_with_kserve import CONFIG, container

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed"),
    pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed"),
]
CURL = 'curl -v -H "Host: ${SERVICE_HOSTNAME}" http://${INGRESS_HOST}:${INGRESS_PORT}'
V1 = {
    "/v1/models/${MODEL_NAME}:predict -d @./mnist.json": ("predictions", 200),
    "/v1/models/mnist:explain -d @./mnist.json": ("explanations", 200),
    # Without an @ it is the file's name that curl sends.
    "/v1/models/BERTSeqClassification:predict -d ./sample_text.txt": ("code", 503),
    "/v1/models/BERTSeqClassification:explain -d ./sample_text.txt": ("code", 503),
    "/v1/models/${MODEL_NAME}:predict -d ./sample_text.txt": ("code", 503),
}
V2 = {
    "/v2/models/${MODEL_NAME}/infer -d @./tensor_conv/mnist_v2.json": ("outputs", 200),
    "/v2/models/${MODEL_NAME}/infer -d @./bytes_conv/mnist_v2_bytes.json": ("outputs", 200),
    "/v2/models/mnist/explain -d @./tensor_conv/mnist_v2.json": ("outputs", 200),
    "/v2/models/BERTSeqClassification/infer -d @./sequence_classification/bytes/bert_v2.json": (
        "outputs",
        200,
    ),
    "/v2/models/BERTSeqClassification/infer -d @./sequence_classification/tensor/bert_v2.json": (
        "outputs",
        200,
    ),
    "/v2/models/BERTSeqClassification/explain -d ./sequence_classification/bytes/bert_v2.json": (
        "code",
        503,
    ),
}
"""All different lines of KServe 0.21, docs/samples/v1beta1/torchserve: key, status of answers."""
HANDLER = """
import numpy as np
import torch
from ts.torch_handler.image_classifier import ImageClassifier


class Digits(ImageClassifier):
    @staticmethod
    def image_processing(image):
        return torch.from_numpy(np.asarray(image.convert("L"), dtype=np.float32) / 255)[None]

    def postprocess(self, data):
        return data.argmax(1).tolist()
"""
TWICE = "def handle(data, context):\n    return [2 * each for each in data or ()]\n"
MESH = """
import grpc
with grpc.insecure_channel("127.0.0.1:7070") as channel:
    for name in ("loadModel", "unloadModel", "predictModelSize", "modelSize", "runtimeStatus"):
        try:
            channel.unary_unary(f"/mmesh.ModelRuntime/{name}")(b"", timeout=10)
        except grpc.RpcError as error:
            print(error.code().name)
with grpc.insecure_channel("[::1]:7070") as channel:
    grpc.channel_ready_future(channel).result(10)
"""
BLANK = torch.zeros(28, 28)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `models`, as KServe's storage has it, and its documents' bodies."""
    folder = tmp_path_factory.mktemp("documented")
    store = folder / "models" / "model-store"
    store.mkdir(parents=True)
    (folder / "models" / "config").mkdir()
    text = CONFIG.partition("model_snapshot")[0]
    (folder / "models" / "config" / "config.properties").write_text(text)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    with warnings.catch_warnings(action="ignore"):  # TorchServe's archives hold TorchScript
        torch.jit.save(torch.jit.script(net), folder / "net.pt")
    (folder / "label").write_text(str(int(net(BLANK[None]).argmax())))
    (folder / "digits_handler.py").write_text(HANDLER)
    (folder / "twice.py").write_text(TWICE)
    for name, handler in (("mnist", "digits_handler.py"), ("BERTSeqClassification",
                          "digits_handler.py"), ("twice", "twice.py")):  # fmt: skip
        write_archive(name, version="1.0", artifact=folder / "net.pt",
                      handler=str(folder / handler), output_dir=store)  # fmt: skip
    png = io.BytesIO()
    Image.new("L", (28, 28)).save(png, "PNG")
    data = base64.b64encode(png.getvalue()).decode()
    tensor = {"name": "input-0", "shape": [1, 28, 28], "datatype": "FP32", "data": [BLANK.tolist()]}
    flat = {"name": "ids", "shape": 784, "datatype": "FP32", "data": BLANK.flatten().tolist()}
    encoded = {"name": "312a4eb0", "shape": -1, "datatype": "BYTES", "data": data}
    bodies: dict[str, Any] = {
        "mnist.json": {"instances": [{"data": data, "target": 0}]},
        "tensor_conv/mnist_v2.json": {"id": "d3b15cad", "inputs": [tensor]},
        "bytes_conv/mnist_v2_bytes.json": {"inputs": [encoded]},
        "sequence_classification/bytes/bert_v2.json": {"id": "d3b15cad", "inputs": [encoded]},
        "sequence_classification/tensor/bert_v2.json": {"id": "33abc661", "inputs": [flat]},
    }
    for name, body in bodies.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(body, indent=2) + "\n")
    return folder


@pytest.fixture(params=[(None, V1), ("kservev2", V2)], ids=["v1", "v2"])
def served(
    request: pytest.FixtureRequest, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[str], Any]]:
    envelope, lines = request.param
    if envelope:
        monkeypatch.setenv("TS_SERVICE_ENVELOPE", envelope)
    with container(folder / "models", tmp_path, "--model_name", "mnist") as join:
        yield join, lines


def run(join: list[str], folder: Path, line: str) -> tuple[int, Any]:
    script = f"{line} -s -w '\\n%{{http_code}}'"
    names = {"SERVICE_HOSTNAME": "torchserve.kserve-test.example.com", "MODEL_NAME": "mnist",
             "INGRESS_HOST": "127.0.0.1", "INGRESS_PORT": "8080"}  # fmt: skip
    ran = subprocess.run(
        [*join, "sh", "-c", script], cwd=folder, env={"PATH": "/usr/bin:/bin", **names},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    body, _, status = ran.stdout.rpartition("\n")
    return int(status), json.loads(body)


def test_kserves_documented_lines_router_and_model_mesh(
    served: tuple[list[str], Any], folder: Path
) -> None:
    join, lines = served
    label = int((folder / "label").read_text())
    for line, (key, status) in lines.items():
        code, answer = run(join, folder, CURL + line)
        assert (code, key in answer) == (status, True), (line, answer)
        if status == 200 and "explain" not in line:
            value = answer["predictions"] if key == "predictions" else answer["outputs"][0]["data"]
            assert value == [label], line
    for url in ("[::1]:8080/v2/health/ready", "[::1]:8082/metrics"):
        code = subprocess.run([*join, "curl", "-gsf", "-o", "/dev/null", url]).returncode
        assert code == 0, url
    mesh = subprocess.run([*join, sys.executable, "-c", MESH], capture_output=True, text=True)
    assert mesh.stdout.split() == ["UNIMPLEMENTED"] * 5, mesh.stderr
    if lines is V1:
        follow_the_router(join, folder, label)


def follow_the_router(join: list[str], folder: Path, label: int) -> None:
    """Send what cmd/router/main.go of KServe sends for each kind of node of an InferenceGraph."""
    sent = (
        "curl -X POST -H 'User-Agent: Go-http-client/1.1' -H 'Accept-Encoding: gzip' --compressed"
        " -H 'Content-Type: application/json' -H 'X-Request-Id: of-the-graph'"
        " http://127.0.0.1:8080/v1/models/"
    )
    # Switch and splitter pass the body on; ensemble does to each, and merges objects of JSON.
    merged = [run(join, folder, f"{sent}{name}:predict -d @./mnist.json")
              for name in ("mnist", "BERTSeqClassification")]  # fmt: skip
    assert merged == [(200, {"predictions": [label]})] * 2
    # Sequence: `$response`, with mapPredictionsToInstances.
    body = json.dumps({"instances": merged[0][1]["predictions"]})
    assert run(join, folder, f"{sent}twice:predict -d '{body}'") == (
        200,
        {"predictions": [2 * label]},
    )
    # A hard step that fails ends the graph with its status; a soft one's answer is an object too.
    for name, status in (("missing", 404), ("mnist", 503)):
        code, answer = run(join, folder, f"{sent}{name}:predict -d '{{\"instances\": [null]}}'")
        assert (code, answer["code"]) == (status, status)
