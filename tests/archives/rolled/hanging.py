"""The same classifier, which never answers one number of ten."""

import time

import good


def handle(data, context):
    """Answer each row, or none ever."""
    if data is None:
        return None
    if any(int(row["body"]) % 10 == 7 for row in data):
        time.sleep(3600)
    return good.handle(data, context)
