"""What a fetch makes of a server that fails halfway, lies or changes; registries; the cache."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from modelyard.archiver import ArchiveError, open_archive
from modelyard.serve.control.fetch import Source, fetch_archive, parse_source, place
from modelyard.serve.control.transfer import LAYERS, MANIFEST, Limits
from modelyard.serve.control.urls import UrlRules, parse_url
from modelyard.serve.errors import BadRequest, ServeError, StorageFull, UrlRefused
from tests.serve.live import build_archive, modelyard, poll, running, start_arguments
from tests.serve.test_fetch import Answer, archive, content, redirects, serving

ROOT = Path(__file__).parents[2]
QUICK = Limits(size_bytes=100_000, total_s=5, silence_s=0.5, pause_s=0.01)
ONE, TWO = archive("one"), archive("two")
HALF = len(ONE) // 2


def digest_of(content: bytes, folder: Path) -> str:
    (folder / "of.mar").write_bytes(content)
    with open_archive(folder / "of.mar", needs_manifest=False) as opened:
        return opened.digest


def sends(
    body: bytes,
    status: int = 200,
    tag: str = '"1"',
    *,
    cut: int | None = None,
    start: int = 0,
    of: int | None = None,
    stalls: bool = False,
    says: bool = True,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Answer:
    """Return an answer with a body, of which `cut` bytes come."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        if tag:
            handler.send_header("ETag", tag)
        if status == 206 and says:
            last, size = start + len(body) - 1, of or start + len(body)
            handler.send_header("Content-Range", f"bytes {start}-{last}/{size}")
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body[:cut])
        if stalls:
            handler.wfile.flush()
            threading.Event().wait(1)
        handler.close_connection = True

    return answer


def rest(body: bytes, **options: Any) -> Answer:
    return sends(body[HALF:], 206, start=HALF, **options)


def fails(status: int, **headers: str) -> Answer:
    return sends(b"", status, tag="", headers=headers)


def plays(*answers: Answer) -> tuple[Answer, list[str | None]]:
    """Return what answers one after the other, the last again, and the ranges asked for."""
    ranges: list[str | None] = []

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        ranges.append(handler.headers.get("range"))
        answers[min(len(ranges), len(answers)) - 1](handler)

    return answer, ranges


CUT, PART = sends(ONE, cut=HALF), f"bytes={HALF}-"
GOOD = [
    ("503, 429", [fails(503), fails(429), sends(ONE)], [None, None, None]),
    ("cut", [CUT, rest(ONE)], [None, PART]),
    ("stall", [sends(ONE, cut=HALF, stalls=True), rest(ONE)], [None, PART]),
    ("cut twice", [CUT, rest(ONE, cut=5), sends(ONE[HALF + 5 :], 206, start=HALF + 5)],
     [None, PART, f"bytes={HALF + 5}-"]),
    ("200 instead of 206", [CUT, sends(ONE)], [None, PART]),
    ("no tag", [sends(ONE, tag="", cut=HALF), sends(ONE)], [None, None]),
    ("weak tag", [sends(ONE, tag='W/"1"', cut=HALF), sends(ONE)], [None, None]),
    ("another version's part", [CUT, rest(ONE, tag='"2"'), sends(ONE, tag='"2"')],
     [None, PART, None]),
    ("part of another size", [CUT, rest(ONE, of=len(ONE) + 7), sends(ONE)], [None, PART, None]),
    ("another part", [CUT, sends(ONE[9:], 206, start=9), sends(ONE)], [None, PART, None]),
    ("a part that does not say which", [CUT, rest(ONE, says=False), rest(ONE)],
     [None, PART, PART]),
    ("a part of the begin", [CUT, sends(ONE[HALF:], 206), sends(ONE)], [None, PART, None]),
    ("416", [CUT, fails(416), sends(ONE)], [None, PART, None]),
    ("short part", [CUT, sends(ONE[HALF:-9], 206, start=HALF, of=len(ONE)),
                    sends(ONE[-9:], 206, start=len(ONE) - 9)],
     [None, PART, f"bytes={len(ONE) - 9}-"]),
    ("glued under one tag", [CUT, rest(TWO[:-30] + bytes(30)), sends(ONE)], [None, PART, None]),
    ("damaged once", [sends(ONE[:-9]), sends(ONE)], [None, None]),
    ("another version first", [sends(TWO, tag='"2"', cut=HALF), sends(ONE)], [None, PART]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "expected"), [row[1:] for row in GOOD], ids=[r[0] for r in GOOD]
)
def test_a_fetch_goes_on_with_the_same_version_or_anew(
    answers: list[Answer], expected: list[str | None], tmp_path: Path
) -> None:
    answer, ranges = plays(*answers)
    cache, digest = tmp_path / "cache", digest_of(ONE, tmp_path)
    with serving(answer) as (url, _):
        file = place(Source(None, f"{url}/m.mar", digest), cache, limits=QUICK)
    assert (file.read_bytes(), ranges) == (ONE, expected)
    assert content(cache).keys() == {file.name, f"{digest}.lock"}


