"""Streams what it is told to."""

import os
import time


class Streamer:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        if context.get_request_header(0, "describe"):
            return [{"streams": True}]
        asked = [self.text(row["body"]).split() for row in data]
        return getattr(self, asked[0][0])(asked, context)

    def text(self, body):
        return body.decode() if isinstance(body, (bytes, bytearray)) else body

    def count(self, asked, context):
        """`count N`: N chunks and an end, for each request its own."""
        for at, (_, count) in enumerate(asked):
            context.set_response_status(202, "streamed", at)
            context.set_response_header(at, "x-count", count)
        for chunk in range(int(asked[0][1])):
            context.send_intermediate([f"{count}.{chunk} " for _, count in asked])
        return [{"end": count} for _, count in asked]

    def wait(self, asked, context):
        """`wait FILE`: a chunk, and an end once the file is there."""
        context.send_intermediate(["begun "])
        while not os.path.exists(asked[0][1]):
            time.sleep(0.01)
        return ["end"]

    def flood(self, asked, context):
        """`flood N FILE`: N chunks of 64 KiB, each of one digit; the file says that all are sent."""
        for chunk in range(int(asked[0][1])):
            context.send_intermediate([str(chunk % 10) * (1 << 16)])
        with open(asked[0][2], "w") as file:
            file.write("sent")
        return [""]

    def forever(self, asked, context):
        """`forever FILE`: chunks without an end; the file says that it was interrupted."""
        try:
            while True:
                context.send_intermediate(["more "])
                time.sleep(0.01)
        finally:
            with open(asked[0][1], "w") as file:
                file.write("interrupted")

    def fail(self, asked, context):
        """`fail N`: an error after N chunks."""
        for _ in range(int(asked[0][1])):
            context.send_intermediate(["part "])
        raise ValueError("no more")

    def unfit(self, asked, context):
        """`unfit`: a chunk, and a last value that cannot be sent."""
        context.send_intermediate(["part "])
        return [{1, 2}]

    def die(self, asked, context):
        """`die FILE`: one more line in the file, a chunk, and the end of the process."""
        with open(asked[0][1], "a") as file:
            file.write("run\n")
        context.send_intermediate(["part "])
        os._exit(3)
