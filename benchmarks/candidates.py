"""What roll-outs are tried with: candidates of the digits model, its scans, and a paced load."""

from __future__ import annotations

import http.client
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Self

from modelyard.archiver import write_archive

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "examples" / "digits"
HANDLERS = Path(__file__).with_name("candidate_handlers.py")
ANSWER_WITHIN_S = 30.0


def archive_candidate(
    store: Path,
    file: str,
    version: str,
    artifact: Path,
    behaviour: str = "",
    pause_ms: float | None = None,
    name: str = "digits",
) -> Path:
    """Archive an artifact of the digits model as one of its versions, with two golden requests.

    Args:
        store: where it goes.
        file: its name there.
        version: version of the model.
        artifact: artifact with its report beside it.
        behaviour: a class of `candidate_handlers`; empty for the built-in handler.
        pause_ms: pause of `Paused`, which is the behaviour then.
        name: name of the model.
    """
    with TemporaryDirectory(prefix="modelyard-candidate-") as folder:
        pause = Path(folder, "pause_ms.txt")
        pause.write_text(str(pause_ms), encoding="utf-8")
        behaviour = "Paused" if pause_ms is not None else behaviour
        made = write_archive(
            name,
            version=version,
            artifact=artifact,
            handler=f"{HANDLERS}:{behaviour}" if behaviour else "image_classifier",
            output_dir=Path(folder, "out"),
            extra_files=[DIGITS / "index_to_name.json", *([pause] if pause_ms is not None else [])],
            config_file=DIGITS / "model-config.yaml",
            examples=[f"{DIGITS / 'scans' / f'{digit}.png'}={digit}" for digit in (2, 7)],
        )
        store.mkdir(parents=True, exist_ok=True)
        return made.rename(store / file)


def scans() -> list[bytes]:
    """Return the 1,797 scans of the data set, as PNG."""
    from PIL import Image
    from sklearn.datasets import load_digits

    found = []
    for pixels in load_digits().images:
        file = io.BytesIO()
        Image.fromarray((pixels * 255 / 16).round().astype("uint8")).save(file, "PNG")
        found.append(file.getvalue())
    return found


class Outcome(NamedTuple):
    """What became of one request."""

    at: float
    """When it was sent, by `time.monotonic()`."""
    seconds: float
    status: int
    """0 where there was no answer."""
    version: str
    label: str
    body: int
    """Which of the bodies it was."""


class PacedLoad:
    """So many requests a second, each body in turn, over connections that stay open.

    Every request is accounted for.

    Args:
        address: host and port of the inference API.
        model: the name of a model, or a path below /predictions.
        bodies: bodies of the requests.
        rate: requests a second, of all connections.
        connections: most requests that are on their way at once.
        token: token for the inference API.
        in_bursts: whether all connections send at once, and then none for a while.
    """

    def __init__(
        self,
        address: tuple[str, int],
        model: str,
        bodies: Sequence[bytes],
        rate: float,
        connections: int = 8,
        token: str = "",
        in_bursts: bool = False,
    ) -> None:
        self._address = address
        self._path = f"/predictions/{model}"
        self._bodies = bodies
        self._pause_s = connections / rate
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._sent = 0
        self.outcomes: list[Outcome] = []
        self._threads = [
            threading.Thread(target=self._run, args=(0.0 if in_bursts else n / rate,))
            for n in range(connections)
        ]

    def __enter__(self) -> Self:
        """Start."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End once what is on its way is answered."""
        self._done.set()
        for thread in self._threads:
            thread.join()

    def count(self, since: float = 0.0) -> Counter[int]:
        """Return how many answers there were of each status."""
        return Counter(each.status for each in self.outcomes if each.at >= since)

    def versions(self, since: float = 0.0, until: float = float("inf")) -> Counter[str]:
        """Return how many answers each version gave."""
        return Counter(each.version for each in self.outcomes if since <= each.at < until)

    def percentile(self, percent: float, since: float = 0.0, until: float = float("inf")) -> float:
        """Return a percentile of latency in seconds."""
        times = sorted(each.seconds for each in self.outcomes if since <= each.at < until)
        return times[min(len(times) - 1, int(len(times) * percent / 100))]

    def _run(self, offset_s: float) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=ANSWER_WITHIN_S)
        due = time.monotonic() + offset_s
        while not self._done.wait(max(0.0, due - time.monotonic())):
            due = max(due + self._pause_s, time.monotonic() - 1.0)  # no burst after a pause
            with self._lock:
                number = self._sent % len(self._bodies)
                self._sent += 1
            began = time.monotonic()
            status, version, label = 0, "", ""
            try:
                connection.request("POST", self._path, self._bodies[number], self._headers)
                answer = connection.getresponse()
                text = answer.read()
                status, version = answer.status, answer.headers.get("x-model-version", "")
                if status == 200:
                    label = next(iter(json.loads(text)))
            except (OSError, http.client.HTTPException):
                connection.close()
            ended = time.monotonic()
            self.outcomes.append(Outcome(began, ended - began, status, version, label, number))
        connection.close()
