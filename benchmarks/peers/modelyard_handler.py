"""Modelyard, and TorchServe, whose handlers have the same form."""

from work import Work

_work = None


def handle(data, context):
    """Answer a batch; TorchServe's contract."""
    global _work
    if _work is None:
        _work = Work(context.system_properties["model_dir"] + "/tiny.onnx")
    if data is None:
        return None
    return _work([bytes(row["body"]) for row in data])
