"""Modelyard, and TorchServe, whose handlers have the same form."""

from pathlib import Path

from work import Work, to_json

_work = None


def handle(data, context):
    """Answer a batch; TorchServe's contract."""
    global _work
    if _work is None:
        folder = Path(context.system_properties["model_dir"])
        models = [folder / name for name in ("tiny.pt", "tiny.onnx") if (folder / name).exists()]
        _work = Work(str(models[0]) if models else "")
    if data is None:
        return None
    return [to_json(answer) for answer in _work([bytes(row["body"]) for row in data])]
