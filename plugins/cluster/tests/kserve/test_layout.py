"""What the entry point for KServe makes of a folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from modelyard.plugins.cluster.kserve.cli import contained, count_workers, own_settings
from modelyard.plugins.cluster.kserve.layout import Archives, TorchServes, find_layout
from modelyard.plugins.torchserve.properties import parse_properties
from modelyard.serve.errors import StartError
from tests.serve.live import build_archive, poll

ANY_8082 = "http://[::]:8082"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def find(folder: Path, name: str | None = "digits") -> Archives | TorchServes:
    return find_layout(folder, name, folder.parent / "scratch")


def test_one_archive_has_the_services_name_and_several_their_own(folder: Path) -> None:
    build_archive(folder, "echo")
    assert find(folder) == Archives(folder, ("digits=echo.mar",))
    assert find(folder, None) == Archives(folder, ("echo.mar",))
    build_archive(folder, "echo", name="second")
    assert find(folder) == Archives(folder, ("ALL",))


def test_an_unpacked_archive_is_one(folder: Path) -> None:
    archive = build_archive(folder.parent, "echo")
    shutil.unpack_archive(archive, folder, "zip")
    assert find(folder) == Archives(folder.parent, ("digits=models",))


def test_a_folder_in_the_folder_counts_where_it_is_all_there_is(folder: Path) -> None:
    """As of a tar that was made of a folder."""
    inner = folder / "packed"
    inner.mkdir()
    build_archive(inner, "echo")
    shutil.rmtree(inner / ".build")
    assert find(folder) == Archives(inner, ("digits=echo.mar",))
    (folder / "README").write_text("")
    with pytest.raises(StartError, match="holds README, packed; expected archives"):
        find(folder)


def test_torchserves_folders_are_served_by_the_drop_in_where_kserve_calls(folder: Path) -> None:
    (folder / "config").mkdir()
    config = folder / "config" / "config.properties"
    config.write_text(
        "inference_address=http://0.0.0.0:8085\nmanagement_address=http://0.0.0.0:8085\n"
        "grpc_inference_port=7070\nenable_envvars_config=true\n"
        'model_snapshot={"name":"startup.cfg","modelCount":0,"models":{}}\n'
    )
    with pytest.raises(StartError, match="no folder model-store"):
        find(folder)
    (folder / "model-store").mkdir()
    with pytest.raises(StartError, match=r"model-store is empty; expected the archives"):
        find(folder)
    build_archive(folder / "model-store", "echo")
    assert find(folder) == TorchServes(config, folder / "model-store")
    given = parse_properties(config.read_text())
    found = contained(given, 8080, 5, 2)
    assert found["inference_address"] == "http://[::]:8080"
    assert found["management_address"] == "http://127.0.0.1:8081"
    assert found["disable_token_authorization"] == "true"
    assert found["default_workers_per_model"] == "2"
    kept = ("grpc_inference_port", "enable_envvars_config", "model_snapshot")
    assert {key: found[key] for key in kept} == {key: given[key] for key in kept}
    # Of KServe's protocol v1, and to end as our own server does there; the file's words come first.
    unsaid = {"service_envelope": "kserve", "drain_delay_s": "5", "metrics_address": ANY_8082}
    assert found.items() >= unsaid.items()
    said = {
        "disable_token_authorization": "false",
        "service_envelope": "kservev2",
        "drain_delay_s": "1",
    }
    assert contained({**given, **said}, 8080, 5).items() >= said.items()
    assert "load_models" not in found
    assert contained({}, 8080, 5)["load_models"] == "all"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "holds nothing; expected archives"),
        (["weights.bin"], "holds weights.bin; expected archives"),
        (["a.onnx", "b.pt"], "holds a.onnx, b.pt: it cannot be known which one is meant"),
    ],
)
def test_what_is_no_model_is_named(folder: Path, files: list[str], said: str) -> None:
    for file in files:
        (folder / file).write_bytes(b"")
    with pytest.raises(StartError, match=said):
        find(folder)
    with pytest.raises(StartError, match="there is no folder"):
        find(folder / "nowhere")


def test_management_alone_asks_for_tokens_unless_a_variable_says_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = own_settings(Archives(folder, ("ALL",)), 8080)
    assert (settings.host, settings.auth, settings.port) == ("::", "management", 8080)
    assert not settings.asks_for_tokens
    monkeypatch.setenv("MODELYARD_AUTH", "always")
    assert own_settings(Archives(folder, ("ALL",)), 8080).asks_for_tokens


@pytest.mark.parametrize(
    ("said", "workers"), [(None, None), (0, None), (1, 1), (2, 2), (100, 2)], ids=str
)
def test_workers_are_what_kserve_says_of_concurrency_up_to_the_cores(
    said: int | None, workers: int | None
) -> None:
    assert count_workers(said, 2) == workers


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("load_models=missing.mar", "Model not found at: missing.mar"),
        ("load_models=a=echo.mar,b=echo.mar,a=again.mar", "are both version 1.0 of model a"),
        ("default_workers_per_model=many", "expected a whole number from 0 up, got 'many'"),
    ],
)
def test_torchserves_folders_that_cannot_be_served_end_the_start(
    folder: Path, tmp_path: Path, config: str, said: str
) -> None:
    (folder / "config").mkdir()
    (folder / "config" / "config.properties").write_text(f"{config}\n")
    made = build_archive(folder / "model-store", "echo")
    shutil.copy(made, made.with_name("again.mar"))
    environment = {**os.environ, "MODELYARD_STATE_DIR": str(tmp_path / "state"),
                   "TEMP": str(tmp_path), "PORT": "1"}  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-m", "modelyard.cli", "kserve", "--model_dir", folder.name,
         "--http_port", "0"],
        cwd=folder.parent, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 1
    assert said in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stdout + ran.stderr
    assert not (tmp_path / "state" / "server.json").exists()


def test_an_artifact_without_an_archive_is_served_and_nothing_written_beside_it(
    digits_artifacts: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    shutil.copy(digits_artifacts["onnx"], folder)
    folder.chmod(0o555)
    environment = {
        **os.environ,
        "PORT": "1",
        "MODELYARD_STATE_DIR": str(tmp_path / "state"),
        "MODELYARD_HOST": "127.0.0.1",
        "MODELYARD_MANAGEMENT_PORT": "0",
        "MODELYARD_METRICS_PORT": "0",
        "MODELYARD_WORKERS": "1",
        "MODELYARD_DRAIN_DELAY_S": "0",
    }
    arguments = ["--model_name", "digits", "--predictor_host", "x.y", "--http_port", "0"]
    server = subprocess.Popen(
        [sys.executable, "-m", "modelyard.cli", "kserve", "--model_dir", folder, *arguments],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        about = tmp_path / "state" / "server.json"

        def address() -> str | None:
            assert server.poll() is None, server.stderr and server.stderr.read()
            return json.loads(about.read_text())["inference"] if about.exists() else None

        with httpx.Client(base_url=poll(address, "its port is open", 60)) as client:
            poll(lambda: client.get("/v2/health/ready").status_code == 200, "it is ready", 60)
            row = {"image": [[[0.0] * 8] * 8]}
            answer = client.post("/v1/models/digits:predict", json={"instances": [row, row]})
            assert answer.status_code == 200, answer.text
            assert [len(each) for each in answer.json()["predictions"]] == [10, 10]
            ping = client.get("/v1/models/digits").json()
            assert ping == {"name": "digits", "ready": True}
    finally:
        server.terminate()
        assert server.wait(30) == 0
        if server.stderr:
            server.stderr.close()
    assert [file.name for file in folder.iterdir()] == [digits_artifacts["onnx"].name]
