"""A prompt in, the text that follows out: at once, or as it is written."""

import contextlib
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from modelyard.archiver.handler_files import TOKENIZER_FILE
from modelyard.handlers.base import BaseHandler
from modelyard.handlers.body import body_of, decode_text, parse_json
from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, LoadError
from modelyard.handlers.limits import check_stated
from modelyard.handlers.models.rows import read_section, read_whole
from modelyard.handlers.steps import Part, Steps
from modelyard.handlers.tasks.text_handler import INPUTS, PARAMETERS, load_tokenizer
from modelyard.plugins.tasks.decoder import Cache, Decoder, is_decoder
from modelyard.plugins.tasks.sampling import Asked, Continuation, choose, read_request

MAX_NEW_TOKENS = 64
"""Tokens of an answer, where neither the request nor the settings say."""
TEXT, EVENTS = "text/plain; charset=utf-8", "text/event-stream"
_SETTINGS = ("tokenizer", "end", "max_new_tokens")


class Generate(Steps, BaseHandler):
    """Serve a decoder that `modelyard export --generate` wrote, with its `tokenizer.json`.

    A request's body is a text, or an object with `prompt` and options (`sampling.Asked`). The
    answer is an object; with `"stream": true` pieces of text, with `Accept: text/event-stream`
    events. Requests are stepped together: they join and leave between two tokens.

    `handler.generate` of model-config.yaml: `tokenizer` (the file), `end` (tokens that end a text,
    in place of the checkpoint's), `max_new_tokens` (where a request does not say).
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer: Any = None
        self.end_tokens: frozenset[int] = frozenset()
        self.max_new_tokens = MAX_NEW_TOKENS
        self._decoder: Decoder
        self._cache: Cache | None = None
        self._joining: list[_Text] = []
        self._running: list[_Text] = []
        """Texts in the order of the cache's rows."""

    def initialize(self, context: Context) -> None:
        """Load the archive and its tokenizer.

        Raises:
            LoadError: the artifact is not a decoder with its cache, or a setting or the tokenizer
                cannot be used.
        """
        super().initialize(context)
        if not is_decoder(self.inputs):
            takes = ", ".join(map(str, self.inputs[:4]))
            raise LoadError(
                f"the artifact takes {takes}; the handler generate serves a decoder with its "
                "cache: export it with --generate"
            )
        section = read_section(self.handler_settings, "generate", _SETTINGS)
        self._decoder = Decoder(self.model, self.inputs, self.model.device)
        folder = Path(context.system_properties["model_dir"])
        self.made_by = section.get("tokenizer", TOKENIZER_FILE)
        self.tokenizer = load_tokenizer(folder / self.made_by)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.end_tokens = self._find_end(section.get("end"))
        self.max_new_tokens = read_whole(
            "handler.generate.max_new_tokens", section.get("max_new_tokens", MAX_NEW_TOKENS)
        )

    def explain(self, data: Sequence[Mapping[str, Any]], context: Context) -> NoReturn:
        """Refuse: a text has no label that could be explained."""
        raise BadInput("this model writes texts, which have no label; explain a classifier")

    def join(self, request: int, row: Mapping[str, Any], headers: Mapping[str, Any]) -> None:
        """Take a prompt in.

        Raises:
            BadInput: options that cannot be used, or a text longer than the model's places.
        """
        content, is_tritons = _as_tritons(_content(row))
        asked = read_request(content)
        prompt = self.tokenizer.encode(asked.prompt).ids
        limit = self._limit(len(prompt), asked.max_new_tokens)
        check_stated(self.inputs[:1], [torch.tensor(prompt)], 1, self.made_by)
        sends_events = EVENTS in str(headers.get("accept") or "").lower()
        form = EVENTS if sends_events else TEXT if asked.stream else ""
        if is_tritons and sends_events:
            form = TEXT  # whose pieces the server makes events of
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        text = Continuation(lambda tokens: decode(list(tokens)), prompt, asked.stop)
        key = "text_output" if is_tritons else "text"
        self._joining.append(_Text(request, asked, prompt, limit, form, text, key))

    def step(self) -> list[Part]:
        """Write the first token of those that have joined; else one more of all others."""
        try:
            if self._joining:
                return self._begin()
            assert self._cache is not None
            logits = self._decoder.step(self._cache, [text.last for text in self._running])
            parts = self._take(self._running, logits)
            self._drop([text.request for text in self._running if text.reason])
            return parts
        except BaseException:
            self._joining, self._running, self._cache = [], [], None
            raise

    def leave(self, requests: Collection[int]) -> None:
        """Forget prompts that nobody waits for."""
        self._joining = [text for text in self._joining if text.request not in requests]
        self._drop(requests)

    @property
    def is_idle(self) -> bool:
        """Whether no text is being written."""
        return not self._joining and not self._running

    # ----------------------------------------------------------------------------------------------

    def _begin(self) -> list[Part]:
        joining, self._joining = self._joining, []
        logits, cache = self._decoder.read([text.prompt for text in joining])
        parts = self._take(joining, logits)
        going_on = [row for row, text in enumerate(joining) if not text.reason]
        if going_on:
            if len(going_on) < len(joining):
                cache.keep(going_on)
            if self._cache is None:
                self._cache = cache
            else:
                self._cache.extend(cache)
            self._running += [joining[row] for row in going_on]
        return parts

    def _take(self, texts: Sequence["_Text"], logits: torch.Tensor) -> list[Part]:
        """Choose each text's next token by its row of the logits (N, V)."""
        likeliest = logits.argmax(dim=1).tolist()
        parts = []
        for text, token, row in zip(texts, likeliest, logits, strict=True):
            if text.asked.temperature:
                token = choose(row, text.asked, text.generator)
            parts += text.take(token, token in self.end_tokens)
        return parts

    def _drop(self, requests: Collection[int]) -> None:
        kept = [row for row, text in enumerate(self._running) if text.request not in requests]
        if len(kept) == len(self._running):
            return
        self._running = [self._running[row] for row in kept]
        if not kept:
            self._cache = None
        elif self._cache is not None:
            self._cache.keep(kept)
            self._decoder.fit(self._cache)

    def _limit(self, prompt: int, asked: int | None) -> int:
        """Return how many tokens may follow a prompt of so many."""
        places = self._decoder.positions
        if not prompt:
            raise BadInput("the prompt holds no token that the model knows; expected a text")
        if prompt >= places:
            raise BadInput(
                f"the prompt has {prompt} tokens, and this model has {places} places for prompt "
                "and answer; send a shorter one"
            )
        if asked is not None and prompt + asked > places:
            raise BadInput(
                f"max_new_tokens is {asked} and the prompt has {prompt} tokens; this model has "
                f"{places} places for both, so expected {places - prompt} at most"
            )
        return min(asked or self.max_new_tokens, places - prompt)

    def _find_end(self, stated: Any) -> frozenset[int]:
        if stated is None:
            return frozenset(self.report.end_tokens if self.report else ())
        tokens = [stated] if isinstance(stated, str) else stated
        if not isinstance(tokens, list) or not all(isinstance(each, str) for each in tokens):
            raise LoadError(
                f"handler.generate.end is {stated!r}; expected a token such as <|endoftext|>, or a "
                "list of them"
            )
        found = {token: self.tokenizer.token_to_id(token) for token in tokens}
        if unknown := [token for token, id in found.items() if id is None]:
            raise LoadError(
                f"handler.generate.end names {unknown[0]!r}, which the tokenizer does not know"
            )
        return frozenset(found.values())


