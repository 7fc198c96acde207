"""Archive → HTTP.

This file stays empty on purpose: a worker process imports `serve.worker` and passes through here,
and must not reach the web stack on the way.
"""
