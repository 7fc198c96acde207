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
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from modelyard.archiver import write_archive
from modelyard.archiver.errors import ArchiveError, NothingCompared
from modelyard.plugins.incidents.cli import incident_app, replay_app
from modelyard.plugins.incidents.file import BadIncident, digest_of, read_incident
from modelyard.plugins.incidents.replay import replay_incidents
from modelyard.plugins.recertify.environments import plan
from modelyard.serve.errors import WrongUsage
from modelyard.serve.settings import load_settings
from plugins.recertify.tests.faults import interpreter
from plugins.tasks.tests.decoder import build_decoder, write_decoder
from tests.serve.live import LiveServer, running
from tests.shared import DIGITS, FILES

Document = dict[str, Any]

MIXES = """
def handle(data, context):
    texts = [bytes(row["body"]).decode() for row in data or ()]
    if texts and texts[0].startswith("long"):
        return ["x" * 5_000_000] * len(texts)
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
    models = {name: {"minWorkers": 1, "maxBatchDelay": 30} for name in FILES}
    waits = {"maxBatchDelay": 200, "batchSize": 4, "minWorkers": 1}
    every = {"model_settings": {**models, "mixes": waits}, "incidents": 5000, **settings}
    file = folder / "settings.yaml"
    file.write_text(yaml.safe_dump(every))
    return f"--config={file}"


@pytest.fixture(scope="module")
def server(digits_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that remembers, inputs too; what only some nights ask for has no worker yet."""
    folder = tmp_path_factory.mktemp("incidents")
    store = folder / "store"
    store.mkdir()
    for name in FILES:
        (store / f"{name}.mar").symlink_to(digits_store / f"{name}.mar")
    write_mixes(folder, store)
    option = start_options(folder, incident_inputs=True)
    with running(folder / "state", store, option, "--models=onnx,mixes") as server:
        yield server


def ask_digits(
    server: LiveServer, formats: tuple[str, ...], number: int, draw: random.Random
) -> tuple[str, httpx.Response]:
    """Send a prediction or a seeded explanation of one of the scans; return id and answer."""
    format, id = draw.choice(formats), f"ask-{number}"
    scan = (DIGITS / "scans" / f"{draw.randrange(10)}.png").read_bytes()
    kind, query = "predictions", {}
    if draw.random() < 0.3:
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


def ask_many(server: LiveServer, count: int, *formats: str) -> dict[str, httpx.Response]:
    """Ask for answers, one to sixteen at a time; return them by their ids."""
    draw = random.Random(0)
    answers: dict[str, httpx.Response] = {}
    while (done := len(answers)) < count:
        numbers = range(done, min(count, done + 20))
        draws = [random.Random(draw.random()) for _ in numbers]
        with ThreadPoolExecutor(draw.choice((16, 8, 3, 1))) as threads:
            answers |= threads.map(partial(ask_digits, server, formats), numbers, draws)
    return answers


def check_replayed(
    answers: dict[str, httpx.Response], documents: list[Document], outcomes: list[Document]
) -> int:
    """Check that each answer was given again; return how many had company in their batch."""
    wrong = [
        (document["model"], each)
        for document, each in zip(documents, outcomes, strict=True)
        if each["verdict"] != "same" or each["elsewhere"]
    ]
    for document in documents:
        own = document["batch"][document["place"]]
        body = answers[document["id"]].content
        assert own["answer_sha256"] == hashlib.sha256(body).hexdigest()
    assert wrong == [], f"{len(wrong)} of {len(documents)} differ"
    return sum(len(document["batch"]) > 1 for document in documents)


class Replayed(NamedTuple):
    """Answers, their documents and outcomes; and outcomes by machine and size of the numbers."""

    answers: dict[str, httpx.Response]
    documents: list[Document]
    outcomes: list[Document]
    elsewhere: dict[tuple[str, float], Document]


