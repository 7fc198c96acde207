"""Any checkpoint in: what a training run left → its weights and all that is known of them.

Nothing that a checkpoint holds is imported, called or compiled; `trust.py` is the one exception,
and runs only for a file that a person has trusted.

    source         bytes, mapped, and what they are; JSON, read by `archiver.untrusted`
    pickles        pickle → plain values and placeholders; rebuild: the calls that give tensors
    plain          placeholders → values, by the lists of `allowed.yaml`; a module → its tensors
    torch_file  safetensors_file  dcp  torchscript  exported_program  onnx_file     one format each
    kinds          keys of a saved object → kind, weights and the rest of a run
    single_file  folders     one file, one folder or archive → ParsedCheckpoint
    value          ParsedCheckpoint, Checkpoint; read: the trip from one to the other
"""

from modelyard.exporter.ingest.read import read_checkpoint
from modelyard.exporter.ingest.single_file import ONNX, PROGRAM, Announce
from modelyard.exporter.ingest.value import Checkpoint

__all__ = ["ONNX", "PROGRAM", "Announce", "Checkpoint", "read_checkpoint"]
