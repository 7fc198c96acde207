"""`from ts.torch_handler.text_classifier import TextClassifier`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ts.handler_utils.text_utils import ngrams_iterator
from ts.torch_handler.text_handler import TextHandler
from ts.utils.util import map_class_to_label


class TextClassifier(TextHandler):
    """A text in, all labels and their probabilities out; one request at a time.

    The model takes token indices (T,) and offsets, as `nn.EmbeddingBag` does.
    """

    ngrams = 2

    def preprocess(self, data: Sequence[Mapping[str, Any]]) -> tuple[Tensor, list[str]]:
        """Clean the first row's text; return the indices of its n-grams, and its tokens."""
        text: Any = data[0].get("data") or data[0].get("body")
        if isinstance(text, bytes | bytearray):
            text = text.decode("utf-8")
        text = self._expand_contractions(self._remove_html_tags(text).lower())
        text = self._remove_punctuation(self._remove_accented_characters(text))
        tokens = self._tokenize(text)
        indices = [self.source_vocab[token] for token in ngrams_iterator(tokens, self.ngrams)]
        return torch.as_tensor(indices, device=self.device), tokens

    def inference(self, data: tuple[Tensor, list[str]], *args: Any, **kwargs: Any) -> Any:
        """Run the model on one text."""
        return super().inference(data[0], self._offsets())

    def postprocess(self, data: Tensor) -> list[dict[str, Any]]:
        """Turn logits (1, K) into label → probability."""
        return map_class_to_label(torch.softmax(data, dim=1).tolist(), self.mapping)

    def get_insights(
        self, text_preprocess: tuple[Tensor, list[str]], _: Any, target: Any = 0
    ) -> list[dict[str, Any]]:
        """Attribute the target's output to the embedding, from the text of all token 0."""
        indices, tokens = text_preprocess
        attributions = self.lig.attribute(
            indices,
            torch.zeros_like(indices),
            additional_forward_args=self._offsets(),
            return_convergence_delta=False,
            target=target,
        )
        importances = self.summarize_attributions(attributions)
        return [{"importances": importances.tolist(), "words": self.get_word_token(tokens)}]

    def _offsets(self) -> Tensor:
        return torch.zeros(1, dtype=torch.long, device=self.device)
