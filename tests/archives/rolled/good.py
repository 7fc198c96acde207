"""A classifier of whole numbers: digits by name, the right one with most of the probability."""


def answer(row):
    """Return the probability of each digit."""
    number = int(row["body"])
    right = str(number % 10)
    return {right: 0.9, **{str(d): 0.1 / 9 for d in range(10) if str(d) != right}}


def handle(data, context):
    """Answer each row."""
    if data is None:
        return None
    return [answer(row) for row in data]
