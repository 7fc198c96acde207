"""Gives a status that has no body, and a body that is somebody else's answer."""

FORGED = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 6\r\n\r\nFORGED"


class Forging:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        for at, row in enumerate(data):
            status, _, kind = bytes(row["body"]).decode().partition(" ")
            context.set_response_status(int(status), idx=at)
            if kind:
                context.set_response_header(at, "content-type", kind)
        return [FORGED for _ in data]
