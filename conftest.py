"""Fixtures that tests of core and of plug-ins share."""

pytest_plugins = ["tests.shared"]
