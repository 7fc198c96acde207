"""`modelyard migrate`: what is said of an installation, by the readers that would serve it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from modelyard.plugins.torchserve.configuration import BOOLEANS, WITHOUT_EFFECT
from modelyard.plugins.torchserve.migrate.cli import migrate_app

OK = "def handle(data, context):\n    return None if data is None else ['x'] * len(data)\n"
PIPPY = "from ts.torch_handler.distributed.base_pippy_handler import BasePippyHandler\n"


def write_mar(
    folder: Path, name: str = "m", code: str = OK, handler: str = "h.py", **files: str
) -> None:
    """Write an archive as torch-model-archiver does; `config` and `requirements` are its files."""
    keys = {"config": "configFile", "requirements": "requirementsFile"}
    named = {key: f"{file}.txt" for file, key in keys.items() if file in files}
    model = {"modelName": name, "handler": handler, "modelVersion": "1.0", **named}
    runtime = files.pop("runtime", "python")
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}.mar", "w") as zipped:
        zipped.writestr("h.py", code)
        for file, text in files.items():
            zipped.writestr(f"{file}.txt", text)
        zipped.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": runtime, "model": model}))


def migrate(folder: Path, text: str, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the command on a configuration and the store beside it; return exit code and JSON."""
    ran = run(folder, text, "--json", *options)
    return ran.exit_code, json.loads(ran.stdout)


def run(folder: Path, text: str, *options: str) -> Result:
    (folder / "store").mkdir(exist_ok=True)
    (folder / "config.properties").write_text(text)
    given = [str(folder / "config.properties"), str(folder / "store"), *options]
    return CliRunner().invoke(migrate_app, given)


