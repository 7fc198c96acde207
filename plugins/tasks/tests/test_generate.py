"""Texts from a tiny decoder of bytes, beside those that transformers writes with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from modelyard.archiver.signature import parse_inputs
from modelyard.handlers import BadInput, Context, Generate, LoadError
from modelyard.plugins.tasks.sampling import Continuation, choose, read_request
from plugins.tasks.tests.decoder import PLACES, build_decoder, build_tokenizer, decoder_folder
from tests.handlers.folders import lightened

PROMPTS = ("once", "upon a time there was a", "é")
LONG = "x" * (PLACES - 8)

Make = Callable[..., Generate]


@pytest.fixture(scope="module")
def model() -> Any:
    return build_decoder(PLACES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what lies in the archive, as an export writes it."""
    return decoder_folder(tmp_path_factory)


@pytest.fixture(scope="module")
def make(folder: Path) -> Make:
    def make(config: dict[str, Any] | None = None, folder: Path = folder) -> Generate:
        report = json.loads((folder / "model.pt2.report.json").read_text())
        manifest = {
            "model": {"modelName": "story", "serializedFile": "model.pt2"},
            "modelyard": {
                "report": "model.pt2.report.json", "signature": report["signature"],
            },
        }  # fmt: skip
        settings = {"handler": {"generate": config or {}}}
        context = Context("story", str(folder), manifest, 4, model_yaml_config=settings)
        handler = Generate()
        handler.initialize(context)
        return handler

    return make


@pytest.fixture(scope="module")
def handler(make: Make) -> Generate:
    return make()


def answer(handler: Generate, *bodies: Any, accept: str = "") -> list[Any]:
    headers = [{"Accept": accept} if accept else {} for _ in bodies]
    handler.context.reset([str(at) for at in range(len(bodies))], headers)
    answers: list[Any] = handler.handle([{"body": body} for body in bodies], handler.context)
    return answers


def greedy(model: Any, prompt: str, count: int) -> list[int]:
    """Return the tokens that transformers writes, to the end or to that many."""
    ids = torch.tensor([build_tokenizer().encode(prompt).ids])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
        pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = found[0, ids.shape[1] :].tolist()
    return tokens


def text_of(tokens: Sequence[int]) -> str:
    """Return what tokens say, without a character of which a part is missing."""
    return build_tokenizer().decode(list(tokens)).rstrip("\N{REPLACEMENT CHARACTER}")


@pytest.fixture(scope="module")
def calls(handler: Generate) -> Iterator[list[int]]:
    """Count the rows of each call of the model."""
    run = handler._decoder._run
    rows: list[int] = []

    def count(*inputs: torch.Tensor) -> Any:
        rows.append(len(inputs[0]))
        return run(*inputs)

    handler._decoder._run = count
    yield rows
    handler._decoder._run = run


def test_prompts_of_any_length_are_continued_as_transformers_does(
    handler: Generate, model: Any
) -> None:
    bodies = [{"prompt": prompt, "max_new_tokens": 12} for prompt in PROMPTS]
    together = answer(handler, *bodies)
    for prompt, found in zip(PROMPTS, together, strict=True):
        expected = greedy(model, prompt, 12)
        assert found == {
            "text": text_of(expected),
            "tokens": 12,
            "prompt_tokens": len(prompt.encode()),
            "finish_reason": "length",
        }
    assert together == [answer(handler, body)[0] for body in bodies]


def test_requests_of_a_batch_are_stepped_together_and_leave_when_done(
    handler: Generate, calls: list[int]
) -> None:
    calls.clear()
    answer(handler, *({"prompt": "a", "max_new_tokens": count} for count in (1, 3, 5)))
    # The prompts, two steps of two texts, two more of the last one.
    assert calls == [3, 2, 2, 1, 1]


def test_requests_join_between_steps(handler: Generate, calls: list[int]) -> None:
    calls.clear()
    alone = [answer(handler, {"prompt": text, "max_new_tokens": 6})[0] for text in ("ab", "cde")]
    calls.clear()
    handler.join(7, {"body": {"prompt": "ab", "max_new_tokens": 6}}, {})
    found = handler.step() + handler.step()
    handler.join(8, {"body": {"prompt": "cde", "max_new_tokens": 6}}, {})
    while not handler.is_idle:
        found += handler.step()
    assert calls == [1, 1, 1, 2, 2, 2, 2, 1]
    assert {part.request: part.value for part in found} == {7: alone[0], 8: alone[1]}


