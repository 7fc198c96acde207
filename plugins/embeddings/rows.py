"""In a worker: texts → the model's own numbers, in calls that hold so many tokens at most."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from torch import Tensor
from torch.nn.functional import normalize

from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, LoadError, PredictionException
from modelyard.handlers.models.backends import main_output
from modelyard.handlers.models.rows import read_whole

if TYPE_CHECKING:
    from modelyard.handlers.tasks.text_handler import TextHandler

HEAD = struct.Struct("<I")
"""Tokens of a text."""
MAX_BATCH_TOKENS = 16_384
"""Tokens of one call of the model where the archive says nothing; text-embeddings-inference's."""


@dataclass
class Tokens:
    """Tokens that came as such, in place of an encoding of the tokenizer."""

    ids: list[int]

    def __post_init__(self) -> None:
        self.attention_mask, self.type_ids = [1] * len(self.ids), [0] * len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


class TextRows:
    """Answers texts for a handler that reads them; `modelyard.texts` names it.

    A request is a JSON object: `text`, a list of one or two, or `ids`, tokens; `cut`, the side from
    which a text that is too long is cut, else it is refused; `form`: nothing for the row (`HEAD`,
    then float32), `tokens` or `about` for JSON. Of a vector `normalize` says whether it is given
    the length 1, and `dimensions` to how many numbers it is cut.

    Raises:
        LoadError: the archive's settings are wrong.
    """

    def __init__(self, handler: TextHandler) -> None:
        self._handler = handler
        self._is_encoder = hasattr(handler, "vectors")
        self._most: int = handler.max_length(handler.section)
        section, name = handler.section, "handler.text.max_batch_tokens"
        self._batch = read_whole(name, section.get(name[13:], MAX_BATCH_TOKENS), self._most)
        cuts, name = section.get("dimensions", []), "handler.text.dimensions"
        if not isinstance(cuts, list):
            raise LoadError(f"{name} is {cuts!r}; expected a list of whole numbers")
        self._cuts = [read_whole(name, each) for each in cuts]

    def __call__(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[bytes]:
        """Answer a batch.

        Raises:
            BadInput, PredictionException: a text cannot be answered, or is too long (413).
        """
        self._handler.context = context
        asked = [orjson.loads(row["body"]) for row in data]
        encodings = self._handler.encode([tuple(each.get("text", ("",))) for each in asked])
        if len(encodings) != len(asked) or self._handler.least_parts > 1:
            raise BadInput("this model gives no vector or score of a text")
        encodings = list(map(self._fit, asked, encodings))
        answers = {
            at: _tokens_of(encodings[at])
            for at, each in enumerate(asked)
            if each.get("form") == "tokens"
        }
        lengths = {at: len(each) for at, each in enumerate(encodings) if at not in answers}
        for call in like_lengths(lengths, self._batch):
            answers |= self._run(call, asked, encodings)
        return [answers[at] for at in range(len(asked))]

    def _run(
        self, call: Sequence[int], asked: Sequence[Mapping[str, Any]], encodings: Sequence[Any]
    ) -> dict[int, bytes]:
        handler = self._handler
        handler.encodings, handler.owners = [encodings[at] for at in call], list(range(len(call)))
        outputs = handler.inference(handler.fill())
        found: Tensor = getattr(handler, "vectors", main_output)(outputs).float()
        if found.dim() != 2:
            raise BadInput("this model gives numbers for each token, and no score of a text")
        answers = {}
        for values, at in zip(found, call, strict=True):
            if asked[at].get("form") == "about":
                answers[at] = self._about(len(values))
                continue
            if self._is_encoder:
                values = self._vector(values, asked[at])
            answers[at] = HEAD.pack(len(encodings[at])) + values.cpu().numpy().tobytes()
        return answers

    def _vector(self, values: Tensor, asked: Mapping[str, Any]) -> Tensor:
        """Return a vector (E) as a request wants it; one that is cut has the length 1."""
        size = asked.get("dimensions") or len(values)
        if size not in (len(values), *self._cuts):
            known = ", ".join(map(str, (*self._cuts, len(values))))
            raise BadInput(
                f"dimensions is {size}; expected {known}: handler.text.dimensions of the archive "
                "says to what its vectors may be cut"
            )
        is_unit = asked.get("normalize", getattr(self._handler, "normalizes", True))
        return normalize(values[:size], dim=0) if is_unit or size < len(values) else values

    def _about(self, count: int) -> bytes:
        labels = {str(at): self._handler.label(at) for at in range(count)}
        return orjson.dumps({
            "max_input_length": self._most,
            "max_batch_tokens": self._batch,
            "labels": None if self._is_encoder else labels,
        })  # fmt: skip

    def _fit(self, asked: Mapping[str, Any], encoding: Any) -> Any:
        """Return what a request's text is encoded as, cut as it wants."""
        if (ids := asked.get("ids")) is not None:
            count = len(ids)
        else:
            count = len(encoding) + sum(map(len, encoding.overflowing))
        cut = asked.get("cut")
        if count > self._most and (cut is None or ids is not None):
            raise PredictionException(
                f"a text has {count} tokens, and this model takes {self._most}", 413
            )
        if ids is not None:
            return self._tokens(ids)
        if count > self._most and cut == "left":
            tokenizer = self._handler.tokenizer
            tokenizer.enable_truncation(self._most, direction="left")
            try:
                (encoding,) = self._handler.encode([tuple(asked["text"])])
            finally:
                tokenizer.enable_truncation(self._most)
        return encoding

    def _tokens(self, ids: list[int]) -> Tokens:
        """Return tokens that came as such; those of another tokenizer are framed otherwise."""
        tokenizer = self._handler.tokenizer
        frame = tokenizer.encode("a")
        ends = [at for at in (0, -1) if frame.special_tokens_mask[at]]
        is_ours = ids and max(ids) < tokenizer.get_vocab_size()
        if not is_ours or any(ids[at] != frame.ids[at] for at in ends):
            raise BadInput(
                "the tokens are not those of this model's tokenizer, as /tokenize gives them; send "
                "text (LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False)"
            )
        return Tokens(ids)


def _tokens_of(encoding: Any) -> bytes:
    """Return an encoding's tokens as JSON."""
    columns = encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets
    return orjson.dumps([
        {"id": id, "text": text, "special": bool(is_special), "start": start, "stop": stop}
        for id, text, is_special, (start, stop) in zip(*columns, strict=True)
    ])  # fmt: skip


def like_lengths(lengths: Mapping[int, int], most: int) -> list[list[int]]:
    """Return keys by length, the longest first, in parts that filled up have at most `most`."""
    calls: list[list[int]] = []
    for at in sorted(lengths, key=lambda at: -lengths[at]):
        if calls and (len(calls[-1]) + 1) * lengths[calls[-1][0]] <= most:
            calls[-1].append(at)
        else:
            calls.append([at])
    return calls
