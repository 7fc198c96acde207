"""The same classifier, which takes a fifth of a second."""

import time

import good


def handle(data, context):
    """Answer each row, later."""
    if data is None:
        return None
    time.sleep(0.2)
    return good.handle(data, context)
