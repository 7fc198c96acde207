"""Archives by URL: starts while the store fails, one download for many, the rate beside curl.

    .peers/stores/bin/python -m benchmarks.fetches --starts 50 --mebibytes 1024

`scripts/peers stores` makes that environment. The store is moto, which speaks S3. A proxy before it
breaks a share of the answers: status 503, an end after some bytes, silence, a length that is wrong;
how often it is asked, and what it sends, is counted there. moto reads all of an object for each
part of it: the last row, one part by curl, says what of the rate is its doing.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import http.server
import json
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelyard.archiver import open_archive
from modelyard.serve.control.transfer import PART_BYTES

FAULTS = ("503", "cut", "stall", "length")
STALL_S = 3.0
"""Silence of the proxy before it closes."""
CHUNK_BYTES = 1 << 18
HANDLER = """
class Handler:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return ["" for _ in data]
"""
FETCH = """
import sys
from pathlib import Path
from modelyard.serve.control import fetch
from modelyard.serve.control.transfer import Limits
location, digest, cache, silence_s = sys.argv[1:]
source = fetch.Source(None, location, digest)
print(fetch.place(source, Path(cache), limits=Limits(silence_s=float(silence_s))))
"""


class Server(http.server.ThreadingHTTPServer):
    """A server that logs nothing when a client disconnects."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing."""


