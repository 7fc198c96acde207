"""Text with a gap in, the words that fit it out."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, LoadError
from modelyard.handlers.explain.request.targets import Target, at_place
from modelyard.handlers.models.backends import Output
from modelyard.handlers.models.rows import DEFAULT_TOP_K, first_output
from modelyard.handlers.tasks.text_handler import TextHandler

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
