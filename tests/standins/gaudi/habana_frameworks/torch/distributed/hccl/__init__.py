"""The collectives of the device, as the c10d backend "hccl": no mean, and not every operation."""

import os

import habana_standin
import torch.distributed as dist

from habana_frameworks.torch.hpu import HABANA_VISIBLE_MODULES_VAR, HLS_MODULE_ID_VAR


def _setup_module_id(local_rank=-1, world_size=1):
    if HLS_MODULE_ID_VAR in os.environ or local_rank == -1 or world_size == 1:
        return
    if HABANA_VISIBLE_MODULES_VAR in os.environ:
        visible = os.environ[HABANA_VISIBLE_MODULES_VAR].split(",")
        assert local_rank < len(visible), "There is not enough devices"
        os.environ[HLS_MODULE_ID_VAR] = visible[local_rank]
        return
    os.environ[HLS_MODULE_ID_VAR] = str(local_rank)


def initialize_distributed_hpu(world_size=None, rank=None, local_rank=None):
    if all(value is not None for value in (world_size, rank, local_rank)):
        os.environ.update(WORLD_SIZE=str(world_size), RANK=str(rank), LOCAL_RANK=str(local_rank))
    world_size = int(os.getenv("WORLD_SIZE", 1))
    rank = int(os.getenv("RANK", -1))
    local_rank = int(os.environ.get("LOCAL_RANK", -1))
    _setup_module_id(local_rank=local_rank, world_size=world_size)
    if rank != -1:
        os.environ["ID"] = str(rank)
    return world_size, rank, local_rank


initialize_distributed_hpu()

_SERVED = (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT)


def _refuse_average(function, name):
    """All that takes an operation: the library has no mean."""

    def _checked(*args, **kwargs):
        op = kwargs.get("op", next((a for a in args if isinstance(a, dist.ReduceOp)), None))
        op = next((a for a in args if isinstance(a, dist.ReduceOp.RedOpType)), op)
        if op is not None and op not in _SERVED and op == dist.ReduceOp.AVG:
            group = kwargs.get("group")
            if dist.get_backend(group) == "hccl":
                raise RuntimeError("Unsupported ReduceOp for HCCL process group")
        habana_standin.record("collective", name)
        return function(*args, **kwargs)

    return _checked


for _name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"):
    setattr(dist, _name, _refuse_average(getattr(dist, _name), _name))


def _group(store, rank, size, timeout):
    from anygauge_sim.device import _collectives

    return _collectives(store, rank, size, timeout)


dist.Backend.register_backend("hccl", _group, devices=["hpu"])
