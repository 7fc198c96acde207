"""Triton's extensions by HTTP and gRPC, and its tools' own sequences."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict

from modelyard.archiver import write_archive
from modelyard.plugins.grpc.protos import message
from modelyard.serve.errors import WrongUsage
from modelyard.serve.settings import load_settings
from tests.serve.live import LiveServer, build_archive, descendants, running

ROOT = Path(__file__).parents[3]
SERVICE = "/inference.GRPCInferenceService/"
_PYTHON = ROOT / ".peers" / "triton" / "bin" / "python"
TRITON = os.environ.get("TRITON_PYTHON") or (str(_PYTHON) if _PYTHON.exists() else None)
IMAGE = np.random.default_rng(7).random((2, 1, 8, 8)).astype(np.float32)
MEMORY = "/v2/systemsharedmemory"


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, digits_artifacts: dict[str, Path]
) -> Iterator[LiveServer]:
    """Start a server that lets its clients use shared memory."""
    folder = tmp_path_factory.mktemp("triton")
    (store := folder / "store").mkdir()
    build_archive(store, "tensors")
    # perf_analyzer reads statistics of versions that are whole numbers, as Triton's are.
    write_archive(
        "digits", version="1", artifact=digits_artifacts["onnx"], handler="base_handler",
        output_dir=store,
    )  # fmt: skip
    (folder / "config.yaml").write_text("{shared_memory: true, allow_load: true}")
    with running(folder / "state", store, f"--config={folder / 'config.yaml'}") as server:
        server.register_all("digits.mar", "tensors.mar", initial_workers=1)
        yield server


def call(server: LiveServer, name: str, /, **fields: Any) -> Any:
    request, answer = (message(f"inference.{name}{end}") for end in ("Request", "Response"))
    with grpc.insecure_channel(server.grpc) as channel:
        method = channel.unary_unary(
            SERVICE + name, request.SerializeToString, answer.FromString
        )  # fmt: skip
        return method(fields.pop("request", None) or request(**fields), timeout=20)


def as_dict(answer: Any) -> Any:
    return MessageToDict(answer, preserving_proto_field_name=True)


@pytest.fixture
def region() -> Iterator[Callable[..., Path]]:
    """Return what makes a file of /dev/shm, which goes with the test."""
    made: list[Path] = []

    def make(name: str, data: bytes) -> Path:
        file = Path("/dev/shm") / f"triton-test-{os.getpid()}-{name}"
        file.write_bytes(data)
        made.append(file)
        return file

    yield make
    for file in made:
        file.unlink(missing_ok=True)


def test_a_models_configuration(server: LiveServer) -> None:
    found = server.client.get("/v2/models/digits/config").json()
    assert (found["name"], found["platform"], found["max_batch_size"]) == ("digits", "pytorch", 8)
    assert found["input"] == [{"name": "image", "data_type": "TYPE_FP32", "dims": [1, 8, 8]}]
    assert found["output"] == [{"name": "logits", "data_type": "TYPE_FP32", "dims": [10]}]
    assert found["dynamic_batching"]["preferred_batch_size"] == [8]
    assert server.client.get("/v2/models/digits/versions/1/config").json() == found
    config = call(server, "ModelConfig", name="digits", version="1").config
    assert config.max_batch_size == 8 and list(config.input[0].dims) == [1, 8, 8]
    # What states no inputs, states no batch.
    assert server.client.get("/v2/models/tensors/config").json()["max_batch_size"] == 0
    for path in ("nothing/config", "digits/versions/9/config", "digits/versions/9/stats"):
        assert server.client.get(f"/v2/models/{path}").status_code == 404


def infer(server: LiveServer, **more: Any) -> httpx.Response:
    """Ask for the digits of two images."""
    data = IMAGE.reshape(-1).tolist()
    image = {"name": "image", "shape": [2, 1, 8, 8], "datatype": "FP32", "data": data}
    return server.client.post("/v2/models/digits/infer", json={"inputs": [image], **more})


def test_statistics_count_what_was_asked(server: LiveServer) -> None:
    def read() -> Any:
        (found,) = server.client.get("/v2/models/digits/stats").json()["model_stats"]
        return found

    before = read()
    for _ in range(5):
        assert infer(server).status_code == 200
    assert infer(server, inputs=[]).status_code == 400
    after = read()
    grown = {name: after[name] - before[name] for name in ("inference_count", "execution_count")}
    assert grown == {"inference_count": 11, "execution_count": 6}  # five of two rows, one refused
    own, old = after["inference_stats"], before["inference_stats"]
    for name, count in (("success", 5), ("fail", 1), ("queue", 6), ("compute_infer", 6)):
        assert own[name]["count"] - old[name]["count"] == count, name
        assert own[name]["ns"] > old[name]["ns"]
    parts = [own[f"compute_{part}"]["count"] for part in ("input", "infer", "output")]
    assert len(set(parts)) == 1, "perf_analyzer ends where they differ"
    batches = {each["batch_size"]: each["compute_infer"] for each in after["batch_stats"]}
    assert sum(each["count"] for each in batches.values()) == after["execution_count"]
    assert batches[2]["count"] >= 5
    (model,) = call(server, "ModelStatistics", name="digits").model_stats
    assert model.inference_stats.success.ns == own["success"]["ns"]
    names = {each["name"] for each in server.client.get("/v2/models/stats").json()["model_stats"]}
    assert names == {"digits", "tensors"}


def test_settings_are_shown_and_not_changed(server: LiveServer) -> None:
    traces = server.client.get("/v2/trace/setting")
    assert traces.json() == {"trace_level": ["OFF"], "trace_mode": "opentelemetry"}
    assert server.client.post("/v2/models/digits/trace/setting", json={}).json() == traces.json()
    assert server.client.get("/v2/models/nothing/trace/setting").status_code == 404
    logs = server.client.get("/v2/logging").json()
    assert logs["log_info"] is True and logs["log_verbose_level"] == 0
    assert as_dict(call(server, "LogSettings"))["settings"]["log_info"] == {"bool_param": True}
    for path, name in (("/v2/logging", "log_info"), ("/v2/trace/setting", "trace_rate")):
        answer = server.client.post(path, json={name: None})
        assert answer.status_code == 403 and name in answer.json()["error"]
    with pytest.raises(grpc.RpcError) as raised:
        call(server, "TraceSetting", settings={"trace_rate": {"value": ["1"]}})
    assert raised.value.code() == grpc.StatusCode.PERMISSION_DENIED


def register(server: LiveServer, name: str, file: Path, size: int, offset: int = 0) -> None:
    body = {"key": f"/{file.name}", "offset": offset, "byte_size": size}
    answer = server.client.post(f"{MEMORY}/region/{name}/register", json=body)
    assert answer.status_code == 200, answer.text


def shared(name: str, size: int, offset: int = 0) -> dict[str, Any]:
    place = {"shared_memory_region": name, "shared_memory_byte_size": size}
    return {**place, "shared_memory_offset": offset} if offset else place


@pytest.fixture
def regions(server: LiveServer, region: Callable[..., Path]) -> Iterator[tuple[Path, Path]]:
    """Register one region with images, from its 16th byte, and one for outputs."""
    given, taken = region("in", b"\1" * 16 + IMAGE.tobytes()), region("out", bytes(200))
    register(server, "in", given, IMAGE.nbytes, 16)
    register(server, "out", taken, 100, 100)
    yield given, taken
    assert server.client.post(f"{MEMORY}/unregister").status_code == 200
    assert server.client.get(f"{MEMORY}/status").json() == []


def from_memory(server: LiveServer, place: Any = None, **parameters: Any) -> httpx.Response:
    given = {"name": "image", "shape": [2, 1, 8, 8], "datatype": "FP32"}
    asked = {"inputs": [{**given, "parameters": shared("in", IMAGE.nbytes) | parameters}]}
    if place is not None:
        asked["outputs"] = [{"name": "logits", "parameters": place}]
    return server.client.post("/v2/models/digits/infer", json=asked)


def test_tensors_from_and_into_shared_memory(
    server: LiveServer, regions: tuple[Path, Path]
) -> None:
    logits = np.array(infer(server).json()["outputs"][0]["data"], np.float32)
    assert np.allclose(from_memory(server).json()["outputs"][0]["data"], logits, atol=1e-5)
    answer = from_memory(server, shared("out", 80, 12))
    assert answer.status_code == 200, answer.text
    head = int(answer.headers["inference-header-content-length"])
    (output,) = json.loads(answer.content[:head])["outputs"]
    assert output == {"name": "logits", "datatype": "FP32", "shape": [2, 10]}
    assert len(answer.content) == head
    data = regions[1].read_bytes()
    assert np.allclose(np.frombuffer(data[112:192], np.float32), logits, atol=1e-5)
    assert not any(data[:112] + data[192:]), "nothing else was written"

    regions[1].write_bytes(bytes(200))
    request = message("inference.ModelInferRequest")(model_name="digits")
    tensor = request.inputs.add(name="image", datatype="FP32", shape=[2, 1, 8, 8])
    output = request.outputs.add(name="logits")
    for of, place in ((tensor, shared("in", IMAGE.nbytes)), (output, shared("out", 80))):
        for name, value in place.items():
            kind = "string_param" if isinstance(value, str) else "int64_param"
            setattr(of.parameters[name], kind, value)
    said = call(server, "ModelInfer", request=request)
    assert list(said.raw_output_contents) == [b""] and list(said.outputs[0].shape) == [2, 10]
    data = regions[1].read_bytes()
    assert np.allclose(np.frombuffer(data[100:180], np.float32), logits, atol=1e-5)
    status = as_dict(call(server, "SystemSharedMemoryStatus"))["regions"]
    assert status["out"] == {
        "name": "out", "key": f"/{regions[1].name}", "offset": "100", "byte_size": "100",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "place", "status", "words"),
    [
        ({"shared_memory_region": "none"}, None, 404, "register it"),
        ({"shared_memory_offset": 1}, None, 400, "which has 512 bytes"),
        ({"shared_memory_offset": -1}, None, 400, "shared_memory_offset"),
        ({"shared_memory_byte_size": 1 << 62}, None, 400, "shared_memory_byte_size"),
        ({"shared_memory_byte_size": "8"}, None, 400, "shared_memory_byte_size"),
        ({"shared_memory_byte_size": 508}, None, 400, "508 bytes"),
        ({"binary_data_size": 8}, None, 400, "and is in shared memory"),
        ({}, shared("out", 79), 400, "has 80 bytes"),
        ({}, shared("out", 80, 21), 400, "which has 100 bytes"),
        ({}, shared("none", 80), 404, "register it"),
        ({}, {**shared("out", 80), "classification": 3}, 400, "classes"),
    ],
)
def test_places_that_are_refused(
    server: LiveServer, regions: tuple[Path, Path], parameters: Any, place: Any, status: int,
    words: str,
) -> None:  # fmt: skip
    answer = from_memory(server, place, **parameters)
    assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text
    assert not any(regions[1].read_bytes())


def test_a_file_that_is_cut_short_ends_nothing(
    server: LiveServer, regions: tuple[Path, Path]
) -> None:
    os.truncate(regions[1], 10)
    answer = from_memory(server, shared("out", 80))
    assert answer.status_code == 400 and "has 10 bytes by now" in answer.json()["error"]
    assert regions[1].stat().st_size == 10
    os.truncate(regions[0], 10)
    assert from_memory(server).status_code == 400
    assert infer(server).status_code == 200


@pytest.mark.parametrize(
    ("key", "size", "status", "words"),
    [
        ("../etc/passwd", 8, 400, "the name of a file"),
        ("..", 8, 400, "the name of a file"),
        ("//x", 8, 400, "the name of a file"),
        (None, 8, 400, "the name of a file"),
        ("LINK", 8, 400, "cannot be opened"),
        ("PIPE", 8, 400, "is not a file"),
        ("OTHERS", 8, 400, "belongs to user 1234"),
        ("FILE", 17, 400, "has 16 bytes"),
        ("FILE", (1 << 64) - 1, 400, "byte_size"),
        ("FILE", 0, 400, "byte_size"),
        ("FILE", True, 400, "byte_size"),
        ("FILE", 1 << 40, 400, "request_memory_bytes"),
        ("FILE", 16, 200, ""),
    ],
)
def test_files_that_are_refused(
    server: LiveServer, region: Callable[..., Path], tmp_path: Path, key: str | None, size: int,
    status: int, words: str,
) -> None:  # fmt: skip
    file = region("file", bytes(16))
    if key in ("LINK", "PIPE"):
        file.unlink()
        if key == "LINK":
            file.symlink_to("/etc/passwd")
        else:
            os.mkfifo(file)
    if key == "OTHERS":
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(file, 1234, 0)
    own = file.name if key in ("LINK", "PIPE", "OTHERS", "FILE") else key
    body = {"key": own, "byte_size": size}
    answer = server.client.post(f"{MEMORY}/region/one/register", json=body)
    assert answer.status_code == status and words in answer.text, answer.text
    if status == 200:
        again = server.client.post(f"{MEMORY}/region/one/register", json=body)
        assert again.status_code == 409
        proxied = server.client.post(f"{MEMORY}/region/two/register", json=body,
                                     headers={"Via": "1.1 edge", **token(server)})  # fmt: skip
        assert proxied.status_code == 403 and "proxy" in proxied.json()["error"]
        server.client.post(f"{MEMORY}/unregister")
    files = [os.path.realpath(each) for each in Path(f"/proc/{server.pid}/fd").iterdir()]
    assert not [each for each in files if file.name in each], "none stays open"


def token(server: LiveServer) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.inference_token}"}


def test_cuda_is_refused_by_name(server: LiveServer) -> None:
    url = "/v2/cudasharedmemory"
    assert server.client.get(f"{url}/status").json() == []
    answer = server.client.post(f"{url}/region/x/register", json={"byte_size": 8})
    assert answer.status_code == 400 and "CUDA" in answer.json()["error"]
    with pytest.raises(grpc.RpcError) as raised:
        call(server, "CudaSharedMemoryRegister", name="x", byte_size=8)
    assert "CUDA" in raised.value.details()


def test_workers_see_no_region(server: LiveServer, regions: tuple[Path, Path]) -> None:
    pids = server.worker_pids("digits")
    assert pids and set(pids) <= descendants(server.pid)
    for pid in pids:
        seen = [os.path.realpath(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
        assert not [each for each in seen if regions[0].name in each]
        if not Path(f"/proc/{pid}/root/dev/shm").samefile("/dev/shm"):
            assert not Path(f"/proc/{pid}/root/dev/shm", regions[0].name).exists()


def test_shared_memory_is_for_this_machine_and_off_unless_it_is_asked_for(
    shared_server: LiveServer, region: Callable[..., Path]
) -> None:
    body = {"key": region("off", bytes(16)).name, "byte_size": 16}
    answer = shared_server.client.post(f"{MEMORY}/region/one/register", json=body)
    assert answer.status_code == 403 and "shared_memory" in answer.json()["error"]
    assert "system_shared_memory" not in shared_server.client.get("/v2").json()["extensions"]
    with pytest.raises(WrongUsage, match="name files of this machine"):
        load_settings({"host": "0.0.0.0", "shared_memory": True}, environment={})


# -- its tools ------------------------------------------------------------------------------------

PERF_ANALYZER = """\
GET /v2/models/digits
GET /v2/models/digits/config
POST /v2/systemsharedmemory/unregister
POST /v2/cudasharedmemory/unregister
POST /v2/systemsharedmemory/region/logits/register
POST /v2/systemsharedmemory/region/image_0_0/register
GET /v2
GET /v2/models/digits/stats
POST /v2/models/digits/infer
POST /v2/models/digits/infer
GET /v2/models/digits/stats
POST /v2/systemsharedmemory/unregister
POST /v2/cudasharedmemory/unregister
"""
"""What perf_analyzer 2.46 sent with `--request-count 2 --shared-memory system`, read from a proxy;
without shared memory the lines that name it are missing."""
BY_GRPC = {
    "GET /v2/models/digits": ("ModelMetadata", {"name": "digits"}),
    "GET /v2/models/digits/config": ("ModelConfig", {"name": "digits"}),
    "GET /v2": ("ServerMetadata", {}),
    "GET /v2/models/digits/stats": ("ModelStatistics", {"name": "digits"}),
    "POST /v2/systemsharedmemory/unregister": ("SystemSharedMemoryUnregister", {}),
    "POST /v2/cudasharedmemory/unregister": ("CudaSharedMemoryUnregister", {}),
}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_steps_of_perf_analyzer(
    server: LiveServer, region: Callable[..., Path], protocol: str
) -> None:
    files = {
        "image_0_0": region("image", IMAGE[:1].tobytes()),
        "logits": region("logits", bytes(40)),
    }
    counts = []
    for line in PERF_ANALYZER.splitlines():
        method, path = line.split(" ")
        if path.endswith("/register"):
            name = path.split("/")[-2]
            register(server, name, files[name], files[name].stat().st_size)
        elif path.endswith("/infer"):
            given = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32",
                     "parameters": shared("image_0_0", 256)}  # fmt: skip
            wanted = {"name": "logits", "parameters": shared("logits", 40)}
            body = {"id": "0", "inputs": [given], "outputs": [wanted]}
            assert server.client.post(path, json=body).status_code == 200
        elif protocol == "grpc":
            name, fields = BY_GRPC[line]
            found = as_dict(call(server, name, **fields))
            if name == "ModelStatistics":
                stats = found["model_stats"][0]
                counts.append([int(stats.get(f"{each}_count", 0)) for each in COUNTED])
        else:
            answer = server.client.request(method, path)
            assert answer.status_code == 200, answer.text
            if path.endswith("/stats"):
                counts.append(
                    [answer.json()["model_stats"][0][f"{each}_count"] for each in COUNTED]
                )
    assert [after - before for before, after in zip(*counts, strict=True)] == [2, 2]
    assert any(files["logits"].read_bytes())


COUNTED = ("inference", "execution")


@pytest.mark.nightly
@pytest.mark.skipif(not TRITON, reason="`scripts/peers triton` has not been run")
def test_every_call_of_tritonclient(server: LiveServer) -> None:
    """All 25 calls of each of its four clients, right or refused by name."""
    clients = Path(__file__).with_name("clients.py")
    host, port = server.address
    ran = subprocess.run(
        [str(TRITON), clients, f"{host}:{port}", server.grpc, server.token],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert len(found) == 100
    assert {name: each for name, each in found.items() if each is not True} == {}
