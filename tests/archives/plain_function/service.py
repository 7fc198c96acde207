"""One function instead of a class, under a name of its own."""

loaded = []


def answer(data, context):
    if data is None:
        loaded.append(context.model_name)
        return None
    return [{"loaded": loaded, "body": bytes(row["body"]).decode()} for row in data]