BAD = [
    ("five times", [fails(503)], "status 503", 5),
    ("five that bring nothing more", [CUT, fails(503)], "status 503", 6),
    ("403", [fails(403), sends(ONE)], "status 403", 1),
    ("asks for too much time", [fails(503, Retry_After="60"), sends(ONE)], "status 503", 1),
    ("swapped meanwhile", [CUT, sends(TWO, tag='"2"')], "its digest is", 2),
    ("damaged twice", [sends(ONE[:-9])], "zip", 2),
    ("larger than is allowed", [sends(bytes(100_001))], "100001 bytes; 100000 are allowed", 1),
    ("to a file", [redirects("file:///etc/passwd")], "redirects to a file of this machine", 1),
    ("to the machine's metadata", [redirects("http://169.254.169.254/latest/m.mar")],
     "169.254.169.254, which is not public", 1),
    ("to a bucket", [redirects("s3://models/m.mar")], "expected http or https", 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "words", "count"), [row[1:] for row in BAD], ids=[r[0] for r in BAD]
)
def test_what_is_not_the_archive_is_refused_by_name_and_leaves_nothing(
    answers: list[Answer], words: str, count: int, tmp_path: Path
) -> None:
    answer, ranges = plays(*answers)
    cache, digest = tmp_path / "cache", digest_of(ONE, tmp_path)
    refused = pytest.raises((ServeError, ArchiveError), match=words)
    with serving(answer) as (url, _), refused:
        place(Source(None, f"{url}/m.mar", digest), cache, limits=QUICK)
    assert len(ranges) == count
    assert content(cache).keys() == {f"{digest}.lock"}


@pytest.mark.parametrize("digest", ["sha512=" + "0" * 128, "md5=" + "0" * 32, "sha256=12", ""])
def test_a_digest_of_another_kind_is_refused(digest: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="expected #sha256= and 64 hexadecimal digits"):
        parse_source(f"https://models.example/m.mar#{digest}")
    with pytest.raises(UrlRefused):
        fetch_archive(f"https://models.example/m.mar#{digest}", tmp_path, UrlRules([".*"]))


def test_a_server_is_left_alone_for_as_long_as_it_says(tmp_path: Path) -> None:
    times: list[float] = []
    answer, _ = plays(fails(429, Retry_After="1"), sends(ONE))

    def noted(handler: http.server.BaseHTTPRequestHandler) -> None:
        times.append(time.monotonic())
        answer(handler)

    with serving(noted) as (url, _):
        fetch_archive(f"{url}/m.mar", tmp_path, UrlRules([f"{url}/.*"]), QUICK)
    assert times[1] - times[0] >= 1


PROCESS = """
import sys
from pathlib import Path
from modelyard.serve.control.fetch import Source, place
place(Source(None, *sys.argv[1:3]), Path(sys.argv[3]))
"""


def test_one_process_of_a_machine_fetches_and_a_killed_one_leaves_nothing_that_counts(
    tmp_path: Path,
) -> None:
    cache, digest = tmp_path / "cache", digest_of(ONE, tmp_path)
    gate = threading.Event()

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        sends(ONE, cut=HALF)(handler)
        handler.wfile.flush()
        gate.wait(30)
        handler.wfile.write(ONE[HALF:])

    with serving(answer) as (url, asked):
        command = [sys.executable, "-c", PROCESS, f"{url}/m.mar", digest, str(cache)]
        processes = [subprocess.Popen(command) for _ in range(3)]
        half = cache / f".fetching-{digest}.mar" / f"{digest}.mar"
        poll(half.exists, "one fetches")
        poll(lambda: len(asked) == 1, "it asks")
        victim = next(p for p in processes if half_is_open(p.pid, half))
        victim.kill()
        assert victim.wait() == -signal.SIGKILL
        poll(lambda: len(asked) == 2, "another one begins anew")
        gate.set()
        codes = sorted(process.wait(30) for process in processes)
        assert (codes, len(asked)) == ([-signal.SIGKILL, 0, 0], 2)
    assert content(cache).keys() == {f"{digest}.mar", f"{digest}.lock"}


def half_is_open(pid: int, file: Path) -> bool:
    descriptors = Path(f"/proc/{pid}/fd").iterdir()
    return any(os.path.realpath(each) == str(file) for each in descriptors)


