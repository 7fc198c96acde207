"""The routes of OpenAI, text-embeddings-inference and Cohere, by known answers."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from examples.minilm.make import train_tokenizer
from modelyard.plugins.embeddings import protocols
from modelyard.plugins.embeddings.face import Embeddings
from modelyard.plugins.embeddings.protocols import MOST_INPUTS, MOST_SIGNS, NAMED_BYTES, read_body
from modelyard.plugins.embeddings.rows import like_lengths
from modelyard.plugins.embeddings.tests.networks import (
    MOST_TOKENS,
    WORDS,
    Encoder,
    Scorer,
    build,
)
from modelyard.serve.errors import BadRequest
from modelyard.serve.http.connection import RequestResponseCycle
from tests.serve.live import LiveServer, modelyard
from tests.serve.test_connection import Served, run
from tests.serve.test_connection import post as http_post

LONG = "film " * (2 * MOST_TOKENS)
ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".peers" / "embeddings" / "bin" / "python"
CLIENTS = os.environ.get("EMBEDDINGS_PYTHON") or (str(PYTHON) if PYTHON.exists() else None)
RECORDED = json.loads(Path(__file__).with_name("requests.json").read_text())
"""Client, path and body of what `clients.py` sends, as they came over the wire."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embeddings")


@pytest.fixture(scope="module")
def server(shared_server: LiveServer, folder: Path) -> LiveServer:
    build(folder, shared_server.store)
    shared_server.register_all("encoder.mar", "scorer.mar", initial_workers=1)
    return shared_server


@pytest.fixture(scope="module")
def tokenizer(server: LiveServer, folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def vector(tokenizer: Tokenizer, text: str, cut: slice = slice(None)) -> np.ndarray:
    """Return the encoder's vector of a text, of length 1."""
    table = Encoder().table.weight.detach().numpy()
    ids = tokenizer.encode(text).ids
    mean = table[[ids[0], *ids[1:-1][cut], ids[-1]]].mean(0)
    return np.asarray(mean / np.linalg.norm(mean))


def post(server: LiveServer, path: str, status: int = 200, **body: Any) -> Any:
    answer = server.client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def near(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected), atol=2e-6)


def test_openais_vectors_in_every_form_of_input(server: LiveServer, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(each).ids for each in WORDS]
    expected = [vector(tokenizer, each) for each in WORDS]
    for given, count in ((WORDS[0], 1), (list(WORDS), 4), (ids[0], 1), (ids, 4)):
        found = post(server, "/v1/embeddings", model="encoder", input=given, user="somebody")
        near([each["embedding"] for each in found["data"]], expected[:count])
        assert [each["index"] for each in found["data"]] == list(range(count))
        tokens = sum(map(len, ids[:count]))
        assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        assert (found["object"], found["model"]) == ("list", "encoder")
    found = post(
        server, "/v1/embeddings", model="encoder/1.0", input="long", encoding_format="base64"
    )
    raw = np.frombuffer(base64.b64decode(found["data"][0]["embedding"]), "<f4")
    near(raw, vector(tokenizer, "long"))
    found = post(server, "/v1/embeddings", model="encoder", input="long", dimensions=4)
    part = vector(tokenizer, "long")[:4]
    near(found["data"][0]["embedding"], part / np.linalg.norm(part))


def test_text_embeddings_inferences_vectors(server: LiveServer, tokenizer: Tokenizer) -> None:
    near(post(server, "/embed", inputs=list(WORDS)), [vector(tokenizer, each) for each in WORDS])
    (bare,) = post(server, "/tei/encoder", inputs="long", normalize=False)
    assert abs(np.linalg.norm(bare) - 1) > 0.1
    near(bare / np.linalg.norm(bare), vector(tokenizer, "long"))
    ends = {"left": "dull " * 60 + LONG, "right": LONG + "dull " * 60}
    for side, text in ends.items():
        found = post(server, "/embed", inputs=text, truncate=True, truncation_direction=side)
        near(found, [vector(tokenizer, "film " * (MOST_TOKENS - 2))])
    tokens = post(server, "/tokenize", inputs="long")
    assert [each["id"] for each in tokens[0]] == tokenizer.encode("long").ids
    assert [each["special"] for each in tokens[0]] == [True, False, True]
    info = server.client.get("/tei/encoder/info").json()
    assert info["max_input_length"] == info["max_batch_tokens"] == MOST_TOKENS
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert server.client.get("/health").status_code == 200


