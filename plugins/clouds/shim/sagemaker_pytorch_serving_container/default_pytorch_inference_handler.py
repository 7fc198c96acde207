"""What stands in for functions that an author's file does not have, for PyTorch."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from sagemaker_inference import (
    content_types,
    decoder,
    default_inference_handler,
    encoder,
    errors,
    utils,
)

DEFAULT_MODEL_FILENAME = "model.pt"
PROGRAMS = (".pt2", ".onnx")
"""Artifacts of `modelyard export`, which the toolkit does not know."""


class ModelLoadError(Exception):
    """The model's file is not a program."""


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class DefaultPytorchInferenceHandler(default_inference_handler.DefaultInferenceHandler):
    """A program of TorchScript, an exported program or an ONNX model; tensors in and out."""

    VALID_CONTENT_TYPES = (content_types.JSON, content_types.NPY)

    @staticmethod
    def _is_model_file(filename: str) -> bool:
        suffix = os.path.splitext(filename)[1]  # noqa: PTH122 - `os` is what tests replace
        return os.path.isfile(filename) and suffix in (".pt", ".pth", *PROGRAMS)  # noqa: PTH113

    def default_model_fn(self, model_dir: Any, context: Any = None) -> Any:
        """Load the folder's one program; nothing of it is unpickled.

        Raises:
            ValueError: there is none, or more than one.
            ModelLoadError: it is a checkpoint, or something else that is not a program.
        """
        path = os.path.join(model_dir, DEFAULT_MODEL_FILENAME)  # noqa: PTH118
        if not os.path.exists(path):  # noqa: PTH110
            names = os.listdir(model_dir)  # noqa: PTH208
            files = [name for name in names if self._is_model_file(os.path.join(model_dir, name))]  # noqa: PTH118
            if len(files) != 1:
                raise ValueError(
                    f"Exactly one .pth or .pt file is required for PyTorch models: {files}"
                )
            path = os.path.join(model_dir, files[0])  # noqa: PTH118
        if path.endswith(PROGRAMS):
            from modelyard.handlers.models.backends import detect_format, open_artifact

            return open_artifact(Path(path), detect_format(Path(path)), _device())
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"`torch\.jit\.load` is")
                return torch.jit.load(path, map_location=_device()).to(_device())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise ModelLoadError(
                f"Failed to load {path}. Please ensure model is saved using torchscript. A "
                "checkpoint needs a model_fn in code/inference.py, or `modelyard export` to make a "
                "program of it"
            ) from error

    def default_input_fn(self, input_data: Any, content_type: Any, context: Any = None) -> Any:
        """Return a body's tensor, float32 of JSON and CSV."""
        array = decoder.decode(input_data, content_type)
        is_text = content_type in content_types.UTF8_TYPES
        return (torch.FloatTensor(array) if is_text else torch.from_numpy(array)).to(_device())

    def default_predict_fn(self, data: Any, model: Any, context: Any = None) -> Any:
        """Call the model; no gradient is recorded."""
        with torch.no_grad():
            if hasattr(model, "eval"):
                model = model.to(_device()).eval() or model
            return model(data.to(_device()))

    def default_output_fn(self, prediction: Any, accept: str, context: Any = None) -> Any:
        """Return the body of an answer."""
        if type(prediction) is torch.Tensor:
            prediction = prediction.detach().cpu().numpy().tolist()
        for content_type in utils.parse_accept(accept):
            if content_type in encoder.SUPPORTED_CONTENT_TYPES:
                body = encoder.encode(prediction, content_type)
                return body.encode() if content_type == content_types.CSV else body
        raise errors.UnsupportedFormatError(accept)
