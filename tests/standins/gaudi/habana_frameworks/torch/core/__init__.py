"""Registers torch.hpu, and replaces functions of torch as the original does."""

import os

import habana_standin
import torch

from habana_frameworks.torch import hpu
from habana_frameworks.torch.utils.internal import is_lazy

from .step_closure import add_step_closure, iter_mark_step, mark_step
from .torch_overwrites import overwrite_torch_functions

__all__ = ["add_step_closure", "hpu", "is_lazy", "iter_mark_step", "mark_step"]

habana_standin.cards()
torch._register_device_module("hpu", hpu)
overwrite_torch_functions()

_shares = os.getenv("PT_HPU_WEIGHT_SHARING", "1").upper() in ("ON", "1", "YES", "TRUE", "Y")
if is_lazy() and _shares:
    from . import weight_sharing as _weight_sharing

    _weight_sharing.enable_weight_sharing()

if not is_lazy():
    import habana_frameworks.torch.dynamo.compile_backend
