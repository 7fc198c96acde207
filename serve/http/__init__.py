"""HTTP/1.1 of our own: bytes on a connection to a request, an answer to bytes."""
