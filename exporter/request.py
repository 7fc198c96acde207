"""`export`, as a program calls it. It imports torch when it is called, not before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelyard.exporter.ingest import Announce
    from modelyard.exporter.prove.parity import ExportReport


def export(
    checkpoint: str | Path,
    model: str | None = None,
    inputs: str | Sequence[str] = (),
    *,
    output_dir: str | Path = "build",
    weights_key: str | None = None,
    ema: bool = False,
    announce: Announce | None = None,
    formats: str | Sequence[str] | None = None,
    model_args: Mapping[str, Any] | None = None,
    task: str | None = None,
    submodule: str | None = None,
    output_names: str | Sequence[str] = (),
    name: str | None = None,
    device: str = "cpu",
    tolerance: float | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    generate: bool = False,
    samples: Sequence[str | Path] = (),
    quick: bool = False,
    tell: Callable[[str], None] | None = None,
    sample_only: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[ExportReport]:
    """Write artifacts that are proven to agree with the checkpoint, and a report beside each.

    Args:
        checkpoint: a file or folder of any kind that docs/checkpoints.md names.
        model: `file.py:Class`, `package.module:Class` or `package.module:factory`; None where the
            checkpoint names a class that is installed.
        inputs: one `name:dtype[dims]` per tensor that forward() takes. What is needed and not
            given is asked of the model.
        output_dir: made when it is not there.
        weights_key: dotted path of the weights in a checkpoint that has several.
        ema: take the averaged weights.
        announce: only for a checkpoint that is trusted to run its code: called with what it will
            import.
        formats: of pt2, onnx, torchscript, aoti; pt2 and onnx when absent, onnx alone when
            quantised.
        model_args: keyword arguments for the class or factory; they replace those of the same name
            among the checkpoint's hyper-parameters, and values of a Hugging Face folder's
            `config.json`.
        task: what a Hugging Face folder is for, as `text-classification`, instead of `model`.
        submodule: the part of the model to export alone, as `encoder.layers.0`; `inputs` are that
            part's.
        output_names: those of the model's outputs to keep, or a new name for each, in order.
        name: the artifacts' name without suffix; the checkpoint's when absent.
        device: `cpu` or `cuda[:N]`, where it is traced and checked. The artifact loads on any.
        tolerance: largest difference of floats, over a row's largest value where that is above 1;
            1e-4 for float32 when absent.
        dtype: fp32, bf16 or fp16, what weights and floating-point inputs become; the checkpoint's
            own when absent. Parity compares with the checkpoint in float32.
        quantize: int8-dynamic or int8-static, for onnx; int8-static needs samples, and is compared
            on some of them.
        generate: write a decoder with its cache, which takes a prompt and the steps after it;
            `inputs` then give other ranges to what is chosen.
        samples: files of real inputs to compare on; nothing of them stays.
        quick: compare on few inputs, for a first look; the report says so.
        tell: called with a line about what was chosen where nothing was given.
        sample_only: make nothing up: trace with a sample, and compare on the samples alone.
        progress: called before each step with its name, its number from 0, and the number of steps.

    Raises:
        PartialExportError: some formats were written, others not; it holds the reports of the
            former and the errors of the latter.
        ExportError: nothing was written. In both cases artifacts of an earlier export that could
            not be written anew are as they were.
    """
    given = locals()
    from modelyard.exporter.trip import ExportRequest, run

    for each in ("inputs", "formats", "output_names"):
        if isinstance(given[each], str):
            given[each] = (given[each],)
    for each in ("checkpoint", "output_dir"):
        given[each] = Path(given[each])
    return run(ExportRequest(**{**given, "samples": [Path(sample) for sample in samples]}))
