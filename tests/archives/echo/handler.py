"""Answers what it was told."""

import os


class Echo:
    def initialize(self, context):
        self.version = context.manifest["model"]["modelVersion"]

    def handle(self, data, context):
        context.metrics.add_counter("Echoes", len(data))
        return [
            {
                "body": self.text(row.get("body", b"")),
                "batch": len(data),
                "pid": os.getpid(),
                "version": self.version,
                "query": context.query[at],
                "url_path": context.get_request_header(at, "url_path"),
                "explain": context.get_request_header(at, "explain"),
                "request_id": context.get_request_id(at),
                "headers": context.get_all_request_header(at),
                "content_type": context.get_request_header(at, "content-type"),
            }
            for at, row in enumerate(data)
        ]

    def text(self, body):
        return body.decode("latin-1") if isinstance(body, (bytes, bytearray)) else body
