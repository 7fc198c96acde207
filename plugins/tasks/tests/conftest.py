"""Fixtures of core's tests of handlers that ours use, too."""

from tests.handlers.conftest import digits_folder, digits_net, make_context

__all__ = ["digits_folder", "digits_net", "make_context"]