@dataclass(eq=False)
class _Text:
    """One text that is being written."""

    request: int
    """Its number."""
    asked: Asked
    prompt: list[int]
    limit: int
    """The most new tokens."""
    form: str
    """TEXT or EVENTS where it is streamed, empty for one answer."""
    text: Continuation
    """Text of the tokens so far."""
    key: str
    """What an answer has the text under."""
    last: int = 0
    reason: str = ""
    """Why it has ended; empty while it goes on."""
    generator: torch.Generator = field(default_factory=torch.Generator)
    _written: list[str] = field(default_factory=list)
    _count: int = 0
    _seed: int | None = None

    def __post_init__(self) -> None:
        if self.asked.temperature:
            self._seed = secrets.randbits(31) if self.asked.seed is None else self.asked.seed
            self.generator.manual_seed(self._seed)

    def take(self, token: int, is_end: bool) -> list[Part]:
        """Add a token, and return what can be sent now."""
        piece = ""
        if is_end:
            self.reason = "end"
        else:
            self.last = token
            self._count += 1
            piece = self.text.add(token)
            if self.text.has_stopped:
                self.reason = "stop"
            elif self._count == self.limit:
                self.reason = "length"
        if self.reason:
            piece += self.text.finish()
            if self.text.has_stopped:
                self.reason = "stop"
            return [self._last_part(piece)]
        if not self.form:
            self._written.append(piece)
            return []
        return [self._part(self._event({"text": piece}), is_last=False)] if piece else []

    def _last_part(self, piece: str) -> Part:
        facts: dict[str, Any] = {
            "tokens": self._count,
            "prompt_tokens": len(self.prompt),
            "finish_reason": self.reason,
        }
        if self._seed is not None:
            facts["seed"] = self._seed
        if not self.form:
            return Part(self.request, {self.key: "".join(self._written) + piece, **facts}, True)
        if self.form == TEXT:
            return self._part(piece, is_last=True)
        before = self._event({"text": piece}) if piece else ""
        return self._part(f"{before}event: end\n{self._event(facts)}", is_last=True)

    def _event(self, data: Mapping[str, Any]) -> str:
        if self.form == TEXT:
            return str(data["text"])
        return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"

    def _part(self, value: str, is_last: bool) -> Part:
        return Part(self.request, value, is_last, self.form)


def _content(row: Mapping[str, Any]) -> Any:
    """Return the text or the object of a request, whose content type may not say that it is one."""
    if "text_input" in row:  # tensors by name, or the fields of a form
        return {name: _plain(value) for name, value in row.items()}
    body = body_of(row)
    if isinstance(body, bytes | bytearray):
        body = decode_text(body)
        if body.lstrip()[:1] in ("{", '"'):
            # Else it is a text that begins so.
            with contextlib.suppress(BadInput):
                body = parse_json(body)
    if isinstance(body, dict) and INPUTS in body and set(body) <= {INPUTS, PARAMETERS}:
        # As clients of Hugging Face send it.
        options = body.get(PARAMETERS) or {}
        if isinstance(options, dict):
            return {**options, "prompt": body[INPUTS]}
    return body


def _plain(value: Any) -> Any:
    """Return an option of one value, whatever holds it."""
    if isinstance(value, bytes | bytearray):
        return decode_text(value)
    return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value


def _as_tritons(content: Any) -> tuple[Any, bool]:
    """Return a request by our names, and whether it came by those of Triton's generate routes."""
    if not isinstance(content, Mapping) or "text_input" not in content:
        return content, False
    rest = {name: value for name, value in content.items() if name not in _TRITONS}
    parameters = content.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise BadInput(f"parameters is {parameters!r}; expected an object of options")
    return {**parameters, **rest, "prompt": content["text_input"]}, True


_TRITONS = ("text_input", "parameters", "id")
