"""Registers torch.hpu, and replaces functions of torch as the original does."""

import datetime
import os
from functools import wraps

import habana_standin
import torch

from habana_frameworks.torch import hpu
from habana_frameworks.torch.utils.internal import is_lazy

from .step_closure import add_step_closure, iter_mark_step, mark_step

__all__ = ["add_step_closure", "hpu", "is_lazy", "iter_mark_step", "mark_step"]

habana_standin.cards()
torch._register_device_module("hpu", hpu)


def overwrite_torch_functions():
    from torch.distributed.constants import default_pg_timeout

    new_group, init_process_group = (
        torch.distributed.new_group,
        torch.distributed.init_process_group,
    )
    manual_seed = torch.manual_seed

    @wraps(torch.manual_seed)
    def wrap_manual_seed(seed):
        hpu.random.manual_seed(seed)
        return manual_seed(seed)

    # Without device_id, group_desc and use_local_synchronization: they are gone, though the
    # signature that `wraps` copies still shows them.
    @wraps(torch.distributed.new_group)
    def wrap_new_group(ranks=None, timeout=default_pg_timeout, backend=None, pg_options=None):
        habana_standin.record("new_group", backend)
        return new_group(ranks, timeout, backend, pg_options)

    @wraps(torch.distributed.init_process_group)
    def wrap_init_process_group(
        backend,
        init_method=None,
        timeout=datetime.timedelta(seconds=1800),
        world_size=-1,
        rank=-1,
        store=None,
        group_name="",
        pg_options=None,
    ):
        habana_standin.record("init_process_group", backend)
        init_process_group(
            backend, init_method, timeout, world_size, rank, store, group_name, pg_options
        )

    torch.manual_seed = wrap_manual_seed
    torch.distributed.new_group = wrap_new_group
    torch.distributed.init_process_group = wrap_init_process_group


overwrite_torch_functions()


_names = []
"""Of the modules that are in their forward pass, outermost first."""


def _pre_fwd_hook(module, input):
    _names.append(module.custom_name)


def _post_fwd_hook(module, input, output):
    if _names:
        _names.pop()
    for each in output if isinstance(output, (list, tuple)) else (output,):
        if isinstance(each, torch.Tensor) and each.requires_grad:
            each.register_hook(lambda gradient: gradient)


def _name_module(module, name):
    """Each module is named once, when another gets it, and keeps two hooks for good."""
    if isinstance(module, torch.nn.Module) and not getattr(module, "names_hook", False):
        module.custom_name = name
        module.register_forward_pre_hook(_pre_fwd_hook)
        module.register_forward_hook(_post_fwd_hook, always_call=True)
        module.names_hook = True


def _name_modules():
    add_module, set_attribute = torch.nn.Module.add_module, torch.nn.Module.__setattr__

    @wraps(add_module)
    def wrap_add_module(self, name, module):
        _name_module(module, name)
        add_module(self, name, module)

    @wraps(set_attribute)
    def wrap_set_attr(self, name, value):
        _name_module(value, name)
        set_attribute(self, name, value)

    torch.nn.Module.add_module = wrap_add_module
    torch.nn.Module.__setattr__ = wrap_set_attr


if is_lazy():
    _name_modules()
    if os.getenv("PT_HPU_WEIGHT_SHARING", "1").upper() in ("ON", "1", "YES", "TRUE", "Y"):
        from . import weight_sharing as _weight_sharing

        _weight_sharing.enable_weight_sharing()

if not is_lazy():
    import habana_frameworks.torch.dynamo.compile_backend
