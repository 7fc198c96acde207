"""What each protocol's requests and answers look like; no server, and no model.

https://platform.openai.com/docs/api-reference/embeddings
https://huggingface.github.io/text-embeddings-inference
https://docs.cohere.com/reference/rerank
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import orjson

from modelyard.serve.api.oip import read_object
from modelyard.serve.errors import BadRequest

MOST_INPUTS = 2048
"""Most inputs of one request; OpenAI's."""
NAMED_BYTES = 1 << 14
"""Longest body of which core's reader says what is wrong: it may take half a second for each MB."""
MOST_SIGNS = 1 << 18
"""Most brackets and colons of a longer one, which take 50 ms: nobody else is answered meanwhile."""
Text = dict[str, Any]
"""One text and what is wanted of it, as `rows.TextRows` reads it."""


class Refused(BadRequest):
    """A request that its protocol refuses with a status of its own."""

    def __init__(self, message: str, status: int, kind: str = "Validation") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class Row(NamedTuple):
    """A model's numbers for one text."""

    tokens: int
    values: np.ndarray

    @classmethod
    def read(cls, body: bytes) -> Row:
        """Read what a worker answers."""
        return cls(int.from_bytes(body[:4], "little"), np.frombuffer(body, "<f4", offset=4))


@dataclass(frozen=True)
class Asked:
    """A request."""

    texts: Sequence[Text]
    write: Callable[[Sequence[bytes], str], bytes]
    """Returns the answer, given those of all texts and the model's name."""
    model: Any = None


