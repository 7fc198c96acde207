"""Checkpoints of a model hub, from a server that speaks its protocol's few routes."""

from __future__ import annotations

import hashlib
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"architectures": ["BertModel"]}',
    "model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "pytorch_model.bin": b"\x80\x02.",
    "modeling.py": b"raise SystemExit",
}
FETCH = """
import sys
from modelyard.exporter.hub import fetch
from modelyard.exporter.errors import ExportError
try:
    with fetch(sys.argv[1], print) as found:
        names = sorted(path.name for path in found.folder.rglob("*"))
        print(found.folder.name, found.name, names, found.origin)
except ExportError as error:
    print(error)
"""


@contextmanager
def hub(files: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve one repository, owner/name, whose branch main is one commit."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            asked.append(path)
            api = "/api/models/owner/name"
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": tag(body)}
                for name, body in files.items()
            ]
            if path in (f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                siblings = [{"rfilename": each["path"], "size": each["size"]} for each in tree]
                self.send(json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}))
            elif path == f"{api}/tree/{COMMIT}":
                self.send(json.dumps(tree))
            elif (name := path.removeprefix(f"/owner/name/resolve/{COMMIT}/")) in files:
                self.send(files[name])
            else:
                self.send("{}", 404, **{"X-Error-Code": "RevisionNotFound"})

        do_HEAD = do_GET  # noqa: N815

        def send(self, body: str | bytes, status: int = 200, **headers: str) -> None:
            content = body.encode() if isinstance(body, str) else body
            self.send_response(status)
            headers |= {"X-Repo-Commit": COMMIT, "ETag": f'"{tag(content)}"'}
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def tag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def fetched(location: str, files: Mapping[str, bytes], home: Path) -> tuple[str, list[str]]:
    with hub(files) as (url, asked):
        variables = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        ran = subprocess.run(
            [sys.executable, "-c", FETCH, location],
            env={**variables, "PATH": "/usr/bin:/bin", "HF_HUB_DISABLE_TELEMETRY": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
    return ran.stdout, asked


def test_a_named_revision_is_a_commit_and_neither_pickles_nor_code_are_taken(
    tmp_path: Path,
) -> None:
    said, asked = fetched("hf://owner/name@main", FILES, tmp_path)
    origin = {"location": f"hf://owner/name@{COMMIT}"}
    assert said.splitlines() == [
        f"hf://owner/name@main is commit {COMMIT}",
        f"{COMMIT} name ['config.json', 'model.safetensors'] {origin}",
    ]
    assert not [path for path in asked if path.endswith((".bin", ".py"))]
    said, _ = fetched(f"hf:/owner/name@{COMMIT}", FILES, tmp_path)
    assert said.splitlines() == [f"{COMMIT} name ['config.json', 'model.safetensors'] {origin}"]


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("hf://owner/name", "has no safetensors, of 1 files"),
        ("hf://owner/name@none", "cannot be fetched: RevisionNotFoundError"),
        ("hf://owner@main", "expected hf://OWNER/NAME@REVISION"),
        ("hf://../name@main", "cannot be fetched: HFValidationError"),
    ],
)
def test_what_a_hub_does_not_have_is_said(location: str, words: str, tmp_path: Path) -> None:
    said, _ = fetched(location, {"pytorch_model.bin": b""}, tmp_path)
    assert words in said
