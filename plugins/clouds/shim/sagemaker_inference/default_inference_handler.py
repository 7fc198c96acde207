"""What stands in for functions that an author's file does not have."""

from typing import Any, NoReturn

from sagemaker_inference import decoder, encoder, errors, utils


class DefaultInferenceHandler:
    """Reads and writes arrays; has no model."""

    def default_model_fn(self, model_dir: Any, context: Any = None) -> Any:
        """Refuse."""
        _refuse("model_fn")

    def default_input_fn(self, input_data: Any, content_type: Any, context: Any = None) -> Any:
        """Return the array of a body."""
        return decoder.decode(input_data, content_type)

    def default_predict_fn(self, data: Any, model: Any, context: Any = None) -> Any:
        """Refuse."""
        _refuse("predict_fn")

    def default_output_fn(self, prediction: Any, accept: str, context: Any = None) -> Any:
        """Return body and media type of an answer."""
        for content_type in utils.parse_accept(accept):
            if content_type in encoder.SUPPORTED_CONTENT_TYPES:
                return encoder.encode(prediction, content_type), content_type
        raise errors.UnsupportedFormatError(accept)


def _refuse(function: str) -> NoReturn:
    raise NotImplementedError(f"Please provide a {function} implementation.")
