"""The client by itself: an environment that holds it and what it needs, and nothing of a server."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.serve.live import LiveServer, build_archive

CLIENT = Path(__file__).parents[2] / "client"
NEEDS = ("httpx", "httpcore", "h11", "certifi", "idna", "anyio", "typing_extensions", "orjson")
MOST_BYTES = 15_000_000

PROGRAM = """
import json, sys, time
began = time.process_time()
import modelyard_client
from modelyard_client import Client, NoAnswer, RequestFailed
took_s = time.process_time() - began
with Client(sys.argv[1]) as client:
    answer = client.predict("echo", {"a": 1})
    try:
        client.infer("echo", {})
    except ImportError as error:
        advice = str(error)
print(json.dumps({"answer": answer, "advice": advice, "took_s": took_s,
                  "heavy": sorted({"torch", "numpy", "modelyard", "fastapi"} & set(sys.modules))}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what `pip install modelyard-client` would bring, and the client, into one folder."""
    folder = tmp_path_factory.mktemp("client")
    for name in NEEDS:
        found = distribution(name)
        for file in found.files or ():
            source = Path(str(found.locate_file(file)))
            if source.is_file() and ".." not in file.parts and source.suffix != ".pyc":
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
               "--no-build-isolation", "--no-compile", "--target", str(folder)]  # fmt: skip
    source = tmp_path_factory.mktemp("source") / "client"
    subprocess.run(["cp", "-r", str(CLIENT), str(source)], check=True)
    subprocess.run([*command, str(source)], check=True, timeout=120)
    return folder


def test_it_needs_what_is_listed_here_and_is_small(installed: Path) -> None:
    asked = map(Requirement, distribution("modelyard-client").requires or [])
    assert {each.name for each in asked if not each.marker} == {"httpx", "orjson"}
    size = sum(file.stat().st_size for file in installed.rglob("*") if file.is_file())
    assert size <= MOST_BYTES, f"{size:,} bytes"


def test_it_predicts_without_anything_of_the_server(
    installed: Path, shared_server: LiveServer
) -> None:
    build_archive(shared_server.store, "echo")
    assert shared_server.register("echo").status_code == 200
    code = f"import sys; sys.path.insert(0, {str(installed)!r})\n{PROGRAM}"
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(shared_server.client.base_url)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["answer"] and found["heavy"] == []
    assert "pip install 'modelyard-client[arrays]'" in found["advice"]
