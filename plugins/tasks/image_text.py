"""A picture and texts in, how well each text fits it out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelyard.archiver.handler_files import TOKENIZER_FILE
from modelyard.archiver.signature import Dim, Size, TensorSpec, fits
from modelyard.handlers.body import decode_base64, parse_json
from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, LoadError
from modelyard.handlers.explain.attribute.attribution import Tensors
from modelyard.handlers.explain.explanation import explain_batch
from modelyard.handlers.limits import check_stated
from modelyard.handlers.models.backends import Output
from modelyard.handlers.models.rows import first_output, sigmoid, softmax
from modelyard.handlers.tasks.text_handler import MAX_LENGTH, PAD_TOKENS, load_tokenizer, role_of
from modelyard.handlers.tasks.vision_handler import VisionHandler

MAX_CHARACTERS = 10_000
"""Most characters of all texts of a request."""


class ImageText(VisionHandler):
    """Serve a model as CLIP: the answer is {"text": probability, …}, the best first.

    A request is a form with a file `image` and a field `texts` (a JSON list of strings), or a JSON
    object with both, the image as base64 text. Its texts exclude each other (softmax), or are
    judged one by one (sigmoid) for models as SigLIP. A picture and its texts are a call of their
    own: requests of a batch run one after the other. The archive holds `tokenizer.json`.

    An explanation says what of the picture speaks for one text: `target`, the best without it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer: Any = None
        self.pad_id = 0
        self.roles: tuple[str, ...] = ()
        self.is_sigmoid = False
        self.length: Size = MAX_LENGTH
        """Size of a text, in tokens."""

    def initialize(self, context: Context) -> None:
        """Load the archive, its tokenizer and its `handler.image`."""
        super().initialize(context)
        folder = Path(context.system_properties["model_dir"])
        self.tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
        self.tokenizer.no_padding()
        self.length = size = self.inputs[self.roles.index("ids")].shape[1]
        most = min(size.max, MAX_LENGTH) if isinstance(size, Dim) else size
        self.tokenizer.enable_truncation(most)
        known = map(self.tokenizer.token_to_id, PAD_TOKENS)
        self.pad_id = next((id for id in known if id is not None), 0)
        self.is_sigmoid = str(self.config.get("model_type", "")).startswith("siglip")
        self.output_kind = "multilabel" if self.is_sigmoid else "logits"

    def handle(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[Any]:
        """Answer each request by a call of its own."""
        self.context = context
        return [self._each(index, self._answer, row) for index, row in enumerate(data)]

    def explain(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[Any]:
        """Explain what of each picture speaks for one of its texts."""
        self.context = context
        return [self._each(index, self._explain, index, row) for index, row in enumerate(data)]

    def score(self, outputs: Output) -> Tensor:
        """Return the logit (N, 1) of each picture with the text of its own row."""
        return self._logits(outputs).diagonal().unsqueeze(1)

    def probabilities(self, scores: Tensor) -> Tensor | None:
        """Return the sigmoid of a text judged alone; of others, it takes all to say."""
        return scores.sigmoid() if self.is_sigmoid else None

    def _answer(self, row: Mapping[str, Any]) -> dict[str, float]:
        image, texts = self._read_parts(row)
        logits = self._logits(self.inference(self._tensors(image, texts)))
        function = sigmoid if self.is_sigmoid else softmax
        values = function(logits[0].float().cpu().numpy())
        order = (-values).argsort(kind="stable").tolist()
        return {texts[at]: float(values[at]) for at in order}

    def _explain(self, index: int, row: Mapping[str, Any]) -> Any:
        options, rest = self._read_options(index, row)
        self.sizes = [None] * index  # of the others of the batch; the next one is this request's
        image, texts = self._read_parts(rest)
        if options.target in texts:
            at = texts.index(options.target)
        elif options.target == "predicted":
            at = int(self._logits(self.inference(self._tensors(image, texts)))[0].argmax())
        else:
            raise BadInput(
                f'target is "{options.target}"; expected predicted or one of the texts: '
                f"{', '.join(texts)}"
            )
        model = replace(self.explained_model(), label=lambda _: texts[at])
        inputs = self._tensors(image, [texts[at]])
        (found,) = explain_batch(model, inputs, [replace(options, target="0")])
        return self._explaining.present(index, (inputs[self.roles.index("image")][0],), found)

    def _check_batch_size(self, batch_size: int) -> None:
        """Take any: the requests of a batch run one after the other."""

    def _find_image(self) -> TensorSpec:
        self.roles = tuple(
            "image" if spec.is_float else role_of(spec.name) or "" for spec in self.inputs
        )
        if sorted(set(self.roles) - {"mask", "types"}) != ["ids", "image"] or "" in self.roles:
            takes = ", ".join(map(str, self.inputs))
            raise LoadError(f"the artifact takes {takes}; expected pictures and token ids")
        return self.inputs[self.roles.index("image")]

    def _read_parts(self, row: Mapping[str, Any]) -> tuple[np.ndarray, list[str]]:
        """Return the model input (C, H, W) of a request's picture, and its texts."""
        parts = row if "image" in row else row.get("data") or row.get("body")
        if isinstance(parts, bytes | bytearray | str):
            parts = parse_json(parts)
        if not isinstance(parts, Mapping) or not {"image", "texts"} <= set(parts):
            raise BadInput(
                'expected a form with a file "image" and a field "texts" (a JSON list of strings), '
                'or a JSON object {"image": base64 text, "texts": [...]}'
            )
        image, texts = parts["image"], parse_json(parts["texts"])
        is_list = isinstance(texts, list) and all(isinstance(each, str) for each in texts)
        if not is_list or not texts or len(set(texts)) < len(texts):
            raise BadInput("texts is expected as a JSON list of one string or more, all different")
        if sum(map(len, texts)) > MAX_CHARACTERS:
            raise BadInput(f"texts hold more than {MAX_CHARACTERS} characters")
        rows = self.inputs[self.roles.index("ids")].shape[0]
        if not fits(len(texts), rows):
            raise BadInput(f"there are {len(texts)} texts; this model takes {rows}")
        image = decode_base64(image, "the image file") if isinstance(image, str) else image
        if not isinstance(image, bytes | bytearray):
            raise BadInput(f"image is a {type(image).__name__}; expected a file or base64 text")
        return self.read_picture(image), texts

    def _tensors(self, image: np.ndarray, texts: Sequence[str]) -> Tensors:
        """Return the inputs of one call: a picture and its texts, filled up to the longest.

        Raises:
            BadInput: they hold other values than the signature states.
        """
        encodings = self.tokenizer.encode_batch(list(texts))
        length = self.length
        if isinstance(length, Dim):
            length = max([length.min, *map(len, encodings)])
        names = {"ids": "ids", "mask": "attention_mask", "types": "type_ids"}
        tensors: list[Tensor] = []
        for role in self.roles:
            if role == "image":
                tensors.append(torch.from_numpy(image)[None])
                continue
            fill = self.pad_id if role == "ids" else 0
            rows = [getattr(each, names[role]) for each in encodings]
            tensors.append(torch.tensor([row + [fill] * (length - len(row)) for row in rows]))
        check_stated(self.inputs, tensors)
        return tuple(tensors)

    def _logits(self, outputs: Output) -> Tensor:
        """Return the logits (pictures, texts)."""
        name = "logits_per_image"
        at = self.output_names.index(name) if name in self.output_names else 0
        chosen = outputs if isinstance(outputs, Tensor) else outputs[at]
        return first_output(chosen, 2, f"expected {name} (pictures, texts)")
