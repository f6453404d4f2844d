"""Ending the accumulated graph."""

import habana_standin

from habana_frameworks.torch.utils.internal import is_lazy, lazy_only

_closures = []


@lazy_only
def add_step_closure(closure, args=()):
    _closures.append((closure, args))


def _mark_step_if_lazy(device_str=""):
    if is_lazy():
        mark_step(device_str)


@lazy_only
def mark_step(device_str="", sync=False):
    if not isinstance(device_str, str) or not isinstance(sync, bool):
        raise TypeError(f"_mark_step(): incompatible arguments ({device_str!r}, {sync!r})")
    habana_standin.record("mark_step", sync)
    habana_standin.census().cut("mark_step")
    waiting, _closures[:] = list(_closures), []
    for closure, args in waiting:
        closure(*args)


@lazy_only
def iter_mark_step(device_str=""):
    mark_step(device_str)
