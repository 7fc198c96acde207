"""Child process: one of two ranks that save a sharded tensor with torch.distributed."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main(rank: int, folder: Path) -> None:
    """Save `whole` in slices of its rows, and `columns` in slices of its columns."""
    warnings.simplefilter("ignore")
    store = folder.parent / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    content = {
        "model": {
            "whole": distribute_tensor(torch.arange(35.0).view(5, 7), mesh, [Shard(0)]),
            "columns": distribute_tensor(torch.arange(35.0).view(5, 7), mesh, [Shard(1)]),
        }
    }
    save_distributed(content, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