def run_apart(folder: Path, text: str, temp: Path) -> tuple[int, dict[str, Any]]:
    """Run it with `--try` in a process of its own: who tries ends every child that is nobody's."""
    (folder / "config.properties").write_text(text)
    command = [sys.executable, "-m", "modelyard.cli", "migrate", "--json", "--try"]
    ran = subprocess.run(
        [*command, folder / "config.properties", folder / "store"],
        env={**os.environ, "TMPDIR": str(temp)},
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.returncode, json.loads(ran.stdout)


def found(report: dict[str, Any], status: str, subject: str) -> str:
    """Return what is said of a subject that has this status."""
    texts = [
        f["text"] for f in report["findings"] if (f["status"], f["subject"]) == (status, subject)
    ]
    assert texts, report
    return "\n".join(texts)


def test_an_installation_that_moves_as_it_is(tmp_path: Path) -> None:
    write_mar(tmp_path / "store", config="minWorkers: 2\nmaxWorkers: 3\nbatchSize: 4\n")
    code, report = migrate(tmp_path, "load_models=all\nallowed_urls=https://models.example/.*\n")
    assert (code, report["can_move"]) == (0, True)
    assert found(report, "works", "m 1.0") == "m.mar, handler h.py"
    assert "allowed_urls, load_models" in found(report, "works", "keys")
    (model,) = report["models"]
    assert (model["workers"], model["batch_size"], model["is_measured"]) == (2, 4, False)
    assert "2 workers" in found(report, "works", "memory")


def test_every_key_without_effect_is_named(tmp_path: Path) -> None:
    lines = [f"{key}={'true' if key in BOOLEANS else 1}\n" for key in WITHOUT_EFFECT]
    _, report = migrate(tmp_path, "".join(lines))
    for key, reason in WITHOUT_EFFECT.items():
        status = "fails" if key == "plugins_path" else "changes"
        assert found(report, status, key) == f"has no effect: {reason}"


@pytest.mark.parametrize(
    ("text", "status", "subject", "said"),
    [
        ("job_queue_sise=1\n", "changes", "job_queue_sise", "did you mean job_queue_size?"),
        ("job_queue_size=x\n", "fails", "job_queue_size", "expected a whole number from 1 up"),
        ("keystore_type=JKS\n", "fails", "keystore_type", "keytool -importkeystore"),
        ("keystore=no.p12\n", "fails", "keystore", "file not found"),
        ("", "changes", "allowed_urls", "TorchServe takes any URL"),
        ("", "changes", "tokens", "predictions of this machine need no token"),
        ("", "changes", "tokens", "also behind a silent proxy"),
        ("", "changes", "names", "TorchServe takes any Host"),
        ("disable_token_authorization=true\n", "changes", "names", "takes any Host"),
        ("disable_token_authorization=true\n", "works", "tokens", "every API is open"),
        ("inference_address=http://0.0.0.0:8080\n", "works", "tokens", "key_file.json"),
        ("inference_address=https://0.0.0.0:8443\n", "changes", "TLS", "signs itself"),
        ("enable_grpc_ssl=true\n", "changes", "TLS", "signs itself"),
        ("grpc_inference_port=9000\n", "works", "gRPC", "answered on ports 9000 and 7071"),
        ("vmargs=-Dlog4j.configurationFile=file:///no.xml\n", "fails", "logs", "/no.xml"),
        ("load_models=https://x.example/m.mar\n", "fails", "load_models", "not match any allowed"),
        ("load_models=gone.mar\n", "fails", "gone.mar", "Model not found at: gone.mar"),
        ("", "changes", "model_store", "holds no archives"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_configuration(
    tmp_path: Path, text: str, status: str, subject: str, said: str
) -> None:
    code, report = migrate(tmp_path, text)
    assert said in found(report, status, subject)
    assert code == (status == "fails")


@pytest.mark.parametrize(
    "text",
    ["allowed_hosts=ml\n", "inference_address=unix:/i\n", "inference_address=http://0.0.0.0\n"],
)
def test_where_every_name_is_taken_nothing_is_said_of_names(tmp_path: Path, text: str) -> None:
    _, report = migrate(tmp_path, text)
    assert [each for each in report["findings"] if each["subject"] == "names"] == []


@pytest.mark.parametrize(
    ("archive", "subject", "said"),
    [
        ({"config": "sequenceBatching: true"}, "m.mar", "sequenceBatching is not supported"),
        (
            {"config": "parallelType: pp\ntorchrun:\n  nproc-per-node: 4"},
            "m.mar",
            "torchrun with 4 processes",
        ),
        ({"code": f"import not_there\n{OK}"}, "m 1.0", "h.py:1 imports not_there"),
        ({"code": f"import ts.torch_handler.nope\n{OK}"}, "m 1.0", "which workers do not have"),
        ({"code": f"{PIPPY}{OK}"}, "m 1.0", "h.py:1 imports BasePippyHandler"),
        ({"code": "def handle(:\n"}, "m 1.0", "h.py is not Python"),
        ({"handler": "vllm_handler"}, "m 1.0", "the handler vllm_handler is not served"),
        ({"handler": "other.py"}, "m 1.0", "the archive lacks its handler, other.py"),
        ({"handler": "BaseHandler", "runtime": "LSP"}, "m 1.0", "C++ handlers do not run here"),
        ({"requirements": "torch==1.13.1\nsix\n"}, "m 1.0", "wants torch==1.13.1; workers run on"),
    ],
)  # fmt: skip
def test_what_will_not_work_of_an_archive(
    tmp_path: Path, archive: dict[str, str], subject: str, said: str
) -> None:
    write_mar(tmp_path / "store", **archive)
    code, report = migrate(tmp_path, "load_models=all\ninstall_py_dep_per_model=true\n")
    assert (code, report["models"]) == (1, [])
    assert said in found(report, "fails", subject)


def test_an_import_that_the_requirements_name_is_met(tmp_path: Path) -> None:
    write_mar(tmp_path / "store", code=f"import not_there\n{OK}", requirements="not-there>=1 # x\n")
    code, report = migrate(tmp_path, "install_py_dep_per_model=true\n")
    assert code == 0
    assert "its 1 requirement get" in found(report, "changes", "m 1.0")
    assert migrate(tmp_path, "")[0] == 1


def test_what_a_reader_warns_of_is_a_change(tmp_path: Path) -> None:
    write_mar(tmp_path / "store", config="deviceType: tpu\n")
    assert "Invalid deviceType: tpu" in found(migrate(tmp_path, "")[1], "changes", "m 1.0")


SPEC = """
models: {min-workers: 1, pets: {url: pets.mar}, breeds: {url: b.mar}, colours: {url: c.mar}}
dag: {first: [pets], pets: [breeds, colours], breeds: [last], colours: [last]}
"""


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            SPEC,
            "first (a function) → pets (pets.mar) → breeds (b.mar) and colours (c.mar) → last (a",
        ),
        (
            SPEC.replace("colours: [last]", "colours: [pets]"),
            "it cannot be read: its dag has a circle",
        ),
        ("models: []", "has no `models` and `dag`"),
        ("{", "it cannot be read: line 1"),
        ("!!python/object:os.system {}", "could not determine a constructor"),
        (None, "it has no file 'spec.yaml'"),
    ],
)
def test_a_workflow_is_read_and_something_else_advised(
    tmp_path: Path, spec: str | None, said: str
) -> None:
    write_mar(tmp_path / "store")
    with zipfile.ZipFile(tmp_path / "store" / "flow.war", "w") as war:
        workflow = {"workflowName": "flow", "specFile": "spec.yaml", "handler": "own.py"}
        war.writestr("WAR-INF/MANIFEST.json", json.dumps({"workflow": workflow}))
        if spec is not None:
            war.writestr("spec.yaml", spec)
    _, report = migrate(tmp_path, "")
    assert said in found(report, "fails", "flow.war")
    if spec == SPEC:
        (advice,) = (each["advice"] for each in report["findings"] if "flow" in each["subject"])
        assert "--models pets=pets.mar --models breeds=b.mar --models colours=c.mar" in advice
        assert "POST /predictions/pets, then POST /predictions/breeds and beside it POST" in advice
        assert "first, last of own.py: into the client" in advice


def test_a_damaged_archive_and_a_workflow_are_named(tmp_path: Path) -> None:
    write_mar(tmp_path / "store")
    (tmp_path / "store" / "bad.mar").write_bytes(b"nothing")
    (tmp_path / "store" / "flow.war").write_bytes(b"PK")
    code, report = migrate(tmp_path, "")
    assert "is refused" in found(report, "fails", "bad.mar")
    said = "workflows are not served by Modelyard: it cannot be read: flow.war is refused"
    assert found(report, "fails", "flow.war").startswith(said)
    assert found(report, "works", "m 1.0").endswith("not loaded at the start")
    assert code == 1


def test_the_models_of_a_snapshot_are_loaded_at_the_start(tmp_path: Path) -> None:
    write_mar(tmp_path / "store")
    entry = {"defaultVersion": True, "marName": "m.mar", "minWorkers": 2, "maxWorkers": 5,
             "batchSize": 3, "maxBatchDelay": 10}  # fmt: skip
    snapshot = {"modelCount": 1, "models": {"m": {"1.0": entry}}}
    code, report = migrate(tmp_path, f"model_snapshot={json.dumps(snapshot)}\n")
    (model,) = report["models"]
    assert (code, model["workers"], model["batch_size"]) == (0, 2, 3)
    entry["marName"] = "gone.mar"
    code, report = migrate(tmp_path, f"model_snapshot={json.dumps(snapshot)}\n")
    assert "not found in model store" in found(report, "fails", "model_snapshot")


def test_leftovers_of_fetches_stay_where_they_are(tmp_path: Path) -> None:
    left = tmp_path / "store" / ".fetching-1"
    left.mkdir(parents=True)
    migrate(tmp_path, "load_models=all\n")
    assert left.is_dir()


def test_without_a_store_nothing_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "c.properties").write_text("")
    ran = CliRunner().invoke(migrate_app, [str(tmp_path / "c.properties")])
    assert ran.exit_code == 1
    assert "neither the command nor the configuration names a folder" in ran.stdout
    assert CliRunner().invoke(migrate_app, [str(tmp_path / "no.properties")]).exit_code == 2


