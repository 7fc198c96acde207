"""`from ts.context import Context`."""

from handlers import Context as Context
