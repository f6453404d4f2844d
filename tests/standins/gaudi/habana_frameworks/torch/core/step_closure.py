"""Ending the accumulated graph."""

import os

import habana_standin

from habana_frameworks.torch.utils.internal import is_lazy, lazy_only

_closures = []
_LIMIT = int(os.environ.get("PT_HPU_MAX_COMPOUND_OP_SIZE") or 2**63 - 1)
_WAITS = os.environ.get("PT_HPU_MAX_COMPOUND_OP_SYNC") == "1"
_graphs = 0
_operations = 0
"""Of all graphs that have ended."""


def _graphs_so_far():
    """Graphs that have ended, those among them that the limit has cut from the growing one."""
    return _graphs + (habana_standin.operations() - _operations) // _LIMIT


def _end_graph():
    """End the growing graph. One of more operations than the limit was cut on the way."""
    global _graphs, _operations
    total = habana_standin.operations()
    if not is_lazy() or total == _operations:
        return
    held, _operations = total - _operations, total
    cuts, rest = divmod(held, _LIMIT)
    _graphs += cuts + bool(rest)
    habana_standin.record("graph", held, cuts + bool(rest), _WAITS and cuts > 0)


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
    _end_graph()
    waiting, _closures[:] = list(_closures), []
    for closure, args in waiting:
        closure(*args)


@lazy_only
def iter_mark_step(device_str=""):
    mark_step(device_str)