class Proxy:
    """A proxy that breaks a share of the answers, and counts what it sends.

    Args:
        port: port of the store, on this machine.
        share: share of the answers that are broken.
    """

    def __init__(self, port: int, share: float, seed: int = 1) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._lock, self._random = threading.Lock(), random.Random(seed)
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with contextlib.suppress(OSError):
                    proxy._answer(self, port, share)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, handler: Any, port: int, share: float) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length", 0)))
        with self._lock:
            fault = self._random.choice(FAULTS) if self._random.random() < share else ""
            at = self._random.random()
            self.counts[fault or "right"] += 1
        if fault == "503":
            handler.send_response(503)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        store = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.closing(store):
            store.request(handler.command, handler.path, body, dict(handler.headers))
            answer = store.getresponse()
            length = int(answer.headers.get("content-length", 0))
            handler.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in ("content-length", "connection", "server", "date"):
                    handler.send_header(name, value)
            stated = length + 1000 if fault == "length" else length
            handler.send_header("Content-Length", str(stated))
            handler.end_headers()
            handler.close_connection = bool(fault)
            left = int(length * at) if fault in ("cut", "stall") else length
            while left > 0 and (chunk := answer.read(min(CHUNK_BYTES, left))):
                left -= len(chunk)
                handler.wfile.write(chunk)
                with self._lock:
                    self.counts["bytes"] += len(chunk)
            if fault == "stall":
                handler.wfile.flush()
                time.sleep(STALL_S)

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def store(folder: Path) -> Iterator[int]:
    """Run moto's server on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "moto.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(20)


def write_archive(file: Path, size_bytes: int) -> tuple[Path, str]:
    """Write an archive with so many random bytes; return it and its digest."""
    with zipfile.ZipFile(file, "w") as zipped:
        manifest = {
            "runtime": "python",
            "model": {"modelName": "m", "handler": "h.py", "modelVersion": "1.0"},
        }
        zipped.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        zipped.writestr("h.py", HANDLER)
        with zipped.open("weights.bin", "w", force_zip64=True) as out:
            for at in range(0, size_bytes, 1 << 20):
                out.write(random.Random(at).randbytes(min(1 << 20, size_bytes - at)))
    with open_archive(file, needs_manifest=False) as archive:
        return file, archive.digest


def put(port: int, key: str, file: Path) -> None:
    """Put a file into the bucket `models`."""
    import fsspec

    store = fsspec.filesystem(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        s3_additional_kwargs={"ACL": "public-read"},
        skip_instance_cache=True,
    )
    if not store.exists("models"):
        store.mkdir("models")
    store.put(str(file), f"models/{key}")


def starts(proxy: Proxy, folder: Path, count: int, scheme: str, digest: str) -> int:
    """Start servers, each with no cache, of a store that fails; return how many did not start."""
    failed, began = 0, time.monotonic()
    host = "models" if scheme == "s3" else f"127.0.0.1:{proxy.port}/models"
    (settings := folder / "settings.yaml").write_text(f"cache_dir: {folder / 'cache'}\n")
    state = f"--state-dir={folder / 'state'}"
    ports = ("--port=0", "--management-port=0", "--metrics-port=0", "--grpc-port=0")
    url = f"{scheme}://{host}/small.mar#sha256={digest}"
    command = [sys.executable, "-m", "modelyard", "serve", "start", "--workers=1", state, *ports,
               f"--models={url}", f"--config={settings}"]  # fmt: skip
    for _ in range(count):
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if ran.returncode:
            failed += 1
            print(f"  {ran.stderr}")
        else:
            subprocess.run([sys.executable, "-m", "modelyard", "serve", "stop", state], cwd=folder,
                           stdout=subprocess.DEVNULL, check=True)  # fmt: skip
        for name in ("cache", "state"):
            shutil.rmtree(folder / name, ignore_errors=True)
    took_s = time.monotonic() - began
    print(
        f"{scheme}: {failed} of {count} starts failed, {took_s:.0f} s; answers {dict(proxy.counts)}"
    )
    return failed


def together(proxy: Proxy, folder: Path, count: int, digest: str, size_bytes: int) -> bool:
    """Fetch one archive in many processes at once; return whether it was sent once."""
    location = "s3://models/large.mar"
    command = [sys.executable, "-c", FETCH, location, digest, str(folder / "shared"), "30"]
    before, began = proxy.counts["bytes"], time.monotonic()
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(count)]
    codes = [process.wait(600) for process in processes]
    sent = proxy.counts["bytes"] - before
    print(
        f"{count} processes: exit codes {codes}, {sent:,} bytes sent for a file of {size_bytes:,}; "
        f"{time.monotonic() - began:.1f} s"
    )
    return not any(codes) and sent == size_bytes


def rates(port: int, folder: Path, digest: str, size_bytes: int) -> None:
    """Print wall and CPU time of one download beside curl's, from the store itself."""
    url, s3 = f"http://127.0.0.1:{port}/models/large.mar", "s3://models/large.mar"
    commands = {
        "curl": ["curl", "-sS", "-o", str(folder / "curled"), url],
        "http": [sys.executable, "-c", FETCH, url, digest, str(folder / "http"), "30"],
        "s3": [sys.executable, "-c", FETCH, s3, digest, str(folder / "s3"), "30"],
        "part": ["curl", "-sS", "-r", f"0-{PART_BYTES - 1}", "-o", str(folder / "part"), url],
    }
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
    for name, command in commands.items():
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        took_s, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rate = (PART_BYTES if name == "part" else size_bytes) / took_s / 1e6
        print(f"{name}: {took_s:.2f} s, {cpu_s:.2f} s of CPU, {rate:.0f} MB/s")


def main() -> None:
    """Run the three trials."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--share", type=float, default=0.3, help="of the answers, broken")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--mebibytes", type=int, default=1024)
    said = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    os.environ |= {
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    }
    with tempfile.TemporaryDirectory() as name, store(folder := Path(name)) as port:
        failed = 0
        small, digest = write_archive(folder / "small.mar", 2 << 20)
        put(port, "small.mar", small)
        for scheme in ("http", "s3"):
            proxy = Proxy(port, said.share)
            os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{proxy.port}"
            failed += starts(proxy, folder, said.starts, scheme, digest)
            proxy.close()
        large, digest = write_archive(folder / "large.mar", said.mebibytes << 20)
        put(port, "large.mar", large)
        proxy = Proxy(port, 0)
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{proxy.port}"
        is_once = together(proxy, folder, said.processes, digest, large.stat().st_size)
        proxy.close()
        rates(port, folder, digest, large.stat().st_size)
    if failed or not is_once:
        sys.exit(1)


if __name__ == "__main__":
    main()
