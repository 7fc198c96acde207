"""Roll-outs of a good, a subtly wrong and a slow candidate, as an operator sees them.

    python -m benchmarks.rollouts [good wrong slow] [-o docs/images/rollout] [--rate 100]

Serves the digits model (ONNX), sends it scans at a steady rate, and rolls out, one after the other:
the same model again; a candidate that gives one scan in a hundred another label;
one that takes 50 ms longer. Prints what became of each, and of the clients' requests. With `-o` a
browser (chromium and chromium-driver) takes pictures of the console's page.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from benchmarks.archives import build_digits, modelyard, modelyard_json
from benchmarks.candidates import PacedLoad, archive_candidate, scans

LONGEST_S = 180
WIDTH, HEIGHT = 1100, 1560
"""Size of a picture."""
CANDIDATES = ["good", "wrong", "slow"]
HEADING = (
    f"{'CANDIDATE':<10} {'ENDED AS':<10} {'AFTER':>7} {'COMPARED':>9} {'DIFFER':>7} "
    f"{'MORE THAN NOISE':>17} {'p50':>6} {'REQUESTS':>9} {'ERRORS':>7} {'CHANGED':>8}"
)
Picture = Callable[[str, str], None]


class Operator:
    """Somebody with the management token."""

    def __init__(self, about: dict[str, Any], token: str) -> None:
        self._url = about["management"]
        self._token = token

    def ask(self, method: str, path: str, **query: str) -> Any:
        """Send a request to the management API and return what it answers."""
        request = urllib.request.Request(f"{self._url}{path}?{urlencode(query)}", method=method)
        request.add_header("Authorization", f"Bearer {self._token}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


def main() -> None:
    """Roll out three candidates, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, help="folder for pictures")
    parser.add_argument("--rate", type=float, default=100, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20, help="of each state")
    parser.add_argument("candidates", nargs="*", default=CANDIDATES, choices=CANDIDATES)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="modelyard-rollouts-") as name:
        folder = Path(name)
        build_digits(folder, ("onnx",))
        onnx = folder / "artifacts" / "digits.onnx"
        store = folder / "rolled"
        archive_candidate(store, "digits.mar", "1.0", onnx)
        archive_candidate(store, "good.mar", "2.0", onnx)
        archive_candidate(store, "wrong.mar", "2.1", onnx, "Wrong")
        archive_candidate(store, "slow.mar", "2.2", onnx, pause_ms=50)
        bodies = scans()
        print(HEADING)
        for candidate in given.candidates:
            with (
                serving(store, folder / f"state-{candidate}") as (about, operator, token),
                picturing(given.output, about, token) as take,
            ):
                print(_roll_out(candidate, about, operator, bodies, given, take), flush=True)


@contextmanager
def serving(
    store: Path, state: Path, models: str = "digits"
) -> Iterator[tuple[dict[str, Any], Operator, str]]:
    """Serve a model for a block; yield the server, an operator and the token."""
    about = modelyard_json(
        "serve", "start", "--model-store", store, "--models", models, "--auth", "management",
        "--workers", "1", "--state-dir", state, "--port", "0", "--management-port", "0",
        "--metrics-port", "0",
    )  # fmt: skip
    try:
        token = json.loads((state / "keys.json").read_text(encoding="utf-8"))["management"]
        yield about, Operator(about, token), token
    finally:
        modelyard("serve", "stop", "--state-dir", state)


@contextmanager
def picturing(folder: Path | None, about: dict[str, Any], token: str) -> Iterator[Picture]:
    """Open the console's page of the roll-out in a browser for a block, unless no folder is named.

    What is yielded takes a picture as soon as the page shows a text.
    """
    if folder is None:
        yield lambda name, text: None
        return
    from tests.browser import browsing, running_driver  # a checkout has them

    with (
        tempfile.TemporaryDirectory(prefix="modelyard-pictures-") as logs,
        running_driver(Path(logs, "driver.log")) as driver,
        browsing(driver) as page,
    ):
        page.resize(WIDTH)
        page.prefer("light")
        page.open(f"{about['management']}/console/sign-in")
        page.find("#token").type(token)
        page.press("Enter")
        page.wait(lambda: "/sign-in" not in page.address, "the console opens")

        def take(name: str, text: str) -> None:
            page.open(f"{about['management']}/console/models/digits/1.0/rollout")
            page.shows(text)
            page.screenshot(folder / f"{name}.png")
            _shrink(folder / f"{name}.png")

        yield take


def _shrink(file: Path) -> None:
    """Cut a picture where a page of the docs would be all picture, and give it a palette."""
    from PIL import Image

    with Image.open(file) as picture:
        found = picture.convert("RGB").crop((0, 0, picture.width, min(picture.height, HEIGHT)))
    found.quantize(64).save(file, optimize=True)


def _roll_out(
    candidate: str, about: dict[str, Any], operator: Operator, bodies: list[bytes],
    given: argparse.Namespace, take: Picture,
) -> str:  # fmt: skip
    """Roll a candidate out under load; return a line of the table."""
    split = urlsplit(about["inference"])
    address = (split.hostname or "", split.port or 0)
    live_labels: dict[int, str] = {}
    with PacedLoad(address, "digits", bodies, given.rate) as clients:
        time.sleep(2)
        began = time.monotonic()
        operator.ask(
            "POST", "/models/digits/rollout", url=f"{candidate}.mar", shadow="50%",
            canary="50", **{"for": f"{given.seconds:g}s"},
        )  # fmt: skip
        seen = set()
        while time.monotonic() - began < LONGEST_S:
            found = operator.ask("GET", "/models/digits/rollout")
            state = found["state"]
            if state in ("default", "returned", "failed", "aborted"):
                break
            is_halfway = time.monotonic() - began > given.seconds / 2
            if state not in seen and is_halfway:
                seen.add(state)
                take(f"{candidate}-{state}", "Judgement")
            time.sleep(0.5)
        after_s = time.monotonic() - began
        time.sleep(1)
    take(candidate, found["state"])
    outcomes = clients.outcomes
    for each in outcomes:
        if each.version == "1.0":
            live_labels.setdefault(each.body, each.label)
    changed = sum(each.label != live_labels.get(each.body, each.label) for each in outcomes)
    failed = sum(count for status, count in clients.count().items() if status != 200)
    excess = found["bounds"]["excess"]
    p50, own = (found["latency"][side]["p50"] for side in ("live", "candidate"))
    ratio = own / p50 if own and p50 else 0
    more = f"{max(0, excess['low'] or 0):.2%} to {excess['high'] or 1:.2%}"
    return (
        f"{candidate:<10} {found['state']:<10} {after_s:>5.0f} s {found['compared']:>9} "
        f"{found['verdicts'].get('differs', 0):>7} {more:>17} {ratio:>6.2f} "
        f"{len(outcomes):>9} {failed:>7} {changed:>8}"
    )


if __name__ == "__main__":
    main()
