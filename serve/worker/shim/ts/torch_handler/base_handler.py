"""`from ts.torch_handler.base_handler import BaseHandler`."""

from handlers import BaseHandler as BaseHandler