def test_who_leaves_takes_no_step_more(handler: Generate, calls: list[int]) -> None:
    expected = answer(handler, {"prompt": "ab", "max_new_tokens": 5})[0]
    calls.clear()
    for request in (1, 2, 3):
        handler.join(request, {"body": {"prompt": "ab", "max_new_tokens": 5}}, {})
    handler.leave([3])
    handler.step()
    handler.leave([1])
    parts = []
    while not handler.is_idle:
        parts += handler.step()
    assert calls == [2, 1, 1, 1, 1]
    assert [(part.request, part.value) for part in parts] == [(2, expected)]


def test_a_text_ends_where_the_checkpoint_or_the_setting_says(
    handler: Generate, make: Make, model: Any
) -> None:
    tokens = greedy(model, "b", 8)
    end = tokens[4]
    text = build_tokenizer().id_to_token(end)
    found = answer(make({"end": text}), {"prompt": "b", "max_new_tokens": 8})[0]
    first = tokens.index(end)
    assert (found["finish_reason"], found["tokens"]) == ("end", first)
    assert found["text"] == text_of(tokens[:first])
    assert handler.end_tokens == {256}


def test_a_stop_ends_the_text_before_it(handler: Generate, model: Any) -> None:
    text = text_of(greedy(model, "é", 16))
    stop = text[3:6]
    first = text.index(stop)
    for stops in (stop, ["never", stop, text[3:7]]):
        found = answer(handler, {"prompt": "é", "max_new_tokens": 16, "stop": stops})[0]
        assert (found["text"], found["finish_reason"]) == (text[:first], "stop")
        assert found["tokens"] < 16


def test_a_seed_gives_the_same_text_again_and_is_told(handler: Generate) -> None:
    body = {"prompt": "b", "max_new_tokens": 24, "temperature": 1.5}
    drawn = [answer(handler, body)[0] for _ in range(4)]
    assert len({found["text"] for found in drawn}) > 1
    for found in drawn[:2]:
        mates = [{"prompt": "other"}, {**body, "seed": found["seed"]}]
        assert answer(handler, *mates)[1] == found