@pytest.fixture(scope="module")
def replayed(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    """Replay answers, and one as another machine gave it, or so many times as large.

    All at once: those of a machine have one process, which imports for seconds. Explanations are
    made by the twin, a .pt2.
    """
    answers = ask_many(server, 20, "onnx")
    documents = [fetch(server, id) for id in answers]
    said = said_elsewhere(server)
    folder = tmp_path_factory.mktemp("replayed")
    outcomes = replay(server, *documents, *said.values(), folder=folder)
    count = len(documents)
    found = dict(zip(said, outcomes[count:], strict=True))
    return Replayed(answers, documents, outcomes[:count], found)


def test_answers_are_given_again_bit_for_bit(replayed: Replayed) -> None:
    assert check_replayed(replayed.answers, replayed.documents, replayed.outcomes) > 5


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_thousand_of_a_thousand_answers_are_given_again(
    server: LiveServer, tmp_path: Path
) -> None:
    server.register_all("pt2", "torchscript")
    answers = ask_many(server, 1000, *FILES)
    documents = [fetch(server, id) for id in answers]
    outcomes = replay(server, *documents, folder=tmp_path)
    assert check_replayed(answers, documents, outcomes) > 100


def test_an_incident_says_what_led_to_an_answer(server: LiveServer) -> None:
    scan = (DIGITS / "scans" / "7.png").read_bytes()
    query = {"method": "gradient_shap", "seed": "5", "n_samples": "10"}
    answer = server.client.post("/explanations/onnx", params=query, content=scan)
    found = fetch(server, answer.headers["x-request-id"])
    digest = server.describe("onnx")["digest"]
    assert found["model"] == {"name": "onnx", "version": "1.0", "archive_sha256": digest}
    own = found["batch"][found["place"]]
    assert (own["kind"], own["seed"], own["status"], own["body_bytes"]) == (
        "explain", 5, 200, len(scan),
    )  # fmt: skip
    assert own["body_sha256"] == hashlib.sha256(scan).hexdigest()
    assert b64decode(own["answer"]) == answer.content
    assert found["worker"]["device"] == "cpu" and found["worker"]["threads"] >= 1
    assert found["machine"].keys() >= {"cpu", "instructions", "python", "torch", "modelyard"}


@pytest.mark.nightly
def test_sampled_texts_are_given_again_by_their_seeds(tmp_path: Path) -> None:
    write_decoder(build_decoder(64), tmp_path)
    config = tmp_path / "story.yaml"
    config.write_text("minWorkers: 1\nbatchSize: 4\n")
    write_archive(
        "story", artifact=tmp_path / "model.pt2", handler="generate", config_file=config,
        output_dir=tmp_path / "store", extra_files=[tmp_path / "tokenizer.json"],
    )  # fmt: skip
    option = start_options(tmp_path, incident_inputs=True)
    with running(tmp_path / "state", tmp_path / "store", option, "--models=story") as server:

        def tell(number: int) -> str:
            seed = {} if number % 2 else {"seed": number}
            body = {"prompt": f"{number}", "max_new_tokens": 20, "temperature": 1.5, **seed}
            answer = server.client.post("/predictions/story", json=body)
            assert answer.status_code == 200, answer.text
            return answer.headers["x-request-id"]

        with ThreadPoolExecutor(4) as threads:
            documents = [fetch(server, id) for id in threads.map(tell, range(20))]
        streamed = server.client.post(
            "/predictions/story", json={"prompt": "é", "max_new_tokens": 5, "stream": True}
        )
        with pytest.raises(NothingCompared, match="was streamed"):
            replay(server, fetch(server, streamed.headers["x-request-id"]), folder=tmp_path)
        found = replay(server, *documents, folder=tmp_path)
    assert [each["verdict"] for each in found] == ["same"] * 20, found
    assert all(each["batch"][each["place"]]["seed"] is not None for each in documents)


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
        {**one, "worker": {**one["worker"], "load": {"nvtx": True, "batch_size": 4}}}
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
    try:
        replay(server, document, folder=folder)
    except ArchiveError:
        return False
    return True


@pytest.mark.parametrize(
    ("cpu", "times", "verdict"),
    [("", 1.0, "same"), ("", 1 + 1e-7, "differs"), ("another", 1.0, "same"),
     ("another", 1 + 1e-7, "within"), ("another", 1.1, "differs")],
)  # fmt: skip
def test_a_bit_counts_on_this_machine_and_the_tolerance_elsewhere(
    replayed: Replayed, cpu: str, times: float, verdict: str
) -> None:
    found = replayed.elsewhere[cpu, times]
    assert found["verdict"] == verdict, found
    if not cpu:
        assert (found["elsewhere"], found["parity"]) == ([], None)
        return
    assert [each for each in found["elsewhere"] if each.startswith("cpu: another then")]
    assert found["parity"], "artifact and twin were compared here"


def said_elsewhere(server: LiveServer) -> dict[tuple[str, float], Document]:
    """Return an answer as this or another machine gave it, and as so many times as large."""
    scan = (DIGITS / "scans" / "7.png").read_bytes()
    answer = server.predict("onnx", scan)
    document = fetch(server, answer.headers["x-request-id"])
    said: dict[tuple[str, float], Document] = {}
    for cpu in ("", "another"):
        machine = {**document["machine"], **({"cpu": cpu} if cpu else {})}
        for times in (1.0, 1 + 1e-7, 1.1):
            labels = {label: share * times for label, share in answer.json().items()}
            body = json.dumps(labels).encode() if times != 1 else answer.content
            said[cpu, times] = with_own(
                {**document, "machine": machine},
                answer=b64encode(body).decode(), answer_sha256=hashlib.sha256(body).hexdigest(),
            )  # fmt: skip
    return said


# -- bounds, ids, and what is not kept -----------------------------------------------------------


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that remembers twenty answers by their digests alone."""
    folder = tmp_path_factory.mktemp("bounded")
    write_mixes(folder, folder / "store")
    option = start_options(folder, incidents=20)
    with running(folder / "state", folder / "store", option, "--models=mixes") as server:
        yield server


def ask(server: LiveServer, id: str, body: str = "hello") -> httpx.Response:
    return server.predict("mixes", body, headers={"x-request-id": id})


def test_a_flood_of_ids_leaves_the_latest_alone(bounded: LiveServer) -> None:
    ids = [f"flood-{number}" for number in range(100)]
    with ThreadPoolExecutor(16) as threads:
        for answer in threads.map(partial(ask, bounded), ids):
            assert answer.status_code == 200
    assert 0 < bounded.metric("modelyard_incident_answers") <= 20
    assert bounded.metric("modelyard_incident_bytes") < 20 * 2000
    found = [bounded.management.get(f"/incidents/{id}").status_code for id in ids]
    assert 0 < found.count(200) <= 20
    assert found.count(404) == 100 - found.count(200)


def test_an_id_that_was_sent_twice_names_both_answers(bounded: LiveServer) -> None:
    for body in ("one", "two"):
        assert ask(bounded, "twice", body).status_code == 200
    refused = bounded.management.get("/incidents/twice")
    assert refused.status_code == 409
    assert "2 answers have the id twice" in refused.text
    times = refused.json()["message"].partition("at: ")[2].split(", ")
    found = [fetch(bounded, "twice", at=time) for time in times]
    bodies = [each["batch"][each["place"]]["body_sha256"] for each in found]
    assert bodies == [hashlib.sha256(body).hexdigest() for body in (b"one", b"two")]
    assert bounded.management.get("/incidents/twice", params={"at": "now"}).status_code == 404


@pytest.mark.parametrize("id", ["a:b.c_d-e", "x" * 128, "..", "0"])
def test_ids_with_odd_characters_lead_to_their_answers(bounded: LiveServer, id: str) -> None:
    assert ask(bounded, id).headers["x-request-id"] == id
    wanted = quote(id, safe="").replace(".", "%2E")  # a client would take `..` for a folder
    assert bounded.management.get(f"/incidents/{wanted}").json()["id"] == id


@pytest.mark.parametrize("id", ["a/b", "x" * 129, "Ü", "a b"])
def test_an_id_that_is_none_is_replaced(bounded: LiveServer, id: str) -> None:
    answer = bounded.client.post(
        "/predictions/mixes", content=b"odd", headers={b"x-request-id": id.encode()}
    )
    own = answer.headers["x-request-id"]
    assert own != id
    assert fetch(bounded, own)["id"] == own


def test_only_operators_read_incidents(bounded: LiveServer) -> None:
    ask(bounded, "secret")
    url = f"{bounded.about['management']}/incidents/secret"
    assert httpx.get(url, verify=False).status_code == 401
    inference = {"Authorization": f"Bearer {bounded.inference_token}"}
    assert httpx.get(url, headers=inference, verify=False).status_code in (401, 403)
    assert bounded.client.get("/incidents/secret").status_code == 404


def test_without_the_setting_nothing_of_a_client_is_in_the_file(bounded: LiveServer) -> None:
    answer = bounded.client.post(
        "/predictions/mixes?patient=jane", content=b"private words",
        headers={"x-request-id": "shy", "cookie": "session=1234", "content-type": "image/x"},
    )  # fmt: skip
    assert answer.status_code == 200
    found = fetch(bounded, "shy")
    own = found["batch"][found["place"]]
    assert (own["body"], own["answer"], own["head_is_whole"]) == (None, None, False)
    text = json.dumps(found) + b64decode(own["head"]).decode()
    assert not [each for each in ("jane", "1234", "private") if each in text]
    assert "image/x" in text


def test_a_batch_whose_answers_fill_several_frames_is_one(bounded: LiveServer) -> None:
    with ThreadPoolExecutor(4) as threads:
        ids = [f"long-{number}" for number in range(4)]
        list(threads.map(lambda id: ask(bounded, id, "long"), ids))
    found = fetch(bounded, ids[0])
    assert sorted(each["id"] for each in found["batch"]) == ids
    digest = hashlib.sha256(b"x" * 5_000_000).hexdigest()
    assert {each["answer_sha256"] for each in found["batch"]} == {digest}


def command(app: Any, *words: str | Path, code: int) -> str:
    ran = CliRunner().invoke(app, list(map(str, words)))
    assert ran.exit_code == code, (ran.output, ran.exception)
    return ran.output


def test_the_commands_write_a_file_and_replay_it(bounded: LiveServer, tmp_path: Path) -> None:
    answer, file, body = ask(bounded, "told", "some words"), tmp_path / "i.json", tmp_path / "body"
    state = f"--state-dir={bounded.state_dir}"
    said = command(incident_app, "told", "-o", file, state, code=0)
    assert "how the answer told came about" in said
    assert "nothing is remembered" in command(incident_app, "none", "-o", file, state, code=1)
    lacking = command(replay_app, file, "--model-store", bounded.store, code=3)
    assert hashlib.sha256(b"some words").hexdigest() in lacking
    body.write_bytes(b"some words")
    archive = bounded.store / "mixes.mar"
    found = command(replay_app, file, "--archive", archive, "--body", body, "--json", code=0)
    outcome = json.loads(found)[0]
    assert (outcome["verdict"], outcome["elsewhere"]) == ("same", [])
    body.write_bytes(b"other words")
    command(replay_app, file, "--archive", archive, "--body", body, code=3)
    body.write_bytes(b"some words")
    other = write_mixes(tmp_path, tmp_path / "store", more="# another weight\n")
    refused = command(replay_app, file, "--archive", other, "--body", body, code=1)
    assert "the incident is of mixes" in " ".join(refused.split())
    command(replay_app, file, "--model-store", tmp_path / "store", "--body", body, code=1)
    assert answer.text.startswith("some words after")


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["scale of 1.001", "a last place"])
def test_with_the_versions_of_then_the_layer_is_named(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (planned,) = plan(["onnxruntime==99.0"])
    interpreter(planned.python.parents[1], fault)  # as if pip had made it
    (planned.python.parents[1] / "complete").touch()
    id, _ = ask_digits(server, ("onnx",), 10_000 + len(fault), random.Random(1))
    document = fetch(server, id)
    machine = {**document["machine"], "onnxruntime": "99.0"}
    file = tmp_path / "then.json"
    said = {**document, "machine": machine, "sha256": ""}
    del said["sha256"]
    file.write_text(json.dumps({**said, "sha256": digest_of(said)}))

    (found,) = replay_incidents([read_incident(file)], None, server.store, with_recorded=True)

    (text,) = found["recorded"]
    assert text.startswith("digits.onnx on onnxruntime==99.0, beside onnxruntime ")
    if fault == "a last place":
        assert ": within" in text
    else:
        assert "differs" in text and "(Conv, node_Conv" in text and f"the batch of {id}" in text


def test_a_torn_or_strange_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "i.json"
    for content in (b"", b"{", b"[]", b"{}", b"\xff", b'{"modelyard_incident": 1}', b"[" * 99):
        file.write_bytes(content)
        with pytest.raises(BadIncident):
            read_incident(file)
    with pytest.raises(BadIncident):
        read_incident(tmp_path / "absent.json")


def test_several_servers_do_not_remember() -> None:
    with pytest.raises(WrongUsage, match="servers is 2"):
        load_settings({"incidents": 5, "servers": 2}, None, {})


def test_without_the_setting_there_is_no_route_and_nothing_listens(
    shared_server: LiveServer,
) -> None:
    answer = shared_server.management.get("/incidents/any")
    assert answer.status_code == 404
    assert "remembered" not in answer.text
    assert "/incidents/{id}" not in shared_server.management.get("/openapi.json").json()["paths"]
    assert "incident_answers" not in shared_server.metrics.get("/metrics").text
