"""`from ts.handler_utils.distributed.pt_pippy import initialize_rpc_workers`."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from modelyard.handlers.context import Context
from modelyard.handlers.errors import LoadError


def initialize_rpc_workers(local_rank: int, world_size: int, ctx: Context) -> None:
    """Join the processes of a pipeline, by `pippy` of model-config.yaml.

    Its keys: `rpc_timeout` in seconds, `num_worker_threads`.
    """
    from torch.distributed import rpc

    section = ctx.model_yaml_config["pippy"]
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=section["num_worker_threads"], rpc_timeout=section["rpc_timeout"]
    )
    if devices := torch.cuda.device_count():
        for other in range(world_size):
            options.set_device_map(f"worker{other}", {local_rank % devices: other % devices})
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"worker{local_rank}",
        rank=local_rank,
        world_size=world_size,
        rpc_backend_options=options,
    )


def get_pipeline_driver(model: torch.nn.Module, world_size: int, ctx: Context) -> Any:
    """Cut a model into a pipeline over all processes, by `pippy` of model-config.yaml.

    Its keys: `model_type` ("HF" for Transformers), `input_names`, `chunks`; and
    `handler.index_filename`.

    Raises:
        LoadError: a key is not there, or PiPPy is not installed.
    """
    section = ctx.model_yaml_config.get("pippy", {})
    for key in ("input_names", "model_type"):
        if key not in section:
            raise LoadError(f"model-config.yaml has no pippy.{key}")
    try:
        import pippy
        from pippy.hf import PiPPyHFTracer, inject_pipeline_forward
    except ImportError as error:
        raise LoadError(f"this handler needs PiPPy ({error}); install torchpippy") from error
    handler = ctx.model_yaml_config["handler"]
    index = handler.get("index_filename")
    is_transformer = section["model_type"] == "HF"
    fixed = {
        parameter.name: parameter.default
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.name not in section["input_names"]
    }
    if is_transformer and "bloom" in str(type(model)):
        fixed.setdefault("deprecated_arguments", {})
    driver, _ = pippy.all_compile(
        model.eval(),
        num_ranks=world_size,
        num_chunks=section.get("chunks", 1),
        schedule="FillDrain",
        split_policy=pippy.split_into_equal_size(world_size),
        tracer=PiPPyHFTracer() if is_transformer else None,
        concrete_args=fixed,
        index_filename=f"{handler['model_path']}/{index}" if index else None,
        checkpoint_prefix=None,
    )
    if not is_transformer:
        return driver
    inject_pipeline_forward(model, driver)
    return model
