"""What TorchServe's dialect, and archives made for TorchServe, do otherwise in a worker."""

import io
import json
import logging
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from modelyard.handlers.errors import BadInput, NoGradients, PredictionException
from modelyard.serve.worker import codec


def choose_rules(message: Mapping[str, Any]) -> codec.Rules:
    """Return what a LOAD message asks for: the dialect's rules, an old archive's, or ours."""
    if message.get("dialect") != "torchserve":
        ours = codec.our_rules(message)
        if "modelyard" in (message["manifest"] or {}):
            return ours
        return replace(ours, read_json=ours.read_json and json.loads, encode=encode_strictly)
    return codec.Rules(
        read_json=json.loads if message.get("decode_input", True) else None,
        encode=encode,
        explain_error=explain_in_dialect,
        explain_undecodable=lambda error: codec.Refusal(500, codec.INTERNAL, codec.text_of(error)),
        write_error=write_error,
        ends_worker=lambda error: not isinstance(error, Exception),  # `sys.exit()` does there
        fails_together=lambda error: isinstance(error, codec.WrongAnswer),
        compresses=False,
        max_answer_bytes=message.get("max_response_bytes"),
        answer_setting="max_response_size",
        time_metric="PredictionTime" if message.get("metrics") is not None else None,
    )


def encode(output: object, allow_nan: bool = True) -> tuple[bytes | bytearray, str | None]:
    """Return the bytes of one value as TorchServe writes it; the client guesses what is not JSON.

    Raises:
        TypeError, ValueError, RecursionError: JSON has no such value.
    """
    if isinstance(output, (str, bytes, bytearray)):
        return codec.encode(output)[0], None
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    if torch and isinstance(output, torch.Tensor):
        saved = io.BytesIO()
        torch.save(output, saved)
        return saved.getvalue(), None
    return json.dumps(output, indent=2, allow_nan=allow_nan).encode(), codec.JSON


encode_strictly = partial(encode, allow_nan=False)
"""Encodes a value as TorchServe does, but for numbers that JSON does not have."""


def explain_in_dialect(error: BaseException) -> codec.Refusal:
    """Return status, type and message of an error in TorchServe's words."""
    if isinstance(error, (BadInput, NoGradients, PredictionException)):
        refusal = codec.explain_error(error)
        is_too_large = isinstance(error, PredictionException) and refusal.code == 413
        return refusal._replace(code=507) if is_too_large else refusal
    if codec.is_out_of_memory(error) or "CUDA" in codec.text_of(error):
        return codec.Refusal(507, codec.INTERNAL, "Out of resources")
    if isinstance(error, codec.WrongAnswer):
        return codec.Refusal(error.code, codec.INTERNAL, error.brief)
    return codec.Refusal(503, codec.INTERNAL, "Prediction failed")


def write_error(refusal: codec.Refusal, request_id: str) -> bytes:
    """Return the JSON of an error; TorchServe's has no request id."""
    code, kind, message = refusal
    content = {"code": code, "type": kind, "message": message}
    return (json.dumps(content, indent=2) + "\n").encode()


def begin_log() -> None:
    """Send the author's log to standard output, whose lines the server marks.

    Scripts search it for the three lines that name this worker.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    logging.info("[PID]%d", os.getpid())
    logging.info("Torch worker started.")
    logging.info("Python runtime: %s", platform.python_version())
