"""Text in, spans of it out: what its words are, and where in it an answer stands."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from modelyard.handlers.base import Inputs
from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, HandlerError, LoadError
from modelyard.handlers.explain.attribute.attribution import chunks, most_rows
from modelyard.handlers.explain.request.options import ExplainOptions, Row
from modelyard.handlers.explain.request.targets import Target, at_place, sum_over
from modelyard.handlers.models.backends import Artifact, Output
from modelyard.handlers.models.rows import DEFAULT_TOP_K, first_output, read_whole, softmax
from modelyard.handlers.tasks.text_handler import TextHandler

OUTSIDE = "O"
"""The label of tokens that belong to nothing."""
AGGREGATIONS = ("none", "simple", "first", "average", "max")

OVERLAP = 128
"""Tokens of a context that two neighbouring windows share, where they have room for it."""
LONGEST_ANSWER = 30
"""Tokens of an answer."""
MOST_WINDOWS = 64


class TokenClassifier(TextHandler):
    """Serve a model that labels tokens: entities, parts of speech; see `TextHandler`.

    The answer is a list of {"entity", "score", "start", "end", "word"}, without tokens of the label
    "O"; start and end are places in the text. `handler.text.aggregation` of model-config.yaml says
    what is put together, as transformers' pipeline does: `none` gives tokens, `simple` (without it)
    neighbours of one label, whose `B-` and `I-` say where the next begins; `first`, `average` and
    `max` let the tokens of a word agree on a label before that.
    """

    section_keys: ClassVar[tuple[str, ...]] = (*TextHandler.section_keys, "aggregation")
    parts: ClassVar[tuple[str, ...]] = ("text",)
    class_dim: ClassVar[int] = 1
    label_dim: ClassVar[int | None] = 2

    def __init__(self) -> None:
        super().__init__()
        self.aggregation = "simple"

    def initialize(self, context: Context) -> None:
        """Load the archive and its tokenizer; errors as of `TextHandler`."""
        super().initialize(context)
        self.aggregation = self.section.get("aggregation", "simple")
        if self.aggregation not in AGGREGATIONS:
            raise LoadError(
                f"handler.text.aggregation is {self.aggregation!r}; expected one of "
                f"{', '.join(AGGREGATIONS)}"
            )

    def postprocess(self, outputs: Output) -> list[Any]:
        """Turn logits (N, L, K) into the entities of each text."""
        logits = first_output(outputs, 3, "expected logits (N, L, K)")
        rows = softmax(logits.float().cpu().numpy())
        return [self._entities(at, row) for at, row in enumerate(rows)]

    def find_target(
        self, index: int, target: str, scores: Tensor, inside: Tensor | None
    ) -> Sequence[Target] | None:
        """Find the token (L, K) that speaks most for a label; `predicted` is the surest entity."""
        own = [at for at in self._own_tokens(index) if inside is None or inside[at]]
        labels = [self.label(at) for at in range(scores.shape[1])]
        allowed = torch.full_like(scores, -torch.inf)
        if target == "predicted":
            columns = [at for at, label in enumerate(labels) if label != OUTSIDE]
        elif target in labels:
            columns = [labels.index(target)]
        else:
            return None
        grid = torch.meshgrid(torch.tensor(own), torch.tensor(columns), indexing="ij")
        allowed[grid] = scores[grid]
        return [at_place(int(allowed.argmax()))]

    def name_place(self, index: int, place: tuple[int, ...]) -> str:
        """Return a label and the word that has it."""
        return f'{self.label(place[1])} at "{self.word_at(index, place[0])}"'

    def _own_tokens(self, index: int) -> list[int]:
        special = self.encodings[index].special_tokens_mask
        return [at for at, is_special in enumerate(special) if not is_special]

    def _entities(self, index: int, probabilities: np.ndarray) -> list[dict[str, Any]]:
        encoding, (text,) = self.encodings[index], self.texts[index]
        words: list[list[int]] = [[at] for at in self._own_tokens(index)]
        if self.aggregation not in ("none", "simple"):
            # A token of no word is one of its own.
            keys = {at: (encoding.word_ids[at], at if encoding.word_ids[at] is None else 0)
                    for (at,) in words}  # fmt: skip
            words = [list(group) for _, group in groupby(keys, key=keys.__getitem__)]
        found: list[dict[str, Any]] = []
        for tokens in words:
            row = self._agreed(probabilities[tokens])
            at = int(row.argmax())
            label = self.label(at)
            kind = label.removeprefix("B-" if (begins := label.startswith("B-")) else "I-")
            start, end = encoding.offsets[tokens[0]][0], encoding.offsets[tokens[-1]][1]
            last = found[-1] if found else None
            is_none = self.aggregation == "none"
            if last and last["entity"] == kind and not begins and not is_none:
                last["scores"].append(float(row[at]))
                last["end"] = end
            else:
                name = label if is_none else kind
                found.append(
                    {"entity": name, "scores": [float(row[at])], "start": start, "end": end}
                )
        return [
            {
                "entity": each["entity"],
                "score": sum(each["scores"]) / len(each["scores"]),
                "start": each["start"],
                "end": each["end"],
                "word": text[each["start"] : each["end"]],
            }
            for each in found
            if each["entity"] != OUTSIDE
        ]

    def _agreed(self, rows: np.ndarray) -> np.ndarray:
        """Return the probabilities (K,) of a word's tokens (T, K)."""
        if self.aggregation == "average":
            mean: np.ndarray = rows.mean(axis=0)
            return mean
        at = int(rows.max(axis=1).argmax()) if self.aggregation == "max" else 0
        chosen: np.ndarray = rows[at]
        return chosen


