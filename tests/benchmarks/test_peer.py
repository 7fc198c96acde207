"""A peer of a few lines, started and ended as the real ones are."""

import json
import os
import select
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.archives import TINY, Subject
from benchmarks.peer import ALL, JSON, Peer, PeerServer, peer_version
from benchmarks.server import wait_idle
from benchmarks.wrk import run_wrk

ANSWER_S = 0.05
SERVER = f"""
import http.server, os, subprocess, sys, threading, time

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    lock = threading.Lock()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.lock:  # one at a time, as one worker would
            time.sleep({ANSWER_S})
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open("child.pid", "w") as file:
    file.write(str(child.pid))
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["BENCH_PORT"])), Handler)
server.serve_forever()
"""


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    """Return two requests, and an artifact that nobody opens."""
    artifact = tmp_path / "made.onnx"
    artifact.write_bytes(b"nothing")
    requests = []
    for name in ("one", "two"):
        requests.append(tmp_path / f"{name}.png")
        requests[-1].write_text(name)
    return Subject(TINY, tmp_path / "store" / "tiny.mar", "image/png", tuple(requests), artifact)


def start(subject: Subject, folder: Path, script: str) -> PeerServer:
    (folder / "serve.py").write_text(script)
    peer = Peer(
        "small",
        lambda at: [sys.executable, str(folder / "serve.py")],
        "/predict",
        JSON,
        body=lambda body: json.dumps({"image": body.decode()}).encode(),
    )
    return PeerServer(peer, folder, subject, 1, folder / "work")


def test_a_peer_is_ready_with_its_first_answer_and_ends_with_all_it_started(
    subject: Subject, tmp_path: Path
) -> None:
    with start(subject, tmp_path, SERVER) as server:
        assert json.loads(server.answer) == {"image": "one"}
        assert server.start_s > 0
        assert server.usage().total_s > 0
        assert (tmp_path / "work" / "tiny.onnx").read_bytes() == b"nothing"
        child = int((tmp_path / "work" / "child.pid").read_text())
        assert server.footprint(TINY, 0).pss_mb > 2  # two interpreters
        handle = os.pidfd_open(child)
    ended, _, _ = select.select([handle], [], [], 10)
    os.close(handle)
    assert ended == [handle]


def test_a_peer_that_ends_at_once_says_why(subject: Subject, tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"small does not answer(?s:.*)no such thing"),
        start(subject, tmp_path, "raise SystemExit('no such thing')"),
    ):
        pass


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_what_is_counted_after_the_first_seconds_is_the_rate(
    subject: Subject, tmp_path: Path
) -> None:
    with start(subject, tmp_path, SERVER) as server:
        send = server.subject.content_type, server.subject.requests
        load = run_wrk(server.url, 4, 2, *send, skip_s=0.5)
        wait_idle(server.usage)
    assert load.failures == 0
    assert load.seconds > 1
    # No more than the one worker can give, and the wait in its queue of four.
    assert 1 <= load.requests <= load.seconds / ANSWER_S + 1
    assert load.p50_ms >= 4 * 1000 * ANSWER_S * 0.9


def test_a_peer_that_is_not_installed_has_no_version(tmp_path: Path) -> None:
    versions = {peer.shown: peer_version(peer, tmp_path) for peer in ALL}
    assert {name for name, version in versions.items() if version is not None} == {
        peer.shown for peer in ALL if peer.is_ours
    }


def test_a_peer_that_is_installed_has_one(tmp_path: Path) -> None:
    peer = Peer("pytest", lambda at: [], "/")
    folder = peer.bin(tmp_path)
    folder.mkdir(parents=True)
    # Not a link: an interpreter finds its environment beside the name that it was started by.
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python").chmod(0o755)
    assert peer_version(peer, tmp_path) == pytest.__version__
