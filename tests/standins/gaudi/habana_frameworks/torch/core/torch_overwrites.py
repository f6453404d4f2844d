"""Replaces functions of torch as the original does.

With a checkout of the bridge named by ANYGAUGE_GAUDI_SOURCE its own file does it instead. This
model has what a training run meets: groups, seeds, and in lazy mode the names and hooks of modules.
"""

import datetime
import sys
from functools import wraps

import habana_standin
import torch
from torch.distributed.constants import default_pg_timeout

import habana_frameworks.torch.hpu.random as rand_hpu
from habana_frameworks.torch.utils.internal import is_lazy

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


def _record_groups():
    """Write down which groups are made, whoever wraps the functions that make them."""
    new_group, init = torch.distributed.new_group, torch.distributed.init_process_group

    @wraps(new_group)
    def _recorded_group(ranks, timeout, backend, pg_options):
        habana_standin.record("new_group", backend)
        return new_group(ranks, timeout, backend, pg_options)

    @wraps(init)
    def _recorded_init(backend, *args):
        habana_standin.record("init_process_group", backend)
        return init(backend, *args)

    torch.distributed.new_group = _recorded_group
    torch.distributed.init_process_group = _recorded_init


def _of_the_bridge():
    """The original's function, and beside it the unpickler that it takes in lazy mode; None without
    a checkout."""
    name = "habana_frameworks.torch.utils._weights_only_unpickler"
    unpickler = habana_standin.of_the_bridge(name)
    if unpickler is None:
        return None
    sys.modules[name] = sys.modules["habana_frameworks.torch.utils"]._weights_only_unpickler = (
        unpickler
    )
    return habana_standin.of_the_bridge(__name__).overwrite_torch_functions


def overwrite_torch_functions():
    _record_groups()
    theirs = _of_the_bridge()
    habana_standin.record("overwrites", "model" if theirs is None else "bridge")
    if theirs is not None:
        return theirs()
    new_group, init_process_group = (
        torch.distributed.new_group,
        torch.distributed.init_process_group,
    )
    manual_seed = torch.manual_seed

    @wraps(torch.manual_seed)
    def wrap_manual_seed(seed):
        rand_hpu.manual_seed(seed)
        return manual_seed(seed)

    # Without device_id, group_desc and use_local_synchronization: they are gone, though the
    # signature that `wraps` copies still shows them.
    @wraps(torch.distributed.new_group)
    def wrap_new_group(ranks=None, timeout=default_pg_timeout, backend=None, pg_options=None):
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
        init_process_group(
            backend, init_method, timeout, world_size, rank, store, group_name, pg_options
        )

    torch.manual_seed = wrap_manual_seed
    torch.distributed.new_group = wrap_new_group
    torch.distributed.init_process_group = wrap_init_process_group
    if is_lazy():
        _name_modules()
