"""The same classifier, which answers something else once a file is there."""

from pathlib import Path

import good


def handle(data, context):
    """Answer each row."""
    if data is None:
        return None
    moved = int(Path(context.system_properties["model_dir"], "gate").exists())
    return [good.answer({"body": int(row["body"]) + moved}) for row in data]
