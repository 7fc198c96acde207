"""The last version of TorchServe, which handlers compare against."""

from modelyard.handlers.context import SERVER_VERSION

__version__ = SERVER_VERSION