@dataclass(frozen=True)
class Window:
    """A question with a piece of its context, by the names of an encoding of `tokenizers`."""

    ids: list[int]
    type_ids: list[int]
    attention_mask: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]]
    special_tokens_mask: list[int]
    sequence_ids: list[int | None]
    word_ids: list[int | None]

    def __len__(self) -> int:
        return len(self.ids)


class QuestionAnswering(TextHandler):
    """Serve a model that marks the answer to a question in a context; see `TextHandler`.

    A request is {"question": …, "context": …}; the answer {"answer", "score", "start", "end"}, the
    places in the context. A context longer than the model takes is read in windows that overlap,
    and the best answer of all counts. `handler.text.max_answer` of model-config.yaml is the longest
    answer in tokens.
    """

    label_dim: ClassVar[int | None] = None
    section_keys: ClassVar[tuple[str, ...]] = (*TextHandler.section_keys, "max_answer")
    parts: ClassVar[tuple[str, ...]] = ("question", "context")
    least_parts: ClassVar[int] = 2

    def __init__(self) -> None:
        super().__init__()
        self.longest = LONGEST_ANSWER
        self.window_size = 0

    def initialize(self, context: Context) -> None:
        """Load the archive and its tokenizer; errors as of `TextHandler`."""
        super().initialize(context)
        self.longest = read_whole(
            "handler.text.max_answer", self.section.get("max_answer", LONGEST_ANSWER)
        )
        if "mask" not in self.roles:
            raise LoadError(
                "the artifact takes no attention_mask; question_answering needs one, as windows "
                "differ in length: export the model with it"
            )
        self.window_size = self.max_length(self.section)
        self.tokenizer.no_truncation()

    def encode(self, texts: Sequence[tuple[str, ...]]) -> list[Any]:
        """Return the windows of all requests; `owners` says whose each is."""
        windows = [self._each(at, self._windows, row) for at, row in enumerate(texts)]
        self.owners = [at for at, each in enumerate(windows) for _ in each]
        return [window for each in windows for window in each]

    def inference(self, inputs: Inputs, *args: Any, **kwargs: Any) -> Output:
        """Run the model on all windows, as many at once as the artifact takes."""
        tensors = (inputs,) if isinstance(inputs, Tensor) else inputs
        most = most_rows(self.model) if isinstance(self.model, Artifact) else len(tensors[0])
        parts = [
            super(QuestionAnswering, self).inference(tuple(each[rows] for each in tensors))
            for rows in chunks(len(tensors[0]), most)
        ]
        return tuple(map(torch.cat, zip(*map(_two, parts), strict=True)))

    def postprocess(self, outputs: Output) -> list[Any]:
        """Turn the logits of starts and ends, (M, L) each for M windows, into an answer each."""
        starts, ends = (each.float().cpu().numpy() for each in _two(outputs))
        best: dict[int, tuple[float, int, int]] = {}
        for window, (owner, start, end) in enumerate(zip(self.owners, starts, ends, strict=True)):
            score, first, last = self._best(window, start, end)
            if owner not in best or score > best[owner][0]:
                place = self._place(window, first, last)
                best[owner] = (score, *place)
        return [
            {
                "answer": context[start:end],
                "score": score,
                "start": start,
                "end": end,
            }
            for (_, context), (score, start, end) in (
                (texts, best[at]) for at, texts in enumerate(self.texts)
            )
        ]

    def score(self, outputs: Output) -> Tensor:
        """Return the logits of starts and ends as (N, 2, L)."""
        return torch.stack(_two(outputs), 1)

    def find_target(
        self, index: int, target: str, scores: Tensor, inside: Tensor | None
    ) -> Sequence[Target] | None:
        """Find the `start` or `end` (2, L) of the answer, or both added up as `answer`.

        `predicted` is its start. With a region the answer is looked for in there.
        """
        if target not in ("predicted", *_ENDS, "answer"):
            return None
        start, end = scores.float().cpu().numpy()
        _, first, last = self._best(index, start, end, inside)
        length = scores.shape[1]
        if target == "answer":
            numbers = torch.zeros_like(scores, dtype=torch.bool)
            numbers[0, first] = numbers[1, last] = True
            begin, stop = self._place(index, first, last)
            label = f'answer "{self.texts[index][1][begin:stop]}"'
            return [sum_over(numbers, target, label, ",".join(self.output_names[:2]) or None)]
        is_end = target == "end"
        output = self.output_names[is_end] if len(self.output_names) > is_end else None
        return [at_place(length + last if is_end else first, output)]

    def name_place(self, index: int, place: tuple[int, ...]) -> str:
        """Return which end of the answer it is, and its word."""
        return f'{_ENDS[place[0]]} at "{self.word_at(index, place[1])}"'

    def _read_options(self, index: int, row: Row) -> tuple[ExplainOptions, Row]:
        options, rest = super()._read_options(index, row)
        count = len(self._windows(self._read_texts(rest)))
        if count > 1:
            raise BadInput(
                f"the context fills {count} windows; an explanation is of one: send less than "
                f"{self.window_size} tokens"
            )
        return options, rest

    def _windows(self, texts: tuple[str, ...]) -> list[Window]:
        """Cut a context into windows of at most `window_size` tokens, each with the question."""
        encoding = self.tokenizer.encode(*texts)
        own = [at for at, part in enumerate(encoding.sequence_ids) if part == 1]
        if not own:
            raise BadInput("the context has no words; expected a text that holds the answer")
        first, last = own[0], own[-1] + 1
        room = self.window_size - (len(encoding) - len(own))
        if room < 1:
            raise BadInput(
                f"the question takes {len(encoding) - len(own)} tokens; expected less than the "
                f"{self.window_size} that question and context have together"
            )
        step = max(1, room - min(OVERLAP, room // 2))
        count = 1 + -(-max(0, len(own) - room) // step)
        if count > MOST_WINDOWS:
            raise BadInput(
                f"the context has {len(own)} tokens, which fill {count} windows of {room}; the "
                f"limit is {MOST_WINDOWS}: send a part of it"
            )
        places = [
            [*range(first), *range(at, min(at + room, last)), *range(last, len(encoding))]
            for at in range(first, first + count * step, step)
        ]
        return [
            Window(*([getattr(encoding, name)[at] for at in tokens] for name in _WINDOW_FIELDS))
            for tokens in places
        ]

    def _best(
        self, window: int, start: np.ndarray, end: np.ndarray, inside: Tensor | None = None
    ) -> tuple[float, int, int]:
        """Return the probability, first and last token of a window's best answer.

        Args:
            window: which.
            start: (L,) logits of its tokens.
            end: end as `start`.
            inside: (L,) the tokens that may be in the answer; all of the context without it.

        Raises:
            BadInput: none of these is of the context.
        """
        parts = self.encodings[window].sequence_ids
        own = np.array([at for at, part in enumerate(parts)
                        if part == 1 and (inside is None or inside[at])])  # fmt: skip
        if not len(own):
            raise BadInput("the region holds no token of the context; expected one that does")
        pairs = np.outer(softmax(start[own]), softmax(end[own]))
        pairs = np.tril(np.triu(pairs), self.longest - 1)
        first, last = divmod(int(pairs.argmax()), len(own))
        return float(pairs[first, last]), int(own[first]), int(own[last])

    def _place(self, window: int, first: int, last: int) -> tuple[int, int]:
        """Return where tokens stand in the context, with the whole words that they are of."""
        each = self.encodings[window]
        words = {each.word_ids[first], each.word_ids[last]} - {None}
        spans = [
            offsets
            for at, offsets in enumerate(each.offsets)
            if each.sequence_ids[at] == 1 and (first <= at <= last or each.word_ids[at] in words)
        ]
        return min(start for start, _ in spans), max(end for _, end in spans)


_ENDS = ("start", "end")
_WINDOW_FIELDS = tuple(Window.__dataclass_fields__)


def _two(outputs: Output) -> tuple[Tensor, Tensor]:
    if isinstance(outputs, Tensor) or len(outputs) < 2 or outputs[0].shape != outputs[1].shape:
        shapes = [
            list(each.shape) for each in ([outputs] if isinstance(outputs, Tensor) else outputs)
        ]
        raise HandlerError(
            f"the model gave {shapes}; expected logits of starts and of ends, (N, L) each"
        )
    return outputs[0], outputs[1]


# -- text with a gap in, the words that fit it out -------------------------------------------------


MASK_TOKENS = ("[MASK]", "<mask>")


class FillMask(TextHandler):
    """Serve a masked language model; see `TextHandler`.

    The answer is a list of {"score", "token", "token_str", "sequence"}, the likeliest first, or a
    list of such lists where the text has several gaps; `handler.top_k` says how many.
    `handler.text.mask` of model-config.yaml is the token that stands for a gap.
    """

    label_dim: ClassVar[int | None] = None
    section_keys: ClassVar[tuple[str, ...]] = (*TextHandler.section_keys, "mask")
    parts: ClassVar[tuple[str, ...]] = ("text",)

    def __init__(self) -> None:
        super().__init__()
        self.top_k = DEFAULT_TOP_K
        self.mask, self.mask_id = MASK_TOKENS[0], 0

    def initialize(self, context: Context) -> None:
        """Load the archive and its tokenizer; errors as of `TextHandler`."""
        super().initialize(context)
        self.top_k = self.top_labels.top_k
        tried = (self.section["mask"],) if "mask" in self.section else MASK_TOKENS
        known = [each for each in tried if self.tokenizer.token_to_id(each) is not None]
        if not known:
            raise LoadError(
                f"the tokenizer knows no {' or '.join(tried)}; name the token that stands for a "
                "gap as handler.text.mask"
            )
        self.mask, self.mask_id = known[0], self.tokenizer.token_to_id(known[0])

    def encode(self, texts: Sequence[tuple[str, ...]]) -> list[Any]:
        """Return the tokens of each request, which has a gap among them."""
        encodings = super().encode(texts)
        for at, encoding in enumerate(encodings):
            self._each(at, self._check_gap, encoding)
        return encodings

    def postprocess(self, outputs: Output) -> list[Any]:
        """Turn logits (N, L, V) into the likeliest tokens of each gap."""
        logits = first_output(outputs, 3, "expected logits (N, L, vocabulary)")
        answers = []
        for row, encoding in zip(logits, self.encodings, strict=True):
            gaps = self._gaps(encoding)
            found = row[gaps].float().softmax(1).topk(min(self.top_k, row.shape[1]), dim=1)
            pairs = zip(found.values.tolist(), found.indices.tolist(), strict=True)
            filled = [
                [
                    self._proposal(encoding.ids, gap, score, token, is_alone=len(gaps) == 1)
                    for score, token in zip(*columns, strict=True)
                ]
                for gap, columns in zip(gaps, pairs, strict=True)
            ]
            answers.append(filled[0] if len(gaps) == 1 else filled)
        return answers

    def find_target(
        self, index: int, target: str, scores: Tensor, inside: Tensor | None
    ) -> Sequence[Target] | None:
        """Find a token of the vocabulary at the first gap; `predicted` is the likeliest."""
        gaps = self._gaps(self.encodings[index])
        if inside is not None:
            gaps = [gap for gap in gaps if inside[gap]]
            if not gaps:
                raise BadInput("the region holds no gap; expected one that does")
        token = self.tokenizer.token_to_id(target)
        if target == "predicted":
            token = int(scores[gaps[0]].argmax())
        return None if token is None else [at_place(gaps[0] * scores.shape[1] + int(token))]

    def name_place(self, index: int, place: tuple[int, ...]) -> str:
        """Return the token that is put there."""
        return str(self.tokenizer.decode([place[1]]))

    def _gaps(self, encoding: Any) -> list[int]:
        return [at for at, id in enumerate(encoding.ids) if id == self.mask_id]

    def _check_gap(self, encoding: Any) -> None:
        if not self._gaps(encoding):
            raise BadInput(
                f'the text has no "{self.mask}" among its first {len(encoding)} tokens; put it '
                "where a word is wanted"
            )

    def _proposal(
        self, ids: Sequence[int], gap: int, score: float, token: int, *, is_alone: bool
    ) -> dict[str, Any]:
        filled = [token if at == gap else id for at, id in enumerate(ids)]
        return {
            "score": score,
            "token": token,
            "token_str": self.tokenizer.decode([token]),
            # The other gaps are special tokens too, and are to be seen.
            "sequence": self.tokenizer.decode(filled, skip_special_tokens=is_alone),
        }