def scores(tokenizer: Tokenizer, query: str) -> list[float]:
    model = Scorer()
    pairs = [tokenizer.encode(query, each) for each in WORDS]
    with torch.inference_mode():
        return [
            float(model(*(torch.tensor([x]) for x in (e.ids, e.attention_mask, e.type_ids))))
            for e in pairs
        ]


def test_texts_beside_a_query_come_the_best_first(server: LiveServer, tokenizer: Tokenizer) -> None:
    logits = scores(tokenizer, "a film")
    order = sorted(range(4), key=lambda at: -logits[at])
    assert order != [0, 1, 2, 3]
    found = post(server, "/rerank", query="a film", texts=WORDS, raw_scores=True, return_text=True)
    assert [each["index"] for each in found] == order
    assert [each["text"] for each in found] == [WORDS[at] for at in order]
    near([each["score"] for each in found], [logits[at] for at in order])
    chances = [1 / (1 + math.exp(-logits[at])) for at in order]
    near([each["score"] for each in post(server, "/rerank", query="a film", texts=WORDS)], chances)
    for path in ("/v1/rerank", "/v2/rerank"):
        found = post(
            server, path, model="scorer", query="a film", top_n=2, return_documents=True,
            documents=[WORDS[0], {"text": WORDS[1]}, *WORDS[2:]],
        )["results"]  # fmt: skip
        near([each["relevance_score"] for each in found], chances[:2])
        assert [each["document"]["text"] for each in found] == [WORDS[at] for at in order[:2]]
    info = server.client.get("/tei/scorer/info").json()
    assert list(info["model_type"]) == ["reranker"]


REFUSED: tuple[tuple[str, dict[str, Any], int, str], ...] = (
    ("/v1/embeddings", {"input": "a", "model": "other"}, 404, "Model not found: other"),
    ("/v1/embeddings", {"input": LONG}, 400, "tokens, and this model takes 24"),
    ("/v1/embeddings", {"input": [1, 2, 3]}, 400, "check_embedding_ctx_length=False"),
    ("/v1/embeddings", {"input": ["a", 7]}, 400, "something else than text"),
    ("/v1/embeddings", {"input": []}, 400, "input cannot be empty"),
    ("/v1/embeddings", {"input": "a", "dimensions": 5}, 400, "dimensions is 5; expected 4, 16"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 400, "float or base64"),
    ("/v1/embeddings", {"input": "a", "model": "scorer"}, 200, ""),
    ("/embed", {"inputs": LONG}, 413, "tokens, and this model takes 24"),
    ("/embed", {"inputs": ["a"] * (MOST_INPUTS + 1)}, 413, "at most 2048"),
    ("/embed", {"inputs": []}, 400, "cannot be empty"),
    ("/embed", {"inputs": "a", "prompt_name": "query"}, 422, "prompt_name is not supported"),
    ("/embed", {"inputs": "a", "truncate": "yes"}, 422, "true or false"),
    ("/tei/encoder/rerank", {"query": "a", "texts": ["b"]}, 424, "not a re-ranker"),
    ("/tei/nothing/embed", {"inputs": "a"}, 404, "Model not found"),
    ("/v1/rerank", {"query": "a", "documents": "b"}, 400, "not a list of texts"),
)


