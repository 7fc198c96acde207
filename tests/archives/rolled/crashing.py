"""The same classifier, which ends its process at one number of ten."""

import os

import good


def handle(data, context):
    """Answer each row, or none ever."""
    if data is None:
        return None
    if any(int(row["body"]) % 10 == 7 for row in data):
        os._exit(3)
    return good.handle(data, context)
