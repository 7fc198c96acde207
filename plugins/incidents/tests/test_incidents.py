"""An answer's id leads to its batch, and the batch gives the same bits again; a real server."""

from __future__ import annotations

import hashlib
import json
import random
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import yaml

from modelyard.archiver import write_archive
from modelyard.plugins.incidents.file import digest_of, read_incident
from modelyard.plugins.incidents.replay import replay_incidents
from tests.serve.live import LiveServer, running
from tests.shared import DIGITS, FILES

Document = dict[str, Any]

MIXES = """
def handle(data, context):
    texts = [bytes(row["body"]).decode() for row in data or ()]
    return [f"{text} after {'+'.join(texts[:at]) or 'none'}" for at, text in enumerate(texts)]
"""
"""A handler whose answers depend on who shares the batch, and in which order."""
METHODS = ("integrated_gradients", "gradient_shap", "kernel_shap")


def write_mixes(folder: Path, store: Path, name: str = "mixes", more: str = "") -> Path:
    handler, weights = folder / "mixes.py", folder / "weights.bin"
    handler.write_text(f"{MIXES}{more}")
    weights.write_bytes(b"none")
    return write_archive(name, artifact=weights, handler=str(handler), output_dir=store, force=True)


def start_options(folder: Path, **settings: object) -> str:
    """Write settings to a file, and return the option that names it."""
    models = {name: {"minWorkers": 1} for name in FILES}
    waits = {"maxBatchDelay": 200, "batchSize": 4, "minWorkers": 1}
    every = {"model_settings": {**models, "mixes": waits}, "incidents": 5000, **settings}
    file = folder / "settings.yaml"
    file.write_text(yaml.safe_dump(every))
    return f"--config={file}"


