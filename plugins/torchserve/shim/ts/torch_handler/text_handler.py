"""`from ts.torch_handler.text_handler import TextHandler`."""

import functools
import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelyard.handlers.context import Context
from modelyard.handlers.errors import LoadError
from ts.handler_utils.text_utils import get_tokenizer
from ts.torch_handler.base_handler import BaseHandler, import_captum, load_weights
from ts.torch_handler.vocabulary import Vocabulary
from ts.utils.util import CLEANUP_REGEX

# Which words English contracts, by what is left of the second word.
_CONTRACTED = {
    ("n't", " not"): "are could did does do had has have is may might must need ought should was "
    "were would",
    ("'ve", " have"): "could i might must should so they to we what when where who why will would "
    "you",
    ("'d", " would"): "he i it she that there they we you",
    ("'d", " did"): "how where",
    ("'ll", " will"): "he how i it she they we what who you",
    ("'s", " is"): "he how it she that there what when where who why",
    ("'re", " are"): "they we what you",
    ("'m", " am"): "i",
}
_IRREGULAR = {
    "ain't": "is not", "can't": "cannot", "shan't": "shall not", "sha'n't": "shall not",
    "won't": "will not", "so's": "so as", "let's": "let us", "y'all": "you all",
    "ma'am": "madam", "o'clock": "of the clock", "'cause": "because",
}  # fmt: skip
_CONTRACTIONS = _IRREGULAR | {
    word + short: word + full
    for (short, full), words in _CONTRACTED.items()
    for word in words.split()
}


_CONTRACTION = re.compile("|".join(map(re.escape, _CONTRACTIONS)), re.IGNORECASE)


class TextHandler(BaseHandler):
    """Text in; the archive holds `source_vocab.pt`, token → index.

    Attributes:
        source_vocab: token → index; a token that it lacks has the index of "<unk>".
        tokenizer: text → tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab: Any = None
        self.tokenizer = get_tokenizer("basic_english")
        self.input_text: Any = None

    @functools.cached_property
    def lig(self) -> Any:
        """Captum's integrated gradients of the model's `embedding`."""
        return import_captum().LayerIntegratedGradients(self.model, self.model.embedding)

    def initialize(self, context: Context) -> None:
        """Load the archive and its vocabulary.

        Raises:
            LoadError: there is no vocabulary, or it is not a dict of numbers.
        """
        super().initialize(context)
        named = self.manifest["model"].get("sourceVocab")  # of archives made before 0.2
        path = Path(named or self.get_source_vocab_path(context))
        try:
            vocabulary = load_weights(path)
        except LoadError as error:
            raise LoadError(
                "the vocabulary is not a dict, which is what can be read here; save it as one, as "
                f"in torch.save(dict(vocab.get_stoi()), {path.name!r}): {error}"
            ) from error
        if not isinstance(vocabulary, Mapping):
            raise LoadError(f"{path.name} holds {type(vocabulary).__name__}; expected a dict")
        self.source_vocab = Vocabulary(vocabulary)

    def get_source_vocab_path(self, ctx: Context) -> str:
        """Return the path of the vocabulary.

        Raises:
            LoadError: there is none.
        """
        path = Path(ctx.system_properties["model_dir"]) / "source_vocab.pt"
        if not path.is_file():
            raise LoadError(
                "the archive holds no source_vocab.pt, token → index; add it with --extra-files"
            )
        return str(path)

    def get_word_token(self, input_tokens: Sequence[str]) -> list[str]:
        """Return tokens without the mark that byte-pair encoding puts for a space."""
        return [token.replace("\u0120", "") for token in input_tokens]

    def summarize_attributions(self, attributions: Tensor) -> Tensor:
        """Return the softmax of attributions (N, E), over the norm of its row sums."""
        shares = torch.softmax(attributions, dim=0 if attributions.dim() in (0, 1, 3) else 1)
        norm: Tensor = torch.linalg.vector_norm(shares.sum(dim=-1))
        return shares / norm

    def _expand_contractions(self, text: str) -> str:
        def expand(match: re.Match[str]) -> str:
            return match[0][0] + _CONTRACTIONS[match[0].lower()][1:]

        return _CONTRACTION.sub(expand, text).replace("'", "")

    def _remove_accented_characters(self, text: str) -> str:
        return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode("ascii")

    def _remove_html_tags(self, text: str) -> str:
        return CLEANUP_REGEX.sub("", text)

    def _remove_punctuation(self, text: str) -> str:
        return text.translate(str.maketrans("", "", string.punctuation))

    _remove_puncutation = _remove_punctuation  # how old handlers spell it

    def _tokenize(self, text: str) -> list[str]:
        return self.tokenizer(text)
