"""Workers that are forked: as good as fresh ones, and the server knows of their ends as before."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver import open_archive, write_archive
from modelyard.serve.control.preload import choose_preload
from modelyard.serve.dataplane.process import _send
from tests.serve import live
from tests.serve.live import (
    SOURCES,
    LiveServer,
    descendants,
    environment,
    is_alive,
    poll,
    running,
    start_server,
)

THREAD = """import sys, threading
if "--fork-server" in sys.orig_argv:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
CONFIG = "workerThreads: 2\nminWorkers: 1\n"


def build(store: Path, name: str, handler: str, *others: Path) -> None:
    """Archive a handler of one file."""
    folder = store / f".{name}"
    folder.mkdir(parents=True)
    (folder / "handler.py").write_text(handler, encoding="utf-8")
    (folder / "weights.bin").write_bytes(b"none")
    (folder / "model-config.yaml").write_text(CONFIG, encoding="utf-8")
    write_archive(
        name,
        version="1.0",
        artifact=folder / "weights.bin",
        handler=str(folder / "handler.py"),
        output_dir=store,
        extra_files=others,
        config_file=folder / "model-config.yaml",
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    root = tmp_path_factory.mktemp("forks")
    source = SOURCES / "forked"
    text = (source / "handler.py").read_text(encoding="utf-8")
    # What sets variables is started afresh, for they may be meant for torch: text, not a meaning.
    fresh = text + "\n# os.environ\n"
    without_variables = text.replace("os.environ.items()", "vars(os)['en' 'viron'].items()")
    build(root / "store", "forked", without_variables, source / "tabnanny.py")
    build(root / "store", "fresh", fresh, source / "tabnanny.py")
    build(root / "store", "torchless", "def handle(data, context):\n    return data and ['ok']\n")
    with running(root / "state", root / "store", "--models=torchless") as server:
        yield server


def fork_server(server: LiveServer) -> int | None:
    """Return the process id of a server's fork server."""
    for pid in descendants(server.pid):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"--fork-server" in command and os.getsid(pid) == pid:
            workers = [
                worker["pid"]
                for model in server.management.get("/models").json()["models"]
                for worker in server.describe(model["modelName"])["workers"]
            ]
            if pid not in {*workers, *map(parent_of, workers)}:
                return pid
    return None


def describe(server: LiveServer, model: str) -> dict[str, Any]:
    answer = server.predict(model)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_server_whose_handlers_need_no_torch_has_no_fork_server(server: LiveServer) -> None:
    assert server.predict("torchless").text == "ok"
    assert fork_server(server) is None


def test_a_forked_worker_is_as_one_that_was_started_afresh(server: LiveServer) -> None:
    server.register_all("forked", "fresh")
    fork = fork_server(server)
    assert fork is not None
    forked, fresh = describe(server, "forked"), describe(server, "fresh")
    assert b"--fork-server" in Path(f"/proc/{forked['pid']}/cmdline").read_bytes()
    assert b"--fork-server" not in Path(f"/proc/{fresh['pid']}/cmdline").read_bytes()
    assert forked["same"] == fresh["same"]
    assert parent_of(forked["parent"]) == parent_of(fresh["parent"]) == server.pid
    assert forked["same"]["torch_threads"] == forked["same"]["blas_threads"] == 2
    assert forked["same"]["dies_with_parent"] == signal.SIGKILL
    for each in (forked, fresh):
        assert each["imported_by"] == each["pid"]
        assert each["own_module"] == "the archive"
    assert len(list(Path(f"/proc/{fork}/task").iterdir())) == 1


def test_two_forked_workers_draw_other_numbers(server: LiveServer) -> None:
    draws = [describe(server, "forked")["draws"]]
    replace_worker(server, "forked")
    draws.append(describe(server, "forked")["draws"])
    assert not set(draws[0]) & set(draws[1])


def parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    return int(stat.rpartition(")")[2].split()[1])


def replace_worker(server: LiveServer, model: str) -> None:
    (pid,) = server.worker_pids(model)
    os.kill(pid, signal.SIGKILL)
    poll(lambda: server.worker_pids(model) not in ([], [pid]), "its worker is replaced", 60)


def test_how_a_forked_worker_ended_is_told(server: LiveServer) -> None:
    (pid,) = server.worker_pids("forked")
    assert server.predict("forked", b"exit 3").status_code == 500
    assert server.predict("forked", b"kill").status_code == 507  # mostly it was for memory
    assert not is_alive(pid) and not Path(f"/proc/{pid}").exists()


def faults(pid: int) -> tuple[int, int]:
    """Return the page faults of a process, and of its children that have ended."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(stat[7]), int(stat[8])


def test_the_end_of_a_forked_worker_copies_little_of_what_it_shares(server: LiveServer) -> None:
    worker = describe(server, "forked")
    living, before = faults(worker["pid"])[0] + faults(worker["parent"])[0], faults(server.pid)[1]
    scale = {"min_worker": 0, "synchronous": True}
    assert server.management.put("/models/forked", params=scale).status_code == 200
    assert 0 < faults(server.pid)[1] - before - living < 3000  # with torch's finalizers: 6,800
    assert server.management.put("/models/forked", params=scale | {"min_worker": 1}).is_success


def test_what_a_worker_leaves_behind_ends_with_it(server: LiveServer) -> None:
    orphan = server.predict("forked", b"leave an orphan").json()
    (worker,) = server.worker_pids("forked")
    assert os.getsid(orphan) == orphan and parent_of(orphan) == parent_of(worker) != server.pid
    replace_worker(server, "forked")
    poll(lambda: not Path(f"/proc/{orphan}").exists(), "the orphan is ended and reaped", 5)


def test_workers_go_on_without_the_fork_server_and_one_is_started_again(
    server: LiveServer,
) -> None:
    first, before = fork_server(server), server.worker_pids("forked")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert server.predict("forked").status_code == 200
    assert server.worker_pids("forked") == before
    server.logs("workers are started afresh")
    replace_worker(server, "forked")
    replace_worker(server, "forked")
    second = fork_server(server)
    assert second not in (None, first)
    # torch makes a folder for temporary files when it is imported; a container's root is read-only.
    variables = Path(f"/proc/{second}/environ").read_bytes().split(b"\0")
    assert f"TMPDIR={server.state_dir}/unpacked/temporary".encode() in variables


def test_an_archive_with_a_module_that_is_imported_already_gets_its_own(
    server: LiveServer,
) -> None:
    handler = "import torch, timeit\ndef handle(data, context): return data and [timeit.WHOSE]\n"
    own = server.store / "timeit.py"
    own.write_text(
        "WHOSE = 'mine'\ndefault_timer = default_repeat = Timer = None\n", encoding="utf-8"
    )
    assert fork_server(server) is not None
    build(server.store, "shadows", handler, own)
    server.register_all("shadows")
    assert server.predict("shadows").text == "mine"
    (pid,) = server.worker_pids("shadows")
    assert b"--fork-server" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    server.logs("the archive has modules named timeit")


@pytest.mark.parametrize(
    "off", ["by its setting", pytest.param("by threads", marks=pytest.mark.nightly)]
)
def test_where_nothing_can_be_forked_workers_are_started_afresh(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: str
) -> None:
    config = tmp_path / "modelyard.yaml"
    config.write_text(f"fork_workers: {str(off == 'by threads').lower()}\n")
    if off == "by threads":
        (tmp_path / "sitecustomize.py").write_text(THREAD, encoding="utf-8")
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {**environment(), "PYTHONPATH": path}
        monkeypatch.setattr(live, "environment", lambda: variables)
    text = (
        "# no torch, in spite of the word\ndef handle(data, context):\n    return data and ['ok']\n"
    )
    build(tmp_path / "store", "light", text)
    options = ("--models=light", f"--config={config}")
    with running(tmp_path / "state", tmp_path / "store", *options) as other:
        assert other.predict("light").text == "ok"
        assert fork_server(other) is None
        replace_worker(other, "light")
        if off == "by threads":
            other.logs("2 threads run")
        else:
            assert "2 threads run" not in other.log


def test_all_end_with_a_server_that_is_killed(server: LiveServer, tmp_path: Path) -> None:
    killed = start_server(tmp_path / "state", server.store, "--models=forked")
    children = descendants(killed.pid)
    assert fork_server(killed) in children and len(children) == 3
    killed.signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    poll(lambda: not any(map(is_alive, children)), "workers and fork server end", 5)
    killed.close_clients()


TORCH = ("torch",)


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import torch\n", TORCH),
        ("from ts.torch_handler.base_handler import BaseHandler\n", TORCH),
        ("from modelyard.handlers import VisionHandler\n", TORCH),
        ("from transformers import pipeline\n", TORCH),
        ("import onnxruntime\n", None),
        ("from modelyard.handlers import BadInput\n", None),
        ("import os, torch\nos.environ['KMP_BLOCKTIME'] = '1'\n", None),
    ],
)
def test_what_is_imported_before_a_fork_is_read_from_the_handler(
    tmp_path: Path, source: str, modules: tuple[str, ...] | None
) -> None:
    build(tmp_path, "model", f"{source}\ndef handle(data, context):\n    return data\n")
    with open_archive(tmp_path / "model.mar") as archive:
        contents = archive.manifest, archive.files, archive.read
        own, built_in = (choose_preload(*contents, name) for name in ("handler.py", "text"))
    assert (own.modules if own else None) == modules
    assert built_in is not None and built_in.modules == TORCH and "handler" in built_in.own


def test_what_loads_a_twin_is_imported_for_workers_that_explain(digits_store: Path) -> None:
    def modules(file: str, handler: str, explains: bool) -> tuple[str, ...]:
        with open_archive(digits_store / file) as archive:
            preload = choose_preload(archive.manifest, archive.files, archive.read, handler)
            assert preload is not None
            return (preload.whole if explains else preload).modules

    onnx = (*TORCH, "onnx")
    assert modules("onnx.mar", "image_classifier", explains=True) == (*onnx, "program")
    assert modules("onnx.mar", "image_classifier", explains=False) == onnx
    assert modules("onnx.mar", "an_authors", explains=False) == (*onnx, "program")
    assert modules("pt2.mar", "image_classifier", explains=False) == (*TORCH, "program")


def test_what_is_prepared_is_imported_while_nobody_waits_for_a_worker() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-P", "-m", "modelyard.serve.worker", "--fork-server"]
    with ours, theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            env={**os.environ, "OMP_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1"},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        ours.settimeout(60)
        null = os.open(os.devnull, os.O_RDWR)
        _send(ours, {"later": ["torch", "program", "onnx"]}, ())
        # A worker of such an archive cannot be forked once there are others of these names.
        own = ["torch", "sympy", "onnxruntime"]
        request = {"environment": {}, "later": [], "modules": ["torch"], "own": own}

        def refusal() -> object:
            _send(ours, request, (null, null, null))
            return json.loads(ours.recv(4096))["refused"]

        assert refusal() == "RuntimeError: the archive has modules named torch"
        every = "RuntimeError: the archive has modules named onnxruntime, sympy, torch"
        poll(lambda: refusal() == every, "what is prepared", timeout_s=60)
        os.close(null)
    assert process.wait(20) == 0
