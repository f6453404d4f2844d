"""The class that parameters get in lazy mode, so that modules may share one that moves.

With a checkout of the bridge named by ANYGAUGE_GAUDI_SOURCE its own file is loaded instead. This
model does what that file does to a run. All parameters get a class whose attributes and operations
pass through a table, which says what stands in a parameter's place. A parameter whose tensor is set
to one of another device keeps its own: its module gets a new parameter there. Moving a module does
the same, keeps what modules share, and lets the parameters from before stand for the new ones.
"""

import habana_standin
import torch


class HabanaParameterWrapper(torch.nn.Parameter):
    """A parameter, or what now stands in its place."""

    db = {}  # id of a parameter -> what stands in its place, which may be the parameter itself

    def __getattribute__(self, name):
        current = HabanaParameterWrapper.db.setdefault(id(self), self)
        return object.__getattribute__(current, name)

    def __setattr__(self, name, value):
        current = HabanaParameterWrapper.db.setdefault(id(self), self)
        return object.__setattr__(current, name, value)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = tuple(
            [_current(e) for e in arg] if type(arg) is list else _current(arg) for arg in args
        )
        kwargs = {name: _current(value) for name, value in (kwargs or {}).items()}
        if func.__name__ == "__set__" and all(hasattr(each, "device") for each in args[:2]):
            held, given = args[:2]
            if held.device != given.device:
                # What `wrapped_to` gave it; a parameter of a module that never moved has none.
                held.change_device_placement(given.device)
                return None
        return super().__torch_function__(func, types, args, kwargs)

    def __del__(self):
        HabanaParameterWrapper.db.pop(id(self), None)


def _current(value):
    return HabanaParameterWrapper.db[id(value)] if type(value) is HabanaParameterWrapper else value


def update_habana_parameter(result):
    if type(result) is torch.nn.Parameter:
        _wrap(result)


def _wrap(parameter):
    parameter.__class__ = HabanaParameterWrapper
    HabanaParameterWrapper.db[id(parameter)] = parameter


class DevicePlacementChanger:
    """Moves one parameter of a module to a device: by another parameter."""

    def __init__(self, module, name, param):
        self.module, self.name, self.param = module, name, param

    def __call__(self, new_device):
        held = self.module._parameters
        old = held[self.name]
        moved = old.clone().to(new_device)
        # The old one gives its memory back. The new one comes last among those of its module.
        old.data = torch.empty([], device=self.param.device)
        del held[self.name]
        held[self.name] = moved
        moved.__class__ = HabanaParameterWrapper
        moved.change_device_placement = self
        HabanaParameterWrapper.db[id(self.param)] = moved


def _places(module):
    """Every (module, name) of a parameter, or of None in its place; a module's own after those of
    its children."""
    for child in module.children():
        yield from _places(child)
    for name in list(module._parameters):
        yield module, name


def _at(places):
    return [module._parameters[name] for module, name in places]


def _shared(parameters):
    """Place -> the first place that has the same parameter."""
    first, found = {}, {}
    for place, parameter in enumerate(parameters):
        if isinstance(parameter, HabanaParameterWrapper):
            if id(parameter) not in HabanaParameterWrapper.db:
                raise _unsuccessful()
            parameter = HabanaParameterWrapper.db[id(parameter)]
        if id(parameter) in first:
            found[place] = first[id(parameter)]
        else:
            first[id(parameter)] = place
    return found


def _unsuccessful():
    return Exception("what modules share was lost when they moved; PT_HPU_WEIGHT_SHARING=0 is off")


def _last(value):
    """The end of a chain of parameters that stand in each other's place."""
    while (then := HabanaParameterWrapper.db.get(id(value), value)) is not value:
        value = then
    return value


def wrapped_to(self, *args, **kwargs):
    places = list(_places(self))
    before = _at(places)
    for parameter in before:
        if parameter is not None and not isinstance(parameter, HabanaParameterWrapper):
            _wrap(parameter)
    shared = _shared(before)
    result = self.original_to(*args, **kwargs)
    places = list(_places(self))
    after = _at(places)
    for place, first in shared.items():
        if max(place, first) >= len(after):
            raise _unsuccessful()
        module, name = places[place]
        module._parameters[name] = after[first]
    if len(before) != len(after) or _shared(_at(places)) != shared:
        raise _unsuccessful()
    table = HabanaParameterWrapper.db
    for old, new in zip(before, after, strict=True):
        if id(old) in table and old is not new:
            table[id(old)] = new
    for key, value in table.items():
        table[key] = _last(value)
    for module, name in _places(self):
        parameter = module._parameters[name]
        if parameter is not None:
            parameter.change_device_placement = DevicePlacementChanger(module, name, parameter)
    return result


def wrapped__getattr__(self, name):
    found = self.original__get_attr__(name)
    checked = vars(self).get("checked_parameters")
    if checked is None:
        self.checked_parameters = set()
    elif name in checked:
        return found
    else:
        checked.add(name)
    update_habana_parameter(found)
    return found


def wrapped__new__(cls, data=None, requires_grad=True):
    # torch refuses to make one of a class whose `detach` gives a plain tensor.
    if type(data) is HabanaParameterWrapper:
        return torch.Tensor._make_subclass(cls, data, requires_grad)
    return wrapped__new__.original__new__(cls, data, requires_grad)


def _keep_data_of_a_device():
    # A tensor of the card cannot take the place of a parameter's on the host, as the comment of the
    # bridge's file says: a module that moves gets new parameters. The simulated cards would let it.
    compatible = torch._has_compatible_shallow_copy_type

    def _of_one_device(input, from_):  # the names that torch expects of it
        return input.device.type == from_.device.type and compatible(input, from_)

    torch._has_compatible_shallow_copy_type = _of_one_device


def _model():
    module = torch.nn.Module
    module.original__get_attr__, module.original_to = module.__getattr__, module.to
    module.__getattr__, module.to = wrapped__getattr__, wrapped_to
    wrapped__new__.original__new__ = torch.nn.Parameter.__new__
    torch.nn.Parameter.__new__ = wrapped__new__


def enable_weight_sharing():
    _keep_data_of_a_device()
    theirs = habana_standin.of_the_bridge(__name__)
    habana_standin.record("weight_sharing", "model" if theirs is None else "bridge")
    return _model() if theirs is None else theirs.enable_weight_sharing()
