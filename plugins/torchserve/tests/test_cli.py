"""The command `torchserve`: flags, messages, exit codes, the process it starts."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from modelyard.plugins.torchserve import launcher
from modelyard.plugins.torchserve.archiver.archive import (
    ModelArchiverConfig,
    archive_for_torchserve,
)
from plugins.torchserve.tests.live import ANY_PORTS, COMMAND, Home
from tests.serve.live import build_archive, is_alive, poll

RUNS = "TorchServe is already running, please use torchserve --stop to stop TorchServe."

AT_ANY_PORTS = "".join(f"{key}={value}\n" for key, value in ANY_PORTS.items())


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    home.stop()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("archives") / "store"
    build_archive(store, "echo")
    return store


# -- without a server --------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["-v", "--version", "--vers"])
def test_the_version(home: Home, flag: str) -> None:
    assert home.run(flag) == (0, "TorchServe Version is 0.12.0\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--start", "--stop"], "not allowed with argument"),
        (["--start", "--version"], "not allowed with argument"),
        (["--models"], "expected at least one argument"),
    ],
)
def test_wrong_usage_exits_2(home: Home, arguments: list[str], words: str) -> None:
    code, output = home.run(*arguments)
    assert code == 2
    assert words in output and "usage: torchserve" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing mandatory parameter --model-store"),
        (["--start", "--ts-c", "no.properties"], "--ts-config file not found: no.properties"),
        (["--model-store", "no"], "--model-store directory not found: no"),
        (
            ["--model-store", "store", "--workflow-store", "no"],
            "--workflow-store directory not found: no",
        ),
        (["--log-config", "no.xml"], "--log-config file not found: no.xml"),
        (
            ["--model-store", "store", "--cpp-log-config", "no.xml"],
            "--cpp-log-config file not found: no.xml",
        ),
    ],
)
def test_what_is_not_there_exits_1(home: Home, arguments: list[str], message: str) -> None:
    assert home.run(*arguments) == (1, f"{message}\n")


def test_the_configuration_file_of_the_environment_is_checked(home: Home) -> None:
    code, output = home.run("--model-store", home.store, TS_CONFIG_FILE="no.properties")
    assert (code, output) == (1, "--ts-config file not found: no.properties\n")


def test_a_temp_folder_that_is_none_is_refused(home: Home) -> None:
    code, output = home.run("--model-store", home.store, TEMP="/no/folder")
    message = "Invalid temp directory: /no/folder, please check TEMP environment variable.\n"
    assert (code, output) == (1, message)


def test_stop_without_a_server_exits_0(home: Home) -> None:
    assert home.run("--stop") == (0, "TorchServe is not currently running.\n")


def test_the_pid_file_of_a_dead_server_is_taken_away(home: Home) -> None:
    (home.temp / ".model_server.pid").write_text("999999999")
    words = "Removing orphan pid file.\nTorchServe is not currently running.\n"
    assert home.run("--stop") == (0, words)
    assert not (home.temp / ".model_server.pid").exists()


@pytest.mark.parametrize(
    "content", [str(os.getpid()), "no number", ""], ids=["a test", "no number", "empty"]
)
def test_another_process_is_never_taken_for_the_server(home: Home, content: str) -> None:
    (home.temp / ".model_server.pid").write_text(content)
    code, output = home.run("--stop")
    assert code == 0
    assert output.endswith("TorchServe is not currently running.\n")
    (home.temp / ".model_server.pid").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ("inference_address=foo", "Invalid configuration: Invalid binding address: foo"),
        ("job_queue_size=many", "Invalid configuration: job_queue_size: expected a whole number"),
        ("model_store=$$NO$$", "Invalid configuration: Invalid Environment Variable NO"),
    ],
)
@pytest.mark.parametrize(
    "attached",
    [[], pytest.param(["--foreground"], marks=pytest.mark.nightly)],
    ids=["background", "foreground"],
)
def test_a_wrong_configuration_exits_1(
    home: Home, properties: str, reason: str, attached: list[str]
) -> None:
    (home.folder / "c.properties").write_text(properties)
    code, output = home.run("--model-store", home.store, "--ts-config", "c.properties", *attached)
    assert code == 1
    assert reason in output
    assert not (home.temp / ".model_server.pid").exists()


def test_the_command_itself_loads_neither_settings_nor_a_web_framework() -> None:
    code = (
        "import modelyard.plugins.torchserve.cli, sys\n"
        "print(*{m.split('.')[0] for m in sys.modules})"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert not set(ran.stdout.split()) & {"pydantic", "yaml", "fastapi", "typer", "torch", "uvloop"}


# -- with a server -----------------------------------------------------------------------------


def test_start_serve_and_stop(home: Home, store: Path) -> None:
    home.store = store
    output = home.start("--ncs", "--models", "one=echo.mar", "two=echo")
    assert "Model server started." in output.splitlines()
    pid = home.pid
    assert launcher.is_server(pid)
    names = [model["modelName"] for model in home.get("/models").json()["models"]]
    assert names == ["one", "two"]  # before their workers have loaded

    code, said = home.run("--start", "--model-store", store)
    assert code == 1 and f"{RUNS}\n" in said
    with home.client() as client:
        answer = client.post("/predictions/two", content=b"hello")
    assert answer.status_code == 200, answer.text

    (home.folder / "key_file.json").write_text("{}")
    code, said = home.run("--stop")
    assert code == 0 and said.endswith("TorchServe has stopped.\n")
    assert not is_alive(pid)
    assert not (home.folder / "key_file.json").exists()
    assert not (home.temp / ".model_server.pid").exists()

    log = (home.logs / "ts_log.log").read_text()
    for line in (
        "Torchserve version: 0.12.0",
        f"Current directory: {home.folder}",
        f"Model Store: {store}",
        "Initial Models: one=echo.mar,two=echo",
        "Metrics mode: LOG",
        "Model API enabled: false",
    ):
        assert line in log.splitlines(), line
    assert log.rstrip().endswith("Torchserve stopped.")
    access = (home.logs / "access_log.log").read_text()
    assert '"POST /predictions/two HTTP/1.1" 200 ' in access
    assert " - /127.0.0.1:" in access
    worker = (home.logs / "model_log.log").read_text()
    assert "-one_1.0-stdout MODEL_LOG - Torch worker started." in worker
    assert not list((home.logs / "config").glob("*"))  # --ncs


@pytest.mark.parametrize(
    ("models", "missing", "attached"),
    [
        # By day a bare name is missed in an empty store, below.
        pytest.param("ehco", "ehco", [], marks=pytest.mark.nightly),
        ("echo.mar,absent.mar", "absent.mar", ["--foreground"]),
        pytest.param("x=ehco.mar", "ehco.mar", [], marks=pytest.mark.nightly),
    ],
)
def test_a_model_that_is_not_in_the_store_ends_the_start(
    home: Home, store: Path, models: str, missing: str, attached: list[str]
) -> None:
    (home.folder / "config.properties").write_text(AT_ANY_PORTS)
    flags = ["--start", "--ncs", "--models", models, *attached]
    code, output = home.run("--model-store", store, *flags)
    assert code == 1
    assert f"Model not found at: {missing}; the model store {store} holds echo.mar\n" in output
    assert "Model server started." not in output
    assert not (home.temp / ".model_server.pid").exists()


def test_a_bare_name_is_missed_in_an_empty_store_too(home: Home) -> None:
    (home.folder / "config.properties").write_text(AT_ANY_PORTS)
    code, output = home.run("--ncs", "--model-store", home.store, "--models", "echo")
    assert code == 1
    assert f"Model not found at: echo; the model store {home.store} holds no archives" in output


def test_a_server_is_healthy_without_models_and_not_when_all_of_the_start_failed(
    home: Home, store: Path
) -> None:
    (home.store / "broken.mar").write_bytes(b"no archive")
    home.start("--ncs", "--models", "broken.mar", properties={"enable_model_api": "true"})
    assert home.get("/ping", "inference").json() == {"status": "Unhealthy"}
    assert home.get("/health/ready", "inference").status_code == 503
    (home.store / "echo.mar").symlink_to(store / "echo.mar")
    with home.client("management") as management:
        added = management.post("/models?url=echo&initial_workers=1&synchronous=true")
        assert added.status_code == 200, added.text
        assert home.get("/ping", "inference").json() == {"status": "Healthy"}
        management.delete("/models/echo")
        assert home.get("/ping", "inference").json() == {"status": "Healthy"}


def test_a_server_whose_only_model_cannot_load_is_unhealthy(home: Home, tmp_path: Path) -> None:
    (tmp_path / "h.py").write_text("def handle(data, context):\n    raise OSError('no weights')\n")
    archive_for_torchserve(
        ModelArchiverConfig("only", str(tmp_path / "h.py"), "1.0", export_path=str(home.store)),
        warn=pytest.fail,
    )
    home.start("--ncs", "--models", "only", properties={"default_workers_per_model": "1"})

    def is_unhealthy() -> bool:
        return home.get("/ping", "inference").status_code == 500

    poll(is_unhealthy, "the server says that it is unhealthy")
    # Scripts read up to the exception's name to have each try's whole traceback.
    tries = home.output.read_text().split("Backend worker error: only 1.0: the traceback above")
    assert len(tries) > 3
    assert [lines.count("OSError: no weights") for lines in tries[:-1]] == [1] * (len(tries) - 1)


def test_a_short_key_ends_the_start_before_the_ports_are_named(home: Home) -> None:
    command = ("openssl req -x509 -newkey rsa:1024 -nodes -keyout key.pem -out cert.pem -subj "
               "/CN=localhost")  # fmt: skip
    subprocess.run(command.split(), cwd=home.folder, check=True, capture_output=True)
    (home.folder / "config.properties").write_text(
        f"{AT_ANY_PORTS}inference_address=https://127.0.0.1:0\n"
        "certificate_file=cert.pem\nprivate_key_file=key.pem\n"
    )
    code, output = home.run("--ncs", "--model-store", home.store)
    assert code == 1
    assert "too short to be safe; expected an RSA key of 2048 bits or more" in output
    assert "Inference address" not in output


def test_a_port_that_is_taken_exits_1(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (home.folder / "c.properties").write_text(f"inference_address=http://127.0.0.1:{port}")
        code, output = home.run("--model-store", home.store, "--ts-config", "c.properties")
    assert code == 1
    assert f"port {port} on 127.0.0.1 is in use" in output
    assert not (home.temp / ".model_server.pid").exists()


def test_a_start_beside_another_leaves_that_ones_pid_file(home: Home) -> None:
    home.start("--ncs")
    pid = home.pid
    (home.temp / ".model_server.pid").unlink()  # as if both had looked at the same time
    code, output = home.run("--ncs", "--model-store", home.store)
    assert code == 1 and f"{RUNS}\n" in output
    (home.temp / ".model_server.pid").write_text(str(pid))


def test_in_the_foreground_the_command_is_the_server(home: Home) -> None:
    (home.folder / "config.properties").write_text(AT_ANY_PORTS)
    process = subprocess.Popen(
        [*COMMAND, "--foreground", "--ncs", "--model-store", str(home.store)],
        cwd=home.folder,
        env=home.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        assert any(line == "Model server started.\n" for line in process.stdout)
        assert home.pid == process.pid
        code, said = home.run("--stop", "--foreground")
        assert (code, said) == (0, "")
        assert process.wait(10) == 0
        assert "Torchserve stopped." in process.stdout.read()


def test_a_reader_that_stopped_reading_holds_up_nothing(home: Home) -> None:
    (home.folder / "config.properties").write_text(f"{AT_ANY_PORTS}disable_system_metrics=true")
    process = subprocess.Popen(
        [*COMMAND, "--ncs", "--model-store", str(home.store)],
        cwd=home.folder,
        env=home.environment(),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.wait(30) == 0
        path = f"/{'x' * 4000}"  # in the access log: more than the pipe holds
        with home.client() as client:
            assert {client.get(path).status_code for _ in range(40)} == {404}
        log = home.logs / "access_log.log"
        poll(lambda: log.read_text().count(path) == 40, "the file has every line")
        assert home.run("--stop") == (0, "TorchServe has stopped.\n")


def test_a_server_that_got_sigterm_leaves_nothing_behind(home: Home) -> None:
    home.start("--ncs")
    pid = home.pid
    os.kill(pid, signal.SIGTERM)
    poll(lambda: not launcher.is_server(pid), "the server ends")
    assert not (home.temp / ".model_server.pid").exists()
    assert home.run("--stop") == (0, "TorchServe is not currently running.\n")


def test_each_api_has_its_own_kind_of_address(home: Home) -> None:
    path = home.folder / "m.sock"
    addresses = {
        "inference_address": "https://127.0.0.1:0",
        "management_address": f"unix:{path}",
        "metrics_address": "http://localhost:0",
    }
    home.start("--ncs", properties=addresses)
    about = home.about
    assert httpx.get(f"{about['inference']}/ping", verify=False).json() == {"status": "Healthy"}
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
        assert client.get("http://any/models").json() == {"models": []}
    assert httpx.get(f"{about['metrics']}/metrics").status_code == 200

    port = int(about["inference"].rpartition(":")[2])
    with pytest.raises(httpx.RemoteProtocolError):  # the connection closes without an answer
        httpx.get(f"http://127.0.0.1:{port}/ping")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", port)) as tcp, pytest.raises(ssl.SSLError):
        old.wrap_socket(tcp)
    home.stop()
    assert not path.exists()


@pytest.mark.nightly
def test_a_strict_start_asks_to_come_again_for_each_model(home: Home) -> None:
    build_archive(home.store, "gated", config="handler: {gate: /nowhere}\n")
    home.start(
        properties={"strict_start": "true", "load_models": "gated.mar"},
        TS_OPEN_INFERENCE_PROTOCOL="oip",
    )
    paths = ["/v1/models/gated", "/v2/models/gated", "/v2/models/gated/versions/1.0"]
    with home.client() as client:
        for path in [*paths, *(f"{path}/ready" for path in paths[1:])]:
            answer = client.get(path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), path