def test_one_likely_token_is_the_likeliest(handler: Generate) -> None:
    body = {"prompt": "b", "max_new_tokens": 8}
    sampled = {**body, "temperature": 2, "seed": 3}
    expected = answer(handler, body)[0]["text"]
    for options in ({"top_k": 1}, {"top_p": 1e-6}):
        assert answer(handler, {**sampled, **options})[0]["text"] == expected


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({"temperature": 1}, [0.1, 0.2, 0.3, 0.4]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ({"temperature": 1, "top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        ({"temperature": 1, "top_p": 0.6}, [0, 0, 3 / 7, 4 / 7]),
        ({"temperature": 1, "top_p": 0.75}, [0, 2 / 9, 3 / 9, 4 / 9]),
    ],
)
def test_tokens_are_drawn_by_their_shares(options: dict[str, float], shares: list[float]) -> None:
    asked = read_request({"prompt": "x", **options})
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = [choose(logits, asked, generator) for _ in range(4000)]
    found = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    assert torch.allclose(found, torch.tensor(shares), atol=0.03)
    assert not found[torch.tensor(shares) == 0].any()


def test_streams_say_what_the_answer_says(handler: Generate) -> None:
    body = {"prompt": "é", "max_new_tokens": 20, "temperature": 1, "seed": 5}
    whole = answer(handler, body)[0]
    (text,) = answer(handler, {**body, "stream": True})
    assert text == whole.pop("text")
    assert handler.context.get_response_content_type(0) == "text/plain; charset=utf-8"
    (events,) = answer(handler, body, accept="text/event-stream")
    assert handler.context.get_response_content_type(0) == "text/event-stream"
    *pieces, end, rest = events.split("\n\n")
    assert all(piece.startswith("data: ") for piece in pieces)
    assert "".join(json.loads(piece[6:])["text"] for piece in pieces) == text
    assert end.startswith("event: end\ndata: ")
    assert json.loads(end.partition("data: ")[2]) == whole
    assert rest == ""


def test_pieces_are_whole_characters_and_no_part_of_a_stop() -> None:
    tokenizer = build_tokenizer()
    text = "naïve 🙂 — ende STOP more"
    tokens = tokenizer.encode(text).ids
    found = Continuation(tokenizer.decode, tokenizer.encode("prompt").ids, ["STOP", "end!"])
    pieces = []
    for token in tokens:
        pieces.append(found.add(token))
        if found.has_stopped:
            break
    assert "".join(pieces) == "naïve 🙂 — ende "
    assert {"ï", "🙂", "—"} < set(pieces)  # each in one piece
    assert "end" in pieces  # held back as long as it might have been "end!"
    assert found.finish() == ""


def test_a_missing_part_of_a_character_is_left_out_and_held_text_is_not() -> None:
    tokenizer = build_tokenizer()
    found = Continuation(tokenizer.decode, [], ["stop"])
    pieces = [found.add(token) for token in tokenizer.encode("a sto🙂").ids[:-2]]
    assert "".join(pieces) == "a "
    assert found.finish() == "sto"


def test_words_are_joined_to_the_prompt_as_the_tokenizer_joins_them() -> None:
    vocabulary = {"once": 0, "upon": 1, "a": 2, "time": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    found = Continuation(tokenizer.decode, [0, 1], [])
    assert found.add(2) + found.add(3) == " a time"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "x" * PLACES}, f"{PLACES} tokens, and this model has {PLACES} places"),
        ({"prompt": LONG, "max_new_tokens": 9}, "expected 8 at most"),
        ({"prompt": ""}, "prompt is '';"),
        ({}, 'holds no "prompt"'),
        ([1], "the body is a list; expected text"),
        ({"inputs": "x", "parameters": {"n": 2}}, "n is unknown; expected some of prompt"),
        ({"inputs": LONG, "parameters": {"max_new_tokens": 9}}, "expected 8 at most"),
        ({"prompt": "x", "n": 2}, "n is unknown; expected some of prompt"),
        ({"prompt": "x", "max_new_tokens": 0}, "max_new_tokens is 0; expected a whole number"),
        ({"prompt": "x", "max_new_tokens": True}, "max_new_tokens is True"),
        ({"prompt": "x", "temperature": -1}, "temperature is -1; expected a number from 0"),
        ({"prompt": "x", "temperature": 1, "top_p": 0}, "top_p is 0"),
        ({"prompt": "x", "seed": 4}, "seed has no effect at temperature 0"),
        ({"prompt": "x", "stop": []}, "stop is "),
        ({"prompt": "x", "stop": [""]}, "stop is "),
        ({"prompt": "x", "stream": "yes"}, "stream is 'yes'; expected true or false"),
        (bytearray(b"\xff"), "not text in UTF-8"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_field(
    handler: Generate, body: Any, message: str
) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        answer(handler, body)
    assert handler.is_idle


def test_an_answer_ends_with_the_models_places(handler: Generate, model: Any) -> None:
    (found,) = answer(handler, LONG)
    assert (found["tokens"], found["finish_reason"]) == (8, "length")
    assert found["text"] == text_of(greedy(model, LONG, 8))


def test_text_json_and_bytes_are_prompts(handler: Generate) -> None:
    bodies = (
        "ab", bytearray(b"ab"), bytearray(b'"ab"'), {"prompt": "ab"}, bytearray(b'{"prompt":"ab"}')
    )  # fmt: skip
    found = answer(handler, *bodies[:4]) + answer(handler, bodies[4])
    assert all(each == found[0] for each in found)
    (braces,) = answer(handler, bytearray(b"{ab"))
    assert braces["prompt_tokens"] == 3


def test_a_text_is_not_explained(handler: Generate) -> None:
    with pytest.raises(BadInput, match="writes texts"):
        handler.explain([], handler.context)


def test_a_step_that_fails_leaves_the_handler_empty(handler: Generate) -> None:
    run = handler._decoder._run

    def fail(*inputs: Any) -> Any:
        raise MemoryError

    handler.join(1, {"body": "ab"}, {})
    handler.step()
    handler._decoder._run = fail
    with pytest.raises(MemoryError):
        handler.step()
    handler._decoder._run = run
    assert handler.is_idle
    assert answer(handler, "ab")[0]["tokens"] > 0


def test_a_token_that_the_model_does_not_take_is_refused(
    handler: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stated,) = parse_inputs(["input_ids:int64[batch,length]<110"]).inputs
    monkeypatch.setattr(handler, "inputs", (stated, *handler.inputs[1:]))
    assert answer(handler, "once")[0]["tokens"] > 0
    with pytest.raises(BadInput, match=r'"input_ids" holds 220; expected values =0\.\.109, as t'):
        answer(handler, "once upon")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"ends": "x"}, "handler.generate.ends is unknown; expected tokenizer, end"),
        ({"end": "nowhere"}, "names 'nowhere', which the tokenizer does not know"),
        ({"end": 5}, "handler.generate.end is 5; expected a token"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; expected a whole number from 1"),
        ({"tokenizer": "none.json"}, "the archive holds no none.json"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    make: Make, folder: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoadError, match=re.escape(message)):
        make(config, lightened(folder, tmp_path))


def test_other_artifacts_are_refused(make_context: Callable[..., Context]) -> None:
    with pytest.raises(LoadError, match="a decoder with its cache: export it with --generate"):
        Generate().initialize(make_context())
