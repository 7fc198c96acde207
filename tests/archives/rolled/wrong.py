"""The same classifier, which takes one number of a hundred for its neighbour."""

import good


def handle(data, context):
    """Answer each row."""
    if data is None:
        return None
    numbers = [int(row["body"]) for row in data]
    moved = [number + (number % 100 == 37) for number in numbers]
    return [good.answer({"body": number}) for number in moved]
