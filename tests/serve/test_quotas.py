"""Quotas of tokens: never more than they say, and what is taken is given back however it ends."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from modelyard.serve.errors import QuotaUsed
from modelyard.serve.http import quotas
from modelyard.serve.http.quotas import BURST_S, Quotas
from modelyard.serve.http.tokens import make_grant, parse_grant
from tests.serve.live import build_archive, make_notes_folder, poll, running

KEY = "a-token-of-this-test-that-is-long-enough"
HEADERS = [(b"host", b"here"), (b"authorization", f"Bearer {KEY}".encode())]
TAKES = """
import os, sys, time
from pathlib import Path
from tests.serve.test_quotas import make, taken
end = time.monotonic() + 1.5
number = next((number for number in (1, 2) if not os.fork()), 3)
these, count = make(Path(sys.argv[1]), number, "rate=200"), 0
while time.monotonic() < end:
    count += taken(these)
    time.sleep(0.002)
print(count, flush=True)
"""


def make(folder: Path, number: int = 0, *quota: str) -> Quotas:
    grants = [make_grant("app", "predict", KEY, quota), make_grant("free", "predict", KEY + "2")]
    return Quotas(lambda: grants, folder, number)


def taken(these: Quotas) -> bool:
    """Ask, and return whether it was let."""
    try:
        release = these.take(HEADERS)
    except QuotaUsed:
        return False
    assert release is not None
    release()
    return True


@pytest.mark.parametrize("rate", (0.5, 3.0, 50.0, 1000.0))
@pytest.mark.parametrize("load", (0.5, 0.99, 1.5, 5.0))
def test_a_rate_is_kept_within_a_twentieth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float, load: float
) -> None:
    now = 1000.0
    monkeypatch.setattr(quotas, "monotonic", lambda: now)
    these, seconds = make(tmp_path / "q", 0, f"rate={rate}"), max(10, 100 / rate)
    let = 0
    for _ in range(round(seconds * rate * load)):
        let += taken(these)
        now += 1 / (rate * load)
    due = seconds * rate * min(load, 1)
    assert 0.95 * due <= let <= 1.05 * due
    assert let <= rate * (seconds + BURST_S) + 2


def test_who_is_refused_is_told_when_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(quotas, "monotonic", lambda: now)
    these = make(tmp_path / "q", 0, "rate=0.25")
    assert taken(these) and taken(these)
    with pytest.raises(QuotaUsed, match=r"the token app may send 0\.25 a second") as refused:
        these.take(HEADERS)
    assert refused.value.retry_after_s == 4
    now += 3.9
    assert not taken(these)
    now += 0.1
    assert taken(these) and not taken(these)
    now += 100.0
    assert [taken(these) for _ in range(3)] == [True, True, False]


def test_others_and_nobody_are_not_limited(tmp_path: Path) -> None:
    these = make(tmp_path / "q", 0, "rate=0.001", "concurrent=1")
    assert taken(these) and taken(these) and not taken(these)
    for value in (f"Bearer {KEY}2", f"Bearer {KEY}3", f"Basic {KEY}", ""):
        assert these.take([(b"authorization", value.encode())]) is None


def test_servers_share_what_is_had_at_once_and_one_that_was_killed_has_none(tmp_path: Path) -> None:
    first, second = (make(tmp_path / "q", number, "concurrent=3") for number in (1, 2))
    releases = [these.take(HEADERS) for these in (first, second, second)]
    assert not taken(first) and not taken(second)
    assert releases[0] is not None
    releases[0]()
    assert taken(second) and taken(first)
    make(tmp_path / "q", 2, "concurrent=3")  # started again
    assert [first.take(HEADERS) is not None for _ in range(3)] == [True] * 3
    assert not taken(first)
    assert taken(make(tmp_path / "q", 0, "concurrent=1")), "one alone begins anew"


def test_processes_share_a_rate(tmp_path: Path) -> None:
    run = [sys.executable, "-c", TAKES, str(tmp_path / "q")]
    ran = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    counts = [int(count) for count in ran.stdout.split()]
    assert len(counts) == 3
    assert 0.8 * 200 * 1.5 <= sum(counts) < 2.5 * 200 * 1.5, "none has a rate of its own"
    assert min(counts) < 0.8 * 200 * 1.5, "none has all"


@pytest.mark.parametrize(
    "quota",
    ["rate=0", "rate=-1", "rate=inf", "rate=nan", "rate=", "rate", "burst=3", "rate=1 rate=2",
     "concurrent=0", "concurrent=1.5", "concurrent=1e3", "rate=٣", "rate=1 at once"],
)  # fmt: skip
def test_what_is_no_quota_is_refused(quota: str) -> None:
    line = f"app predict sha256:{'0' * 64} "
    with pytest.raises(ValueError, match=r"is not a quota|not a whole number"):
        parse_grant(line + quota)
    parsed = parse_grant(f"{line}concurrent=8 rate=0.5")
    assert (parsed.rate, parsed.at_once) == (0.5, 8)
    assert parse_grant(str(parsed)) == parsed


def test_a_server_counts_what_its_clients_have_and_forgets_those_that_left(tmp_path: Path) -> None:
    build_archive(tmp_path, "slow", config="responseTimeout: 60\n")
    build_archive(tmp_path, "echo")
    tokens = tmp_path / "tokens.txt"
    limited = make_grant("app", "predict,explain", KEY, ["concurrent=2"])
    free = make_grant("free", "predict", KEY + "2")
    tokens.write_text(f"{limited}\n{free}\n")
    with running(tmp_path / "state", tmp_path, "--models=ALL", f"--token-file={tokens}") as server:
        url, auth = server.about["inference"], {"Authorization": f"Bearer {KEY}"}

        def ask(model: str = "echo", body: str = "x", key: str = KEY) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(f"{url}/predictions/{model}", content=body, headers=headers,
                              timeout=60, verify=False)  # fmt: skip

        go = make_notes_folder() / "go"
        with ThreadPoolExecutor(2) as pool:
            slow = [pool.submit(ask, "slow", str(go)) for _ in range(2)]
            used = tmp_path / "state" / "quotas"
            poll(lambda: any(f.read_bytes()[8] == 2 for f in used.glob("*")), "two are under way")
            refused = ask()
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert "the token app may have 2 at once" in refused.json()["message"]
            assert ask(key=KEY + "2").status_code == 200, "another token is not limited"
            models = httpx.get(f"{url}/v2/models/echo", headers=auth, verify=False)
            assert models.status_code == 200, "only answers of models count"
            go.touch()
            assert [each.result().status_code for each in slow] == [200, 200]
        assert ask().status_code == 200
        host, port = url.removeprefix("http://").split(":")
        head = f"POST /predictions/echo HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
        for rest in ("Content-Length: 100\r\n\r\nhalf", "Transfer-Encoding: chunked\r\n\r\nzz\r\n",
                     "Content-Length: 1\r\n\r\nx", "Content-Length: 99999999\r\n\r\nx",
                     "X-Request-Timeout: soon\r\nContent-Length: 1\r\n\r\nx"):  # fmt: skip
            for _ in range(3):
                with socket.create_connection((host, int(port))) as left:
                    left.sendall((head + rest).encode())
                    with contextlib.suppress(TimeoutError):
                        left.settimeout(0.05)
                        left.recv(1000)
            assert poll(lambda: ask().status_code == 200, f"{rest!r} left nothing")