@pytest.mark.parametrize(("path", "body", "status", "says"), REFUSED)
def test_what_is_refused_says_why_in_its_protocols_form(
    server: LiveServer, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    found = post(server, path, status, **body)
    if status == 200:
        return
    error = (
        found["error"]["message"] if "/v1/emb" in path else found.get("error", found.get("message"))
    )
    assert says in error
    if "/v1/emb" in path:
        assert found["error"]["type"] == "invalid_request_error"
    if status == 413:
        assert found["error_type"] == "Validation"


def test_many_texts_at_once_are_answered_each_and_a_bad_one_ends_its_request_alone(
    server: LiveServer, tokenizer: Tokenizer
) -> None:
    texts = [f"{word} " * (1 + at % 9) for at, word in enumerate(("good", "film", "dull") * 60)]
    with ThreadPoolExecutor(4) as threads:
        bad = threads.submit(post, server, "/embed", 413, inputs=[*texts[:20], LONG])
        good = [threads.submit(post, server, "/embed", inputs=texts) for _ in range(3)]
        bad.result()
        expected = [vector(tokenizer, each) for each in texts]
        for each in good:
            near(each.result(), expected)
    answered = server.metric("modelyard_requests_total", model="encoder", kind="predict")
    assert answered < len(texts), "a request is counted once, however many texts it has"


def test_models_are_listed_for_openais_clients_and_kserves(server: LiveServer) -> None:
    found = server.client.get("/v1/models").json()
    assert {each["id"] for each in found["data"]} == set(found["models"]) >= {"encoder", "scorer"}
    one = server.client.get("/v1/models/encoder").json()
    assert (one["id"], one["object"], one["name"], one["ready"]) == (
        "encoder", "model", "encoder", True
    )  # fmt: skip
    assert server.client.get("/v1/models/nothing").status_code == 404


@pytest.mark.parametrize("most", [5, 12, 40])
def test_a_call_never_holds_more_tokens_than_it_may(most: int) -> None:
    lengths = dict(enumerate((3, 5, 1, 1, 4, 2, 5, 1)))
    calls = like_lengths(lengths, most)
    assert sorted(at for call in calls for at in call) == sorted(lengths)
    for call in calls:
        assert len(call) * max(lengths[at] for at in call) <= most
    assert len(calls) <= {5: 6, 12: 3, 40: 1}[most]


TEXTS = ["a good film", "the book was not as good as the film", "long and dull"]


@pytest.mark.parametrize(("client", "path", "body"), RECORDED)
def test_what_clients_send_is_answered_as_they_read_it(
    server: LiveServer, tokenizer: Tokenizer, client: str, path: str, body: str
) -> None:
    answer = server.client.post(
        path, content=body, headers={"user-agent": client, "content-type": "application/json"}
    )
    assert answer.status_code == 200, answer.text
    given, found = json.loads(body), answer.json()
    if "documents" in given:
        ranked = [each["relevance_score"] for each in found["results"]]
        assert ranked == sorted(ranked, reverse=True)
        assert len(ranked) == given.get("top_n", 3)
        return
    texts = given.get("input") or given["inputs"]
    if given.get("truncate"):
        texts = "film " * (MOST_TOKENS - 2)
    expected = [vector(tokenizer, each) for each in ([texts] if isinstance(texts, str) else texts)]
    if path != "/v1/embeddings":
        near(found, expected)
        return
    vectors = [each["embedding"] for each in found["data"]]
    if given["encoding_format"] == "base64":
        vectors = [np.frombuffer(base64.b64decode(each), "<f4") for each in vectors]
    near(vectors, expected)


@pytest.mark.slow
@pytest.mark.skipif(not CLIENTS, reason="`scripts/peers embeddings` has not been run")
def test_others_clients_work_unchanged(server: LiveServer, tokenizer: Tokenizer) -> None:
    assert CLIENTS is not None
    command = [CLIENTS, "-W", "ignore", str(Path(__file__).with_name("clients.py"))]
    url = str(server.client.base_url).rstrip("/")
    ran = subprocess.run(
        [*command, url, server.inference_token], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    expected = [vector(tokenizer, each) for each in TEXTS]
    for name in ("openai", "langchain_openai", "langchain_huggingface", "huggingface_hub"):
        assert isinstance(found[name], list), found[name]
        near(found[name], expected)
    assert found["cohere"] == found["langchain_jina"], found
    assert found["cohere_v1"] == found["cohere"][:2]
    assert [score for _, score in found["cohere"]] == sorted(
        (score for _, score in found["cohere"]), reverse=True
    )


@pytest.mark.slow
def test_a_cross_encoder_of_transformers_ranks_as_it_does_there(
    server: LiveServer, tmp_path: Path
) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=400, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, num_labels=1, initializer_range=0.5,
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "ranker")
    tokenizer = train_tokenizer(WORDS)
    tokenizer.save(str(tmp_path / "ranker" / "tokenizer.json"))
    size = "int64[batch=1..8,length=1..64]"
    names = ("input_ids", "attention_mask", "token_type_ids")
    commands: tuple[tuple[str | Path, ...], ...] = (
        ("export", tmp_path / "ranker", "--format=onnx", "-o", tmp_path,
         *(f"--input={name}:{size}" for name in names)),
        ("archive", "ranker", "--artifact", tmp_path / "ranker.onnx", "--handler", "text",
         "--version", "1.0", "--extra-files", tmp_path / "ranker" / "tokenizer.json",
         "-o", server.store),
    )  # fmt: skip
    for command in commands:
        done = modelyard(*command, timeout_s=300)
        assert done.returncode == 0, done.stderr
    server.register_all("ranker.mar", initial_workers=1)
    pairs = [tokenizer.encode("a film", each) for each in WORDS]
    with torch.inference_mode():
        logits = [
            float(model(*(torch.tensor([x]) for x in (e.ids, e.attention_mask, e.type_ids))).logits)
            for e in pairs
        ]
    found = post(server, "/tei/ranker/rerank", query="a film", texts=WORDS, raw_scores=True)
    assert [each["index"] for each in found] == sorted(range(4), key=lambda at: -logits[at])
    np.testing.assert_allclose([e["score"] for e in found], sorted(logits)[::-1], atol=1e-4)
    info = server.client.get("/tei/ranker/info").json()
    labels = {"id2label": {"0": "0"}, "label2id": {"0": 0}}  # the archive names none
    assert info["model_type"] == {"reranker": labels}


COLONS = ["at 10:30, \\u003a and \\\\u003a: \u00e9 :" * 40] * 500


@pytest.mark.parametrize("is_long", [False, True])
def test_a_body_is_read_whatever_its_texts_hold_and_refused_where_a_key_is_twice(
    is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long body is never given to the slow reader, which takes half a second for each MB."""
    if is_long:
        monkeypatch.delattr(protocols, "read_object")
    most = len(COLONS) if is_long else 4
    texts = [[*COLONS[:most], "a" * NAMED_BYTES * is_long], {"a": {"b": []}}]
    for ascii in (True, False):
        body = json.dumps({"input": texts, "x": "\\"}, ensure_ascii=ascii).encode()
        assert read_body(body) == {"input": texts, "x": "\\"}
        escaped = body.replace(b"10:30", rb"10\u003A30").replace(b"and", rb"and\u003a")
        assert read_body(escaped)["x"] == "\\"
        twice = rb', "x": "\u003a\u003a"}', rb', "\u0078": 1}'
        wrong = body[:-1], body[1:], body + b"1", b"[" + body + b"]"
        for each in (*wrong, *(body[:-1] + end for end in twice)):
            with pytest.raises(BadRequest):
                read_body(each)


@pytest.mark.parametrize("part", ["[]", "{}", '":"'])
def test_what_takes_long_to_read_is_refused_unread(part: str) -> None:
    with pytest.raises(BadRequest, match="send fewer texts"):
        read_body(f"[{','.join([part] * (MOST_SIGNS + 1))}]".encode())


class Counted(Embeddings):
    """Answers nothing, at once, and takes note of the loop's turn."""

    def __init__(self) -> None:
        self.turns = 0
        self.found: list[int] = []

    def _begin(self, cycle: RequestResponseCycle, *asked: Any) -> None:
        self.found.append(self.turns)
        cycle.send_whole(200, [(b"content-length", b"0")], b"")


def test_bodies_of_many_clients_are_read_in_as_many_turns() -> None:
    counted = Counted()  # type: ignore[abstract]
    answer = counted.route("inference", lambda cycle, id: None)

    async def scenario(served: Served) -> None:
        loop = asyncio.get_running_loop()

        def count() -> None:
            counted.turns += 1
            loop.call_soon(count)

        served.app.accept = lambda cycle: answer(cycle, "")  # type: ignore[method-assign]
        opened = [await served.open() for _ in range(8)]
        count()
        for _, writer, _ in opened:
            writer.write(http_post(b"/embed", b"{}"))
        for reader, writer, _ in opened:
            await reader.readuntil(b"\r\n\r\n")
            writer.close()

    run(scenario)
    assert len(set(counted.found)) == 8, counted.found
