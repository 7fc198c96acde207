"""Archive → HTTP.

This file stays empty on purpose: a worker process imports `modelyard.serve.worker`, passes through
here and must not reach the web stack on the way.
"""
