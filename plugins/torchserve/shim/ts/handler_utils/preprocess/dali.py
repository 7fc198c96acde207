"""Names that import and do not load: see `ts._refused`."""

from ts._refused import refused_function

get_dali_pipeline = refused_function("get_dali_pipeline")
