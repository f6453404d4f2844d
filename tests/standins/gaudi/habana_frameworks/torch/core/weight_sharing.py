"""The class that parameters get in lazy mode, so that modules may share one that moves.

With a checkout of the bridge named by ANYGAUGE_GAUDI_SOURCE its own file is loaded instead. This
model has what a training run meets: another class of parameters, whose attributes and operations
all pass through Python.
"""

import habana_standin
import torch


class HabanaParameterWrapper(torch.nn.Parameter):
    """A parameter whose attributes and operations pass through Python."""

    def __getattribute__(self, name):
        return object.__getattribute__(self, name)

    def __setattr__(self, name, value):
        return object.__setattr__(self, name, value)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def update_habana_parameter(result):
    if type(result) is torch.nn.Parameter:
        result.__class__ = HabanaParameterWrapper


def _model():
    get = torch.nn.Module.__getattr__

    def wrapped__getattr__(self, name):
        found = get(self, name)
        update_habana_parameter(found)
        return found

    torch.nn.Module.__getattr__ = wrapped__getattr__
    make = torch.nn.Parameter.__new__

    def wrapped__new__(cls, data=None, requires_grad=True):
        # torch refuses to make one of a class whose `detach` gives a plain tensor.
        if type(data) is HabanaParameterWrapper:
            return torch.Tensor._make_subclass(cls, data, requires_grad)
        return make(cls, data, requires_grad)

    torch.nn.Parameter.__new__ = wrapped__new__


def _keep_data_of_a_device():
    # A tensor of the card cannot take the place of a parameter's on the host, as the comment of the
    # bridge's file says: a module that moves gets new parameters. The simulated cards would let it.
    compatible = torch._has_compatible_shallow_copy_type

    def _of_one_device(input, from_):  # the names that torch expects of it
        return input.device.type == from_.device.type and compatible(input, from_)

    torch._has_compatible_shallow_copy_type = _of_one_device


def enable_weight_sharing():
    _keep_data_of_a_device()
    theirs = habana_standin.of_the_bridge(__name__)
    habana_standin.record("weight_sharing", "model" if theirs is None else "bridge")
    return _model() if theirs is None else theirs.enable_weight_sharing()
