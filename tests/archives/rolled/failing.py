"""The same classifier, which fails at one number of ten."""

import good


def handle(data, context):
    """Answer each row, or fail."""
    if data is None:
        return None
    if any(int(row["body"]) % 10 == 7 for row in data):
        raise RuntimeError("as it was asked")
    return good.handle(data, context)
