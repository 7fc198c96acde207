"""Handlers of core's tests: the digits example, and a folder like its unpacked archive."""

from tests.handlers.conftest import digits_folder, digits_net, make_context

__all__ = ["digits_folder", "digits_net", "make_context"]
