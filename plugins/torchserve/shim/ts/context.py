"""`from ts.context import Context`."""

from modelyard.handlers.context import Context as Context
from modelyard.handlers.context import RequestProcessor as RequestProcessor