@pytest.fixture(scope="module")
def server(digits_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that remembers, inputs too."""
    folder = tmp_path_factory.mktemp("incidents")
    store = folder / "store"
    store.mkdir()
    for name in FILES:
        (store / f"{name}.mar").symlink_to(digits_store / f"{name}.mar")
    write_mixes(folder, store)
    option = start_options(folder, incident_inputs=True)
    with running(folder / "state", store, option, "--models=ALL") as server:
        yield server


def ask_digits(
    server: LiveServer, explains: tuple[str, ...], number: int, draw: random.Random
) -> tuple[str, httpx.Response]:
    """Send a prediction or a seeded explanation of one of the scans; return id and answer."""
    format, id = draw.choice(list(FILES)), f"ask-{number}"
    scan = (DIGITS / "scans" / f"{draw.randrange(10)}.png").read_bytes()
    kind, query = "predictions", {}
    if format in explains and draw.random() < 0.3:
        kind, method = "explanations", draw.choice(METHODS)
        query = {"method": method, "seed": str(draw.randrange(99)), "n_samples": "130"}
        if method == "integrated_gradients":
            query = {"method": method, "n_steps": "8"}
    answer = server.client.post(
        f"/{kind}/{format}", params=query, content=scan, headers={"x-request-id": id}
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == id
    return id, answer


def fetch(server: LiveServer, id: str, **query: str) -> Document:
    answer = server.management.get(f"/incidents/{quote(id, safe='')}", params=query)
    assert answer.status_code == 200, answer.text
    document: Document = answer.json()
    return document


def mixed(server: LiveServer, *texts: str) -> list[str]:
    """Send texts to `mixes` at once; return their answers."""

    def send(text: str) -> str:
        answer = server.predict("mixes", text, headers={"x-request-id": f"mix-{text}"})
        assert answer.status_code == 200, answer.text
        return answer.text

    with ThreadPoolExecutor(len(texts)) as threads:
        return list(threads.map(send, texts))


def replay(server: LiveServer, *documents: Document, folder: Path) -> list[Document]:
    """Replay documents by files of their own."""
    incidents = []
    for number, document in enumerate(documents):
        file = folder / f"{number}.json"
        file.write_text(json.dumps(document))
        incidents.append(read_incident(file))
    return replay_incidents(incidents, None, server.store)


def check_replayed(
    server: LiveServer, count: int, folder: Path, explains: tuple[str, ...] = tuple(FILES)
) -> int:
    """Ask for answers, one to sixteen at a time, and replay each; return how many had company."""
    draw = random.Random(0)
    answers: dict[str, httpx.Response] = {}
    while (done := len(answers)) < count:
        numbers = range(done, min(count, done + 40))
        draws = [random.Random(draw.random()) for _ in numbers]
        with ThreadPoolExecutor(draw.randint(1, 16)) as threads:
            answers |= threads.map(partial(ask_digits, server, explains), numbers, draws)
    documents = [fetch(server, id) for id in answers]
    outcomes = replay(server, *documents, folder=folder)
    wrong = [
        (document["model"], each)
        for document, each in zip(documents, outcomes, strict=True)
        if each["verdict"] != "same" or each["elsewhere"]
    ]
    for document in documents:
        own = document["batch"][document["place"]]
        body = answers[document["id"]].content
        assert own["answer_sha256"] == hashlib.sha256(body).hexdigest()
    assert wrong == [], f"{len(wrong)} of {count} differ"
    return sum(len(document["batch"]) > 1 for document in documents)


def test_answers_of_three_formats_are_given_again_bit_for_bit(
    server: LiveServer, tmp_path: Path
) -> None:
    assert check_replayed(server, 60, tmp_path, explains=("pt2",)) > 5


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_thousand_of_a_thousand_answers_are_given_again(
    server: LiveServer, tmp_path: Path
) -> None:
    assert check_replayed(server, 1000, tmp_path) > 100


def test_an_incident_says_what_led_to_an_answer(server: LiveServer) -> None:
    scan = (DIGITS / "scans" / "7.png").read_bytes()
    query = {"method": "gradient_shap", "seed": "5", "n_samples": "10"}
    answer = server.client.post("/explanations/pt2", params=query, content=scan)
    found = fetch(server, answer.headers["x-request-id"])
    digest = server.describe("pt2")["digest"]
    assert found["model"] == {"name": "pt2", "version": "1.0", "archive_sha256": digest}
    own = found["batch"][found["place"]]
    assert (own["kind"], own["seed"], own["status"], own["body_bytes"]) == (
        "explain", 5, 200, len(scan),
    )  # fmt: skip
    assert own["body_sha256"] == hashlib.sha256(scan).hexdigest()
    assert b64decode(own["answer"]) == answer.content
    assert found["worker"]["device"] == "cpu" and found["worker"]["threads"] >= 1
    assert found["machine"].keys() >= {"cpu", "instructions", "python", "torch", "modelyard"}


# -- the adversary -------------------------------------------------------------------------------


def sealed(document: Document) -> Document:
    """Return a document with the digest of what it says now, as a forger would write it."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    return {**rest, "sha256": digest_of(rest)}


def with_batch(document: Document, batch: list[Document]) -> Document:
    own = document["batch"][document["place"]]["id"]
    place = next(at for at, each in enumerate(batch) if each["id"] == own)
    return sealed({**document, "batch": batch, "place": place})


def exchange_mate(document: Document) -> Document:
    """Give the first of a batch, which others come after, another body with its digest."""
    first = {**document["batch"][0], "body": b64encode(b"else").decode()}
    first["body_sha256"] = hashlib.sha256(b"else").hexdigest()
    return with_batch(document, [first, *document["batch"][1:]])


def exchange_body(document: Document) -> Document:
    first = {**document["batch"][0], "body": b64encode(b"else").decode()}
    return with_batch(document, [first, *document["batch"][1:]])


def drop_mate(document: Document) -> Document:
    last = {"id": document["batch"][-1]["id"], "place": len(document["batch"]) - 1}
    return with_batch({**document, **last}, document["batch"][1:])


def with_own(document: Document, **values: object) -> Document:
    batch = [dict(each) for each in document["batch"]]
    batch[document["place"]] |= values
    return sealed({**document, "batch": batch})


REFUSED: dict[str, Callable[[Document], Document]] = {
    "a value is changed": lambda one: {**one, "batch_us": one["batch_us"] + 1},
    "its digest is left out": lambda one: {k: v for k, v in one.items() if k != "sha256"},
    "another archive": lambda one: sealed(
        {**one, "model": {**one["model"], "archive_sha256": "0" * 64}}
    ),
    "a format of another time": lambda one: sealed({**one, "modelyard_incident": 2}),
    "no format": lambda one: sealed({k: v for k, v in one.items() if k != "modelyard_incident"}),
    "a body is exchanged": exchange_body,
    "an answer is exchanged": lambda one: with_own(one, answer=b64encode(b"else").decode()),
    "a place outside": lambda one: sealed({**one, "place": 4}),
    "another id": lambda one: sealed({**one, "id": "somebody"}),
    "a key that nobody knows": lambda one: sealed(
        {**one, "worker": {**one["worker"], "load": {"envelope": "os.system", "batch_size": 4}}}
    ),
    "a device that is none": lambda one: sealed(
        {**one, "worker": {**one["worker"], "device": "/dev/null"}}
    ),
    "no threads": lambda one: sealed({**one, "worker": {**one["worker"], "threads": 0}}),
    "the body is missing": lambda one: with_own(one, body=None),
    "a head of another id": lambda one: with_own(one, head=b64encode(b"\0\0x").decode()),
    "flags of no frame": lambda one: with_own(one, flags=1 << 20),
}
DIFFERS: dict[str, Callable[[Document], Document]] = {
    "a batch-mate is swapped": exchange_mate,
    "a batch-mate is left out": drop_mate,
    "the order is another": lambda one: with_batch(one, one["batch"][::-1]),
    "another digest of the answer": lambda one: with_own(one, answer=None, answer_sha256="0" * 64),
    "another status": lambda one: with_own(one, status=202),
}
HARMLESS: dict[str, Callable[[Document], Document]] = {
    "as it is": lambda one: one,
    "once more": lambda one: one,
    "keys in another order": lambda one: dict(sorted(one.items(), reverse=True)),
    "the answer itself is left out": lambda one: with_own(one, answer=None),
}


def test_whatever_is_changed_in_a_file_is_noticed(server: LiveServer, tmp_path: Path) -> None:
    answers = mixed(server, "one", "two", "three", "four")
    last = max(answers, key=len)
    document = fetch(server, f"mix-{last.partition(' ')[0]}")
    assert len(document["batch"]) == 4, "they ran together"
    missed = [
        name for name, change in REFUSED.items() if is_accepted(server, change(document), tmp_path)
    ]
    changes = {**DIFFERS, **HARMLESS}
    found = replay(server, *(change(document) for change in changes.values()), folder=tmp_path)
    outcomes = {name: each["verdict"] for name, each in zip(changes, found, strict=True)}
    missed += [name for name in DIFFERS if outcomes[name] != "differs"]
    alarms = [name for name in HARMLESS if outcomes[name] != "same"]
    assert (missed, alarms) == ([], []), f"missed {missed}; false alarms {alarms}"


def is_accepted(server: LiveServer, document: Document, folder: Path) -> bool:
    from modelyard.archiver.errors import ArchiveError

    try:
        replay(server, document, folder=folder)
    except ArchiveError:
        return False
    return True