def read_body(body: bytes) -> Mapping[str, Any]:
    """Return a request's object, in a time that the event loop has.

    Raises:
        BadRequest: it is none, or has a key twice: fewer colons are left when it is written again.
    """
    if len(body) <= NAMED_BYTES:
        return read_object(body)
    colons = body.count(b":")
    if colons + body.count(b"[") + body.count(b"{") > MOST_SIGNS:
        raise BadRequest(f"more than {MOST_SIGNS} brackets and colons; send fewer texts at once")
    escaped = body.replace(rb"\\", b"")
    colons += escaped.count(rb"\u003a") + escaped.count(rb"\u003A")
    try:
        found: dict[str, Any] = orjson.loads(body)
        is_whole = isinstance(found, dict) and orjson.dumps(found).count(b":") == colons
    except (ValueError, TypeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not is_whole:
        raise BadRequest("the body is not a JSON object, or has a key twice")
    return found


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _inputs(body: Mapping[str, Any], key: str) -> list[Text]:
    """Return texts and lists of tokens, of which there may be one or a list."""
    value = body.get(key)
    is_one = isinstance(value, str) or (bool(value) and _are_tokens(value))
    found = [value] if is_one else value
    if not isinstance(found, list):
        raise BadRequest(f"{key} is not there; expected text, tokens, or a list of these")
    _check_count(found, key)
    if not all(isinstance(each, str) or _are_tokens(each) for each in found):
        raise BadRequest(f"{key} holds something else than text, or lists of tokens")
    return [{"text": [each]} if isinstance(each, str) else {"ids": each} for each in found]


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _check_count(found: Sequence[Any], key: str) -> None:
    if not found:
        raise Refused(f"{key} cannot be empty", 400, "Empty")
    if len(found) > MOST_INPUTS:
        raise Refused(f"{key} has {len(found)} texts; at most {MOST_INPUTS} are taken", 413)


def _texts(body: Mapping[str, Any], key: str) -> list[str]:
    found = body.get(key)
    if isinstance(found, list):
        _check_count(found, key)
        found = [each.get("text") if isinstance(each, dict) else each for each in found]
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise BadRequest(f"{key} is not a list of texts")
    return found


def _option(body: Mapping[str, Any], key: str, kind: Any, default: Any = None) -> Any:
    """Return an option of a type, or one of a few values; null is as if it were not there."""
    value = body.get(key)
    if value is None:
        return default
    is_one = value in kind if isinstance(kind, tuple) else type(value) is kind
    if not is_one or (kind is int and value < 1):
        names = kind if isinstance(kind, tuple) else (_WORDS[kind],)
        raise BadRequest(f"{key} is {value!r:.80}; expected {' or '.join(names)}")
    return value


_WORDS = {bool: "true or false", int: "a whole number from 1", str: "text"}


def _cut(body: Mapping[str, Any]) -> Text:
    """Return how text-embeddings-inference's options have a long text cut."""
    side = _option(body, "truncation_direction", ("left", "right", "Left", "Right"), "right")
    return {"cut": side.lower()} if _option(body, "truncate", bool, False) else {}


# -- OpenAI ----------------------------------------------------------------------------------------


def read_embeddings(body: Mapping[str, Any]) -> Asked:
    """Read a request for vectors."""
    is_base64 = _option(body, "encoding_format", ("float", "base64")) == "base64"
    _option(body, "user", str)
    size = _option(body, "dimensions", int)

    def write(answers: Sequence[bytes], model: str) -> bytes:
        rows = [Row.read(answer) for answer in answers]
        count = sum(row.tokens for row in rows)
        vectors = [
            b64encode(row.values.tobytes()).decode() if is_base64 else row.values for row in rows
        ]
        data = [
            {"object": "embedding", "index": at, "embedding": vector}
            for at, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return _dumps({"object": "list", "data": data, "model": model, "usage": usage})

    texts = [{**text, "dimensions": size} for text in _inputs(body, "input")]
    return Asked(texts, write, _option(body, "model", str))


# -- text-embeddings-inference ---------------------------------------------------------------------


def read_embed(body: Mapping[str, Any]) -> Asked:
    """Read a request for vectors."""
    if body.get("prompt_name") is not None:
        raise BadRequest("prompt_name is not supported; put the prompt before the text")
    size, is_unit = _option(body, "dimensions", int), _option(body, "normalize", bool, True)
    more = {"normalize": is_unit, "dimensions": size, **_cut(body)}

    def write(answers: Sequence[bytes], model: str) -> bytes:
        return _dumps([Row.read(answer).values for answer in answers])

    return Asked([{**text, **more} for text in _inputs(body, "inputs")], write)


def _rank(answers: Sequence[bytes], is_raw: bool = False) -> tuple[list[tuple[int, float]], int]:
    """Return indexes with scores, the best first, and the tokens of all.

    Raises:
        Refused: the model gives several numbers.
    """
    rows = [Row.read(answer) for answer in answers]
    if any(row.values.shape != (1,) for row in rows):
        raise Refused("model is not a re-ranker: it gives several numbers", 424, "Backend")
    logits = [float(row.values[0]) for row in rows]
    scores = logits if is_raw else [0.5 * (1 + math.tanh(0.5 * each)) for each in logits]
    found = sorted(enumerate(scores), key=lambda each: -each[1])
    return found, sum(row.tokens for row in rows)


def _pairs(body: Mapping[str, Any], texts: Sequence[str], more: Text) -> list[Text]:
    """Return the texts, each behind the query."""
    if not isinstance(query := body.get("query"), str):
        raise BadRequest("query is not text")
    return [{"text": [query, text], **more} for text in texts]


def read_rerank(body: Mapping[str, Any]) -> Asked:
    """Read a request for scores of texts beside a query."""
    texts = _texts(body, "texts")
    is_raw, has_text = (_option(body, key, bool, False) for key in ("raw_scores", "return_text"))

    def write(answers: Sequence[bytes], model: str) -> bytes:
        ranked = _rank(answers, is_raw)[0]
        return _dumps([
            {"index": at, "score": score} | ({"text": texts[at]} if has_text else {})
            for at, score in ranked
        ])  # fmt: skip

    return Asked(_pairs(body, texts, _cut(body)), write)


def read_tokenize(body: Mapping[str, Any]) -> Asked:
    """Read a request for the tokens of texts."""
    if _option(body, "add_special_tokens", bool, True) is False:
        raise BadRequest("add_special_tokens is false; expected true: they are counted too")
    inputs = body.get("inputs")
    texts = _texts({"inputs": [inputs] if isinstance(inputs, str) else inputs}, "inputs")
    asked = [{"text": [text], "form": "tokens", "cut": "right"} for text in texts]
    return Asked(asked, lambda answers, model: _join(answers))


def read_info(body: Mapping[str, Any]) -> Asked:
    """Read a request for what the model is."""

    def write(answers: Sequence[bytes], model: str) -> bytes:
        about = orjson.loads(answers[0])
        kind: Any = {"embedding": {"pooling": "mean"}}
        if (labels := about.pop("labels")) is not None:
            name = "reranker" if len(labels) == 1 else "classifier"
            label2id = {label: int(id) for id, label in labels.items()}
            kind = {name: {"id2label": labels, "label2id": label2id}}
        return _dumps({
            "model_id": model, "model_dtype": "float32", "model_type": kind, **about,
            "served_model_name": model, "max_client_batch_size": MOST_INPUTS,
            "auto_truncate": False, "version": version("modelyard"),
        })  # fmt: skip

    return Asked([{"text": [""], "form": "about"}], write)


def _join(answers: Sequence[bytes]) -> bytes:
    return b"[" + b",".join(answers) + b"]"


# -- Cohere, Jina ----------------------------------------------------------------------------------


def read_documents(body: Mapping[str, Any]) -> Asked:
    """Read a request for scores of documents beside a query."""
    documents = _texts(body, "documents")
    has_text = _option(body, "return_documents", bool, False)
    most = _option(body, "top_n", int, len(documents))

    def write(answers: Sequence[bytes], model: str) -> bytes:
        found, count = _rank(answers)
        results: list[dict[str, Any]] = [
            {"index": at, "relevance_score": score} for at, score in found[:most]
        ]
        for result in results if has_text else ():
            result["document"] = {"text": documents[result["index"]]}
        usage = {"prompt_tokens": count, "total_tokens": count}
        return _dumps({"model": model, "results": results, "usage": usage})

    pairs = _pairs(body, documents, {"cut": "right"})
    return Asked(pairs, write, _option(body, "model", str))


# -- errors ----------------------------------------------------------------------------------------


def openai_error(status: int, message: str, kind: str) -> tuple[int, Any]:
    """Return an error as OpenAI has it."""
    code = {404: "model_not_found", 413: "context_length_exceeded"}.get(status)
    status = 400 if status == 413 else status
    kind = "server_error" if status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if status == 429 else kind
    return status, {"error": {"message": message, "type": kind, "param": None, "code": code}}


def tei_error(status: int, message: str, kind: str) -> tuple[int, Any]:
    """Return an error as text-embeddings-inference has it."""
    status = {400: 400 if kind == "Empty" else 422, 503: 429, 500: 424, 507: 424}.get(
        status, status
    )
    kind = {429: "Overloaded", 424: "Backend", 504: "Backend"}.get(status, kind)
    return status, {"error": message, "error_type": kind}


def cohere_error(status: int, message: str, kind: str) -> tuple[int, Any]:
    """Return an error as Cohere has it."""
    return 400 if status == 413 else status, {"message": message}


class Protocol(NamedTuple):
    """What a path is for."""

    read: Callable[[Mapping[str, Any]], Asked]
    error: Callable[[int, str, str], tuple[int, Any]]
    handler: str
    """Handler of the models that answer it, where a request names none."""
    summary: str
    method: str = "POST"


ENCODER, CLASSIFIER = "text_encoder", "text"
_COHERE = Protocol(read_documents, cohere_error, CLASSIFIER, "Documents in the order of a query")
PATHS = {
    "/v1/embeddings": Protocol(read_embeddings, openai_error, ENCODER, "Vectors, as OpenAI's"),
    "/v1/rerank": _COHERE,
    "/v2/rerank": _COHERE,
    "/embed": Protocol(read_embed, tei_error, ENCODER, "Vectors of texts"),
    "/rerank": Protocol(read_rerank, tei_error, CLASSIFIER, "Scores of texts beside a query"),
    "/tokenize": Protocol(read_tokenize, tei_error, ENCODER, "Tokens of texts"),
    "/info": Protocol(read_info, tei_error, ENCODER, "What the model is", "GET"),
}
"""Paths of the inference API, and below `/tei/MODEL`."""
