"""The distribution `modelyard-client`, by the name that it has beside the server."""

from modelyard_client import *
from modelyard_client import __all__ as __all__
