"""Says of an answer what the body says, and sends a body that is somebody else's answer.

The first line is `STATUS [KIND]`, or `stream STATUS`; each further one is a header.
"""

FORGED = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 6\r\n\r\nFORGED"


class Forging:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        answers, is_streamed = [], False
        for at, row in enumerate(data):
            first, *headers = bytes(row["body"]).decode("latin-1").split("\n")
            status, _, kind = first.removeprefix("stream ").partition(" ")
            is_streamed |= first.startswith("stream ")
            context.set_response_status(int(status), idx=at)
            if kind and kind != "empty":
                context.set_response_header(at, "content-type", kind)
            for name, _, value in (each.partition(": ") for each in headers):
                context.set_response_header(at, name, value)
            answers.append(b"" if kind == "empty" else FORGED)
        if is_streamed:
            context.send_intermediate(list(answers))
        return answers