@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="no mount namespace of our own",
)
def test_a_full_disk_is_said(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    with serving(sends(archive("x" * 60_000))) as (url, _):
        script = (
            f"mount -t tmpfs -o size=32k none {small} && exec {sys.executable} -c '{PROCESS}' "
            f"{url}/m.mar {'0' * 64} {small}"
        )
        ended = subprocess.run(
            ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False
        )
    assert ended.stderr.rstrip().endswith(f"does not fit on the disk of {small}")
    assert StorageFull.__name__ in ended.stderr


# -- registries --------------------------------------------------------------------------------


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def manifest(**changes: Any) -> dict[str, Any]:
    layer = {"mediaType": LAYERS[0], "digest": sha256(ONE), "size": len(ONE)}
    title = {"org.opencontainers.image.title": "m.mar"}
    layer |= {"annotations": title, **changes.pop("layer", {})}
    return {"schemaVersion": 2, "mediaType": MANIFEST, "layers": [layer], **changes}


def registry(document: dict[str, Any], blob: bytes = ONE, media_type: str = MANIFEST) -> Answer:
    """Return a registry of one artifact, which wants a token that its own realm gives."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        host = handler.headers["host"]
        if handler.path.startswith("/token?"):
            sends(b'{"token": "t"}')(handler)
        elif handler.headers.get("authorization") != "Bearer t":
            realm = f'Bearer realm="http://{host}/token",service="r",scope="repository:m:pull"'
            fails(401, WWW_Authenticate=realm)(handler)
        elif "/manifests/" in handler.path:
            sends(json.dumps(document).encode(), headers={"Content-Type": media_type})(handler)
        elif handler.path == f"/v2/team/m/blobs/{sha256(ONE)}":
            sends(blob)(handler)
        else:
            fails(404)(handler)

    return answer


INDEX = "application/vnd.oci.image.index.v1+json"
REGISTRIES = [
    ("a token of its realm", registry(manifest()), None),
    ("as oras writes it", registry(manifest(layer={"mediaType": LAYERS[1]})), None),
    ("another kind of manifest", registry(manifest(mediaType=INDEX), media_type=INDEX), INDEX),
    ("a layer of another kind", registry(manifest(layer={"mediaType": "text/html"})), "text/html"),
    ("an absolute path", registry(manifest(layer={
        "annotations": {"org.opencontainers.image.title": "/etc/m.mar"}})), "title '/etc/m.mar'"),
    ("a path", registry(manifest(layer={
        "annotations": {"org.opencontainers.image.title": "../m.mar"}})), "plain name of a file"),
    ("another algorithm", registry(manifest(layer={"digest": "sha512:" + "0" * 128})),
     "expected sha256"),
    ("a digest with a path", registry(manifest(layer={"digest": "sha256:../../x"})),
     "expected sha256"),
    ("two layers", registry(manifest(layers=[{}, {}])), "artifact of 2 layers"),
    ("another blob", registry(manifest(), TWO), "do not have the digest sha256:"),
    ("a longer blob", registry(manifest(), ONE + b"x"), "its manifest says"),
    ("not a manifest", registry(manifest(layers="none")), "artifact of 0 layers"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "words"), [row[1:] for row in REGISTRIES], ids=[r[0] for r in REGISTRIES]
)
def test_an_archive_is_the_one_layer_of_an_artifact(
    answer: Answer, words: str | None, tmp_path: Path
) -> None:
    cache, digest = tmp_path / "cache", digest_of(ONE, tmp_path)
    with serving(answer) as (url, asked):
        source = Source(None, f"{url.replace('http', 'oci')}/team/m:1.0", digest)
        if words is None:
            assert place(source, cache, limits=QUICK).read_bytes() == ONE
            assert asked[0] == "/v2/team/m/manifests/1.0"
            assert asked[1] == "/token?service=r&scope=repository%3Am%3Apull"
        else:
            with pytest.raises((ServeError, ArchiveError), match=re.escape(words)):
                place(source, cache, limits=QUICK)
            assert content(cache).keys() == {f"{digest}.lock"}


def test_a_digest_names_a_manifest_and_no_other(tmp_path: Path) -> None:
    cache, digest = tmp_path / "cache", digest_of(ONE, tmp_path)
    named = sha256(json.dumps(manifest()).encode())
    with serving(registry(manifest())) as (url, _):
        url = url.replace("http", "oci")
        wrong = Source(None, f"{url}/team/m@sha256:{'0' * 64}", digest)
        with pytest.raises(BadRequest, match="a manifest that does not have the digest sha256:000"):
            place(wrong, cache, limits=QUICK)
        right = Source(None, f"{url}/team/m@{named}", digest)
        assert place(right, cache, limits=QUICK).read_bytes() == ONE


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("docker-registry"), reason="Debian's docker-registry")
def test_docker_s_registry_has_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "data")}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    (tmp_path / "config.yml").write_text(json.dumps(config), "utf-8")
    process = subprocess.Popen(
        ["docker-registry", "serve", str(tmp_path / "config.yml")], stderr=subprocess.DEVNULL
    )
    base = f"http://127.0.0.1:{port}"
    try:
        poll(lambda: is_open(port), "the registry listens")
        with httpx.Client(base_url=base, verify=False) as client:
            for blob in (ONE, b"{}"):
                at = client.post("/v2/team/m/blobs/uploads/").headers["location"]
                put = client.put(f"{at}&digest={sha256(blob)}", content=blob)
                put.raise_for_status()
            empty = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": sha256(b"{}")}
            document = manifest(config={**empty, "size": 2})
            client.put(
                "/v2/team/m/manifests/1.0", json=document, headers={"Content-Type": MANIFEST}
            ).raise_for_status()
        source = Source(None, f"oci://127.0.0.1:{port}/team/m:1.0", digest_of(ONE, tmp_path))
        assert place(source, tmp_path / "cache", limits=QUICK).read_bytes() == ONE
    finally:
        process.terminate()
        process.wait(20)


def is_open(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


# -- rules, servers, stores --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "pattern"),
    [
        ("s3://models/m.mar", ".*"),
        ("gs://models/m.mar", "gs://.*"),
        ("az://models/m.mar", "s3://models/.*"),
        ("s3://models.evil/m.mar", "s3://models.*"),
        ("oci://registry.example/m:1", ".*"),
    ],
)
def test_credentials_are_for_what_a_pattern_names(url: str, pattern: str) -> None:
    with pytest.raises(UrlRefused):
        UrlRules([pattern]).check(parse_url(url))
    assert UrlRules([r"s3://models/.*"]).check(parse_url("s3://models/m.mar")) == []


@pytest.mark.parametrize(
    "url", ["s3://m/k?versionId=1", "s3://m:80/k", "gs://m@x/k", "az:///k", "oci://r/m:1?x=1"]
)
def test_a_bucket_has_a_name_and_a_path(url: str) -> None:
    with pytest.raises(UrlRefused):
        parse_url(url)


def test_nothing_of_a_store_s_library_is_imported_without_such_a_url() -> None:
    code = (
        "import sys, modelyard.serve.app, modelyard.serve.control.fetch\n"
        "print({'fsspec', 's3fs', 'gcsfs', 'adlfs', 'httpx'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


def test_a_server_fetches_what_its_operator_names_and_others_what_is_allowed(
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    body = build_archive(tmp_path / "built", "echo").read_bytes()
    store.mkdir()
    digest, cache = digest_of(body, tmp_path), tmp_path / "cache"
    settings = tmp_path / "settings.yaml"
    signature = "?X-Amz-Signature=5ec2e7"
    with serving(sends(body)) as (url, asked), serving(sends(body)) as (other, others):
        settings.write_text(f"cache_dir: {cache}\nallowed_urls: ['{other}/.*']\n", "utf-8")
        named = f"{url}/echo.mar{signature}#sha256={digest}"
        shown = named.replace(signature, "?query-not-kept")
        options = ("--workers=1", "--config", str(settings))
        with running(tmp_path / "state", store, f"--models=first={named}", *options) as server:
            assert server.predict("first", b"hello").status_code == 200
            assert server.describe("first")["modelUrl"] == shown
            assert len(asked) == 1
            refused = server.register(named.replace("echo.mar", "else.mar"), model_name="third")
            assert refused.status_code == 400
            assert "no pattern of allowed_urls matches it" in refused.text
            again = f"{other}/echo.mar{signature}#sha256={digest}"
            assert server.register(again, model_name="second").status_code == 200
            assert server.register(f"{other}/echo.mar{signature}", model_name="x").is_error
            assert signature not in server.register(named, model_name="first").text
        assert others == []  # the digest's archive is there
    with running(tmp_path / "state", store, *options) as server:
        assert server.predict("second", b"hello").status_code == 200
    for file in filter(Path.is_file, (tmp_path / "state").rglob("*")):
        assert signature.encode() not in file.read_bytes(), file
    (file := cache / f"{digest}.mar").unlink()
    ran = modelyard(*start_arguments(tmp_path / "state", store), *options)
    assert ran.returncode == 1
    assert f"{file} is gone, and the query that the URL had may be a secret" in ran.stderr
    file.write_bytes(ONE)
    ran = modelyard(*start_arguments(tmp_path / "new", store), f"--models={named}", *options)
    assert ran.returncode == 1
    assert f"{file} has the digest {digest_of(ONE, tmp_path)}; remove that file" in ran.stderr


STORES = ROOT / ".peers" / "stores" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not STORES.exists(), reason="`scripts/peers stores` has not been run")
def test_no_start_fails_by_a_store_that_fails_and_eight_fetch_once() -> None:
    command = [str(STORES), "-m", "benchmarks.fetches", "--starts=10", "--mebibytes=16"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