def test_lines_fit_the_terminal_and_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mar(tmp_path / "store", code=f"import not_there\n{OK}")
    monkeypatch.setattr("modelyard.base.terminal.out.width", 80)
    lines = run(tmp_path, "number_of_netty_threads=4\n").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "will not work"
    assert lines[1].startswith("  m 1.0  h.py:1 imports not_there")
    assert any(line.strip().startswith("→ install it beside Modelyard") for line in lines)
    assert not any(line.endswith(" ") for line in lines)
    assert lines[-1] == "1 will not work, 4 changes, 2 works"


def test_a_trial_runs_the_code_behind_walls_and_leaves_nothing(tmp_path: Path) -> None:
    temp = tmp_path / "t"
    temp.mkdir()
    secret = tmp_path / "secret.txt"
    secret.write_text("x")
    reads = (
        f"try:\n    open({str(secret)!r})\nexcept OSError as e:\n    raise ValueError(e.strerror)\n"
    )
    write_mar(tmp_path / "store", "good")
    write_mar(tmp_path / "store", "nosy", f"{reads}{OK}")
    text = "load_models=all\nfiles=own\ndefault_workers_per_model=3\n"
    code, report = run_apart(tmp_path, text, temp)
    assert "ValueError: Permission denied (h.py:4)" in found(report, "fails", "nosy 1.0")
    assert "loads in" in found(report, "works", "good 1.0")
    (model,) = report["models"]
    assert (model["name"], model["workers"], model["is_measured"]) == ("good", 3, True)
    assert model["memory_bytes"] > 3 << 20
    assert code == 1
    assert not list(temp.iterdir())
