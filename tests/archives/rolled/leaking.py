"""The same classifier, which keeps a megabyte of each call."""

import good

kept = []


def handle(data, context):
    """Answer each row."""
    if data is None:
        return None
    kept.append(bytearray(1 << 20))
    return good.handle(data, context)
