"""A Python client of a server: predictions, tensors, explanations, streams, with safe retries.

It needs neither torch nor anything of the server; numpy only where arrays are sent or asked for.
"""

from modelyard.client.asynchronous import AsyncClient
from modelyard.client.errors import BadAnswer, ClientError, NoAnswer, NotTrusted, RequestFailed
from modelyard.client.explanation import Explanation
from modelyard.client.options import ExplainOptions
from modelyard.client.retries import Request, Retries
from modelyard.client.synchronous import Client

__all__ = [
    "AsyncClient",
    "BadAnswer",
    "Client",
    "ClientError",
    "ExplainOptions",
    "Explanation",
    "NoAnswer",
    "NotTrusted",
    "Request",
    "RequestFailed",
    "Retries",
]
