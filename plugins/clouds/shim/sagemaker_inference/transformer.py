"""The steps of a request: an author's functions, and what stands in for others."""

import importlib
import traceback
from importlib.util import find_spec
from inspect import signature
from typing import Any

from sagemaker_inference import content_types, environment, utils
from sagemaker_inference.default_inference_handler import DefaultInferenceHandler
from sagemaker_inference.errors import BaseInferenceToolkitError, GenericInferenceToolkitError

STEPS = ("input_fn", "predict_fn", "output_fn")
AROUND = ("pre_model_fn", "model_warmup_fn")
"""Optional functions before and after `model_fn`."""


class Transformer:
    """One model, and what answers requests for it.

    Args:
        default_inference_handler: what stands in for functions that the author's file lacks.
    """

    _environment: Any = None
    _context: Any = None
    _initialized = False
    _model = _model_fn = _pre_model_fn = _model_warmup_fn = None
    _transform_fn = _input_fn = _predict_fn = _output_fn = None

    def __init__(self, default_inference_handler: Any = None) -> None:
        self._default_inference_handler = default_inference_handler or DefaultInferenceHandler()

    @staticmethod
    def handle_error(context: Any, inference_exception: Any, trace: str) -> list[str]:
        """Return the answer to a request that failed, and set its status."""
        phrase = utils.remove_crlf(inference_exception.phrase)
        context.set_response_status(code=inference_exception.status_code, phrase=phrase)
        return [f"{inference_exception.message}\n{trace}"]

    def transform(self, data: Any, context: Any) -> list[Any]:
        """Answer requests, whose headers are the context's first ones."""
        try:
            model_dir = context.system_properties.get("model_dir")
            self.validate_and_initialize(model_dir=model_dir, context=context)
            return [self._answer(row.get("body"), context) for row in data]
        except Exception as error:
            is_known = isinstance(error, BaseInferenceToolkitError)
            answer = error if is_known else GenericInferenceToolkitError(500, str(error))
            return self.handle_error(context, answer, traceback.format_exc())

    def _answer(self, body: Any, context: Any) -> Any:
        properties = context.request_processor[0].get_request_properties()
        content_type = utils.retrieve_content_type_header(properties)
        accept = properties.get("Accept") or properties.get("accept")
        if not accept or accept == content_types.ANY:
            accept = self._environment.default_accept
        if content_type in content_types.UTF8_TYPES:
            body = body.decode("utf-8")
        given = (self._model, body, content_type, accept)
        answer = self._run_handler_function(self._transform_fn, *given)
        if isinstance(answer, tuple):
            answer, accept = answer[:2]
        context.set_response_content_type(0, accept)
        return answer

    def validate_and_initialize(
        self, model_dir: Any = environment.model_dir, context: Any = None
    ) -> None:
        """Find the author's functions and load the model, once."""
        if self._initialized:
            return
        self._context = context
        self._environment = environment.Environment()
        self._validate_user_module_and_set_functions()
        if self._pre_model_fn is not None:
            self._run_handler_function(self._pre_model_fn, model_dir)
        self._model = self._run_handler_function(self._model_fn, model_dir)
        if self._model_warmup_fn is not None:
            self._run_handler_function(self._model_warmup_fn, model_dir, self._model)
        self._initialized = True

    def _validate_user_module_and_set_functions(self) -> None:
        name, own = self._environment.module_name, None
        if find_spec(name) is not None:
            own = importlib.import_module(name)
        transform = getattr(own, "transform_fn", None)
        if transform and any(getattr(own, step, None) for step in STEPS):
            raise ValueError(
                "Cannot use transform_fn implementation in conjunction with input_fn, predict_fn, "
                "and/or output_fn implementation"
            )
        self._transform_fn = transform or self._default_transform_fn
        for function in ("model_fn", *STEPS, *AROUND):
            default = getattr(self._default_inference_handler, f"default_{function}", None)
            setattr(self, f"_{function}", getattr(own, function, None) or default)

    def _default_transform_fn(
        self, model: Any, input_data: Any, content_type: Any, accept: Any, context: Any = None
    ) -> Any:
        data = self._run_handler_function(self._input_fn, input_data, content_type)
        prediction = self._run_handler_function(self._predict_fn, data, model)
        return self._run_handler_function(self._output_fn, prediction, accept)

    def _run_handler_function(self, func: Any, *argv: Any) -> Any:
        """Call a function, with the context where it has one more parameter."""
        count = len(signature(func).parameters)
        if count not in (len(argv), len(argv) + 1):
            raise TypeError(f"{func.__name__} takes {count} arguments but {len(argv)} were given.")
        return func(*(*argv, self._context)[:count])
