"""Mistakes that people make: each is told what was seen, what is expected and what to do next."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from modelyard.archiver.collect import ArchiveRequest, plan_archive
from modelyard.archiver.errors import CannotArchive
from modelyard.cli import main
from modelyard.serve.control.model_config import Values
from modelyard.serve.errors import BadModelConfig
from tests.serve.live import LiveServer, modelyard
from tests.shared import DIGITS

IMAGE = "image: {mode: L, size: [8, 8], mean: [0.0], std: [1.0]}"
FORM = {"content-type": "application/x-www-form-urlencoded"}
Run = Callable[..., tuple[int, str]]
"""Words of a command → its exit code and what it wrote to stderr."""

TYPOS = {
    "batchSze: 4": "batchSize",
    "batchsize: 4": "batchSize",
    "batch_size: 4": "batchSize",
    "batchBuy: length": "batchBy",
    "minWorker: 1": "minWorkers",
    "minworkers: 1": "minWorkers",
    "min_workers: 1": "minWorkers",
    "maxWorker: 1": "maxWorkers",
    "workerThread: 2": "workerThreads",
    "maxBatchDelays: 5": "maxBatchDelay",
    "jobQueSize: 5": "jobQueueSize",
    "clientTimeoutInMillis: 5": "clientTimeoutInMills",
    "responseTimeOut: 5": "responseTimeout",
    "startUpTimeout: 5": "startupTimeout",
    "deviceTyp: cpu": "deviceType",
    "explainWorker: 1": "explainWorkers",
    "retries: true": "retry",
    "artefact: a.onnx": "artifact",
    "handlers: {top_k: 3}": "handler",
    "onx: {tensorrt: true}": "onnx",
}
"""A line of model-config.yaml → the key that was meant."""
BELOW = {
    f"handler: {{{IMAGE}, topk: 3}}": "top_k",
    "handler: {imgae: {mode: L}}": "image",
    "handler: {image: {resmple: nearest}}": "resample",
    "pt2: {compil: {enable: true}}": "compile",
    "onnx: {tensort: true}": "tensorrt",
}
"""The same of what the handler reads, which a dry run finds."""


@pytest.mark.parametrize(("line", "near"), TYPOS.items())
def test_a_key_that_nothing_reads_is_refused_with_the_nearest(
    tmp_path: Path, line: str, near: str, caplog: pytest.LogCaptureFixture
) -> None:
    (config := tmp_path / "c.yaml").write_text(line)
    (handler := tmp_path / "h.py").write_text("def handle(data, context):\n    return data\n")
    with pytest.raises(CannotArchive) as refused:
        plan_archive(ArchiveRequest("m", version="1", handler=str(handler), config_file=config))
    key = line.partition(":")[0]
    said = f"{key} is not a key that the server reads; did you mean {near}?"
    assert said in str(refused.value)

    values = {key: 1}
    with pytest.raises(BadModelConfig, match="did you mean"):
        Values(values, "c.yaml").check_keys(is_sealed=True)
    Values(values, "c.yaml").check_keys(is_sealed=False)  # as torch-model-archiver writes it
    Values(values, "c.yaml", is_lenient=True).check_keys(is_sealed=True)  # as torchserve reads it
    assert [said in record.message for record in caplog.records] == [True, True]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command that starts no process to its end, here: what it imports is there already."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert isinstance(ended.value.code, int)
        return ended.value.code, capsys.readouterr().err

    return run


def archive(run: Run, folder: Path, artifact: Path, config: str, *options: str) -> str:
    """Archive the digits model with a configuration; return what the command said."""
    (file := folder / "model-config.yaml").write_text(config)
    code, said = run(
        *("archive", "m", f"--artifact={artifact}", "--handler=image_classifier"),
        *(f"--config-file={file}", f"--output-dir={folder / 'store'}", *options),
    )
    assert code == 1, said
    return said


@pytest.mark.parametrize(
    ("config", "near"),
    [
        pytest.param(*each, marks=() if "imgae" in each[0] else pytest.mark.nightly)
        for each in BELOW.items()
    ],
)
def test_what_the_handler_does_not_read_is_refused_with_the_nearest(
    run: Run, tmp_path: Path, digits_artifacts: dict[str, Path], config: str, near: str
) -> None:
    said = archive(run, tmp_path, digits_artifacts["onnx"], config)
    assert f"did you mean {near}?" in said and "expected" in said


@pytest.mark.parametrize(
    ("config", "labels", "said"),
    [
        ("handler: {a", None, "model-config.yaml is not valid YAML: line 1, column 12: expected"),
        (
            f"handler: {{{IMAGE}}}",
            {"cat": 0, "dog": 1},
            'the wrong way round: it says {"cat": 0}; expected {"0": "cat", "1": "dog"}; write',
        ),
        (
            f"handler: {{{IMAGE}}}",
            {"0": "cat", "1": "dog"},
            "names 2 of the model's 10 outputs; 2, 3, 4, 5, 6, 7, 8, 9 have none; name each of 0",
        ),
        (
            f"handler: {{{IMAGE}}}",
            {str(at): "cat" for at in range(10)},
            'names outputs 0 and 1 both "cat"',
        ),
    ],
    ids=["broken", "inverted", "short", "doubled"],
)
def test_wrong_files_are_told_at_archive_time(
    run: Run, tmp_path: Path, digits_artifacts: dict[str, Path], config: str, labels: object,
    said: str,
) -> None:  # fmt: skip
    options = []
    if labels is not None:
        (file := tmp_path / "index_to_name.json").write_text(json.dumps(labels))
        options = ["--extra-files", str(file)]
    assert said in archive(run, tmp_path, digits_artifacts["onnx"], config, *options)


def test_labels_are_counted_where_no_report_says_how_many_outputs_there_are(
    run: Run, tmp_path: Path, digits_artifacts: dict[str, Path]
) -> None:
    artifact = shutil.copy(digits_artifacts["torchscript"], tmp_path)  # without its report
    (labels := tmp_path / "index_to_name.json").write_text('{"0": "cat", "1": "dog"}')
    example = f"{DIGITS}/scans/7.png=7"
    said = archive(
        run, tmp_path, Path(artifact), f"handler: {{{IMAGE}}}",
        *("--extra-files", str(labels), "--example", example),
    )  # fmt: skip
    assert "names 2 of the model's 10 outputs" in said


COMMANDS = [
    (
        "explain m {png} -o hm.jpg",
        2,
        ["hm.jpg", "is written as .png, .html, .npy, .json", "-o hm.png"],
    ),
    (
        "serve start --port 20490 --management-port 20490",
        2,
        ["--management-port: 20490 is port, too", "a port of its own", "0 lets the system choose"],
    ),
    (
        "serve start --models digits --model-store {empty} --port 0 --management-port 0 "
        "--metrics-port 0",
        1,
        ["Model not found at: digits", "the model store {empty} holds no archives"],
    ),
    (
        "serve start --models digits --model-store {empty}/none --port 0 --management-port 0 "
        "--metrics-port 0",
        1,
        ["the model store {empty}/none is not a folder", "name another with --model-store"],
    ),
    ("export x.pt --tolerance abc", 2, ["'--tolerance'", "expected a number, got 'abc'"]),
    ("serve start --port abc", 2, ["'--port'", "expected a whole number, got 'abc'"]),
    ("serve start --port 99999", 2, ["--port: expected 65535 or less, got 99999"]),
    ("serve start --auth nver", 2, ["--auth: expected auto,", "got 'nver'; did you mean never?"]),
    (
        "archive m --archive-format zip-stor",
        2,
        ["'zip-stor' is not one of 'default', 'zip-store'", "did you mean zip-store?"],
    ),
    (
        "serve start --auth never --host 0.0.0.0",
        2,
        ["auth: never lets everybody who reaches 0.0.0.0 replace the models; give --insecure"],
    ),
    ("serve start --config {yaml}", 1, ["{yaml}: line 1, column 8: expected"]),
]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Return files and folders that commands name."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "c.yaml").write_text("port: {")
    return {
        "empty": tmp_path / "empty", "yaml": tmp_path / "c.yaml", "png": DIGITS / "scans" / "7.png"
    }  # fmt: skip


@pytest.mark.parametrize(("line", "code", "said"), COMMANDS, ids=[line for line, _, _ in COMMANDS])
def test_a_command_says_what_it_saw_and_what_to_do(
    run: Run, line: str, code: int, said: list[str], places: dict[str, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    given = [word.format(**places) for word in line.split()]
    given += ["--state-dir", str(tmp_path / "state")] if given[0] == "serve" else []
    if "--models" in given:  # a server of its own finds out
        ran = modelyard(*given)
        ended, shown = ran.returncode, ran.stderr
    else:
        ended, shown = run(*given)
    assert ended == code, shown
    for phrase in said:
        assert phrase.format(**places) in shown
    assert "Input should" not in shown and "Value error" not in shown
    assert not (tmp_path / "hm.jpg").exists()


@pytest.fixture(scope="module")
def server(shared_server: LiveServer, digits_store: Path) -> Iterator[LiveServer]:
    store = shared_server.store / "onnx.mar"
    store.unlink(missing_ok=True)  # another module's, which may be a link
    shutil.copy(digits_store / "onnx.mar", store)
    shared_server.register_all("onnx")
    yield shared_server


MULTIPART = (
    b'--b\r\nContent-Disposition: form-data; name="image"; filename="7.png"\r\n\r\nx\r\n--b--\r\n'
)
REQUESTS = [
    (
        ("POST", "/predictions/onnx", {"content-type": "multipart/form-data; boundary=b"}),
        MULTIPART,
        400,
        ['a form with the field "image"', 'expected the field "data" or "body"', "curl -T FILE"],
    ),
    (
        ("POST", "/predictions/onnx", FORM),
        b"a=b&c=d",
        400,
        ['a form with the fields "a", "c"', "expected", "curl -T FILE"],
    ),
    (
        ("POST", "/predictions/onnx", {"content-type": "application/json"}),
        b'{"image": [1, 2,}',
        400,
        ["not an image, and not JSON: ", "(char 16)", "send one file of"],
    ),
    (
        ("POST", "/prediction/onnx", {}),
        b"",
        404,
        ["no /prediction/onnx", "did you mean /predictions/onnx?", "GET /docs"],
    ),
    (
        ("GET", "/models", {}),
        b"",
        404,
        ["this API has no /models; the management API has it, on port {management}"],
    ),
    (
        ("GET", "/predictions/onnx", {}),
        b"",
        405,
        ["GET is not taken by /predictions/onnx; expected POST"],
    ),
]


@pytest.mark.parametrize(("request_", "body", "status", "said"), REQUESTS, ids=lambda each: None)
def test_an_answer_says_what_came_and_what_to_send(
    server: LiveServer, request_: tuple[str, str, dict[str, str]], body: bytes, status: int,
    said: list[str],
) -> None:  # fmt: skip
    method, path, headers = request_
    answer = server.client.request(method, path, headers=headers, content=body)
    assert answer.status_code == status
    for phrase in said:
        assert phrase.format(management=server.management.base_url.port) in answer.json()["message"]


def test_a_number_of_workers_that_cannot_be_is_told(server: LiveServer) -> None:
    answer = server.management.put("/models/onnx", params={"min_worker": "9999"})
    assert answer.json()["message"] == "min_worker: expected 1024 or less, got '9999'"


def test_https_to_a_server_without_tls_is_told(server: LiveServer) -> None:
    url = str(server.client.base_url).replace("http:", "https:")
    ran = modelyard("predict", "onnx", DIGITS / "scans" / "7.png", "--url", url)
    assert ran.returncode == 1
    assert "no TLS is spoken at" in ran.stderr
    assert f"expected its URL to begin as {server.client.base_url}" in ran.stderr
