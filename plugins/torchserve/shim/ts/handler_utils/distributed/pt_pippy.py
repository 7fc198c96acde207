"""Names that import and do not load: see `ts._refused`."""

from ts._refused import refused_function

get_pipeline_driver = refused_function("get_pipeline_driver")
initialize_rpc_workers = refused_function("initialize_rpc_workers")
