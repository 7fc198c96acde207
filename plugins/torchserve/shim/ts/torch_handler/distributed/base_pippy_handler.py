"""Names that import and do not load: see `ts._refused`."""

from ts._refused import refused_handler

BasePippyHandler = refused_handler("BasePippyHandler")
