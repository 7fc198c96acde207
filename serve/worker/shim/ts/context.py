"""`from ts.context import Context`."""

from handlers.context import Context as Context
from handlers.context import RequestProcessor as RequestProcessor
