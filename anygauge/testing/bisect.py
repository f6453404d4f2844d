"""A run once more: the first operation whose result is not what float64 gives on the host, and
what a step sends.

A process for each rank trains a run that was found wrong once more, with the backend's environment,
up to the step that differs, and repeats every operation of the device on the host, from the
device's own inputs. The first whose result is out of its bound had inputs that were still what they
should be, or what earlier rounding explains.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from anygauge.interface import HOST_DEVICE, Job
from anygauge.testing.bounds import compare, on_host, round_either_way, roundoff
from anygauge.testing.process import Subject, run_ranks

if TYPE_CHECKING:
    from anygauge.training.setup import PreparedRun

NOT_FOUND = "the cause was not found"


def cause_of(subject: Subject, folder: Path, found: Path, step: int, *, ranks: int) -> str:
    """Find where the device first leaves the host, as a sentence without its end; never raises.

    Args:
        folder: for answers and logs.
        found: folder of the device's run.
        step: the first whose loss differs, from 1; later ones are not looked at.
    """
    request, base = {"run": str(found), "steps": step}, folder / f"cause-{found.name}"
    try:
        files, trouble = run_ranks(first_operation, request, subject, base, ranks=ranks)
        said = [(json.loads(f.read_text()), at) for at, f in enumerate(files) if f.exists()]
    except Exception as error:  # the failure that is explained must be reported all the same
        return f"{NOT_FOUND}: {type(error).__name__}: {error}"
    places = [(number, rank, place) for (number, place, _), rank in said if place]
    if not places:
        return f"{NOT_FOUND}: {trouble or said[0][0][-1]}"
    _, rank, place = min(places)
    where = f" on rank {rank}" if ranks > 1 else ""
    return f"the device leaves the host first{where} in {place}"


# -- in the process -------------------------------------------------------------------------------


def first_operation(request: Any) -> tuple[int, str, str]:
    """How many operations were repeated; the first that leaves the host, empty if none does; and
    what was compared, in words."""
    run = prepare_run(Path(request["run"]), request["rendezvous"])
    loop, replay = run.loop, Replay(run.loop.backend.device_type)
    for index in range(loop.start, request["steps"] + 1):
        if index % loop.settings.eval_every == 0:
            replay.place = f"the evaluation before step {index + 1}"
            with replay:
                loop.evaluate(index)
        if index < request["steps"] and not replay.found:
            replay.place = f"step {index + 1}"
            with replay:
                one_step(run, index)
        if replay.found:
            break
    unknown = "".join(f", nor aten::{name}" for name in sorted(replay.unknown))
    compared = (
        f"the host repeated {replay.compared} operations in float64 from the device's inputs, and "
        "each agrees; what ranks exchange, compiled graphs and random numbers it cannot repeat"
    )
    return replay.compared, replay.found, compared + unknown


def prepare_run(folder: Path, rendezvous: str) -> PreparedRun:
    """A run, ready for its first step once more, in a folder beside its own."""
    from anygauge.config.resolved import read_run
    from anygauge.registry import Registry
    from anygauge.training.build_strategy import create_strategy
    from anygauge.training.progress import Progress
    from anygauge.training.setup import Rank, open_device, prepare_run
    from anygauge.util.events import EventWriter

    registry, run = Registry.load(), read_run(folder / "run.json")
    home = folder.with_name(f"{folder.name}-again")
    home.mkdir(exist_ok=True)
    job = replace(Job.load(folder / "job.json"), run_directory=str(home), rendezvous=rendezvous)
    index, local, world = (int(os.environ[n]) for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    events = EventWriter(None)
    rank = Rank(
        index=index, local=local, world_size=world, events=events, progress=Progress(events)
    )
    backend = open_device(job, rank, run, registry)
    return prepare_run(job, run, rank, registry, backend, create_strategy(registry, run))


def one_step(run: PreparedRun, index: int) -> None:
    """Forward, backward and update of a step, as the loop does them."""
    from anygauge.training.schedule import learning_rate
    from anygauge.training.to_device import LazyBatches

    loop, section = run.loop, run.loop.settings
    batches = LazyBatches(loop.batches.step(index), loop.to_device)
    loop.engine.run_step(batches, loop.loss_function, loop.batches.normalizer(index))
    lr = learning_rate(index, loop.batches.steps, section.optimizer.lr, section.schedule)
    loop.engine.update(lr, section.max_grad_norm)


# -- what a step sends -----------------------------------------------------------------------------

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""torch's operators, of c10d and functional, begin with these, with ``_`` elsewhere or not at all;
others have their own name."""
QUIET = {"recv_", "wait_tensor", "barrier", "monitored_barrier_", "_wrap_tensor_autograd"}
NAMESPACES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "_dtensor::")


class CollectiveBytes(TorchDispatchMode):
    """While it is entered: what goes into a reduction, an exchange or a send, what a gather gives.

    Attributes:
        calls, bytes: by operation.
        sizes: bytes of each call, in order, by operation.
        operators: torch's names of all that was called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.sizes: dict[str, list[int]] = {}
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and count what it is given."""
        result = func(*args, **(kwargs or {}))
        operator = func._schema.name
        if operator.startswith(NAMESPACES):
            self.operators.add(operator)
            self._count(operator.rpartition("::")[2], (*args, result))
        return result

    def _count(self, operator: str, given: Any) -> None:
        """The larger side of gathers and scatters, the first of others."""
        sides = filter(None, map(_tensors, given))
        sizes = [sum(each.numel() * each.element_size() for each in side) for side in sides]
        if operator not in QUIET and sizes:
            plain = operator.replace("_", "")
            usual = (each for each in COLLECTIVES if plain.startswith(each.replace("_", "")))
            name = next(usual, operator.strip("_"))
            size = max(sizes) if name in ("all_gather", "reduce_scatter") else sizes[0]
            self.calls[name] += 1
            self.bytes[name] += size
            self.sizes.setdefault(name, []).append(size)


# -- the same operation in float64 -----------------------------------------------------------------

ROUNDINGS = 8.0
"""Roundings of the accumulator's type that an operation may make for each term's square root."""
LIKE_THE_HOST = 4.0
"""How many times as far from float64 as the host's own kernel of the same type."""
SUMS = (
    "mm bmm addmm baddbmm mv dot sum mean cumsum add addcmul lerp index_add scatter_add "
    "index_put embedding_dense_backward _foreach_add _foreach_addcmul _foreach_lerp"
)
"""Their largest terms are the same operation of absolute values; also in place."""
NOT_REPEATED = (
    "as_strided as_strided_ set_ resize_ _reshape_alias record_stream detach empty empty_like "
    "empty_strided new_empty new_empty_strided"
)
"""What they give depends on more than their inputs' values, or they compute nothing."""
ORDERS = "sort topk argmax argmin argsort max min mode median"
"""Their indices among equal values are free."""


class Replay(TorchDispatchMode):
    """Repeats what runs within it.

    Attributes:
        place: of the training, in words.
        found: the first operation that leaves the host, its place and why; empty if there is none.
        compared: operations that were repeated.
        unknown: names of those that the host cannot repeat in float64.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type, self.place = device_type, "here"
        self.found, self.compared = "", 0
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, then repeat it."""
        kwargs = kwargs or {}
        if self.found or not self._is_asked(func, args, kwargs):
            return func(*args, **kwargs)
        before = tree_map(_on_host, (args, kwargs))
        result = func(*args, **kwargs)
        try:
            written = _written_tensors(func, args, kwargs, result)
            self.found = describe_deviation(func, before, written, self.place)
            self.compared += 1
        except Exception:  # whatever the host has no kernel for, in float64
            self.unknown.add(func.overloadpacket.__name__)
        return result

    def _is_asked(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func.namespace != "aten" or func.overloadpacket.__name__ in NOT_REPEATED.split():
            return False
        tensors = _tensors((args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags or any(
            type(each) not in (Tensor, nn.Parameter) for each in tensors
        ):
            return False
        made = torch.device(kwargs.get("device") or HOST_DEVICE).type
        return self._device_type in {made, *(each.device.type for each in tensors)}


def describe_deviation(func: Any, before: Any, found: Sequence[Tensor], place: str) -> str:
    """An operation, its place and why, if a result is out of its bound; else nothing.

    Args:
        before: (args, kwargs) as they were, on the host.
        found: what the operation wrote to and returned, on the device.
    """
    name = func.overloadpacket.__name__
    inputs = _tensors(before)
    sums = name.removesuffix("_") in SUMS.split() and bool(inputs)
    exact = _rerun(func, before, _in_float64)
    moved = name in ("_to_copy", "copy_") or not any(t.is_floating_point() for t in inputs)
    host = exact if moved else _rerun(func, before, lambda leaf: leaf)
    sizes = _rerun(func, before, lambda leaf: _magnitude(_in_float64(leaf))) if sums else exact
    for got, wanted, own, size in zip(map(on_host, found), exact, host, sizes, strict=True):
        floating = got.is_floating_point()
        if not got.numel() or got.is_complex() or (name in ORDERS.split() and not floating):
            continue
        shape = " x ".join(map(str, max([*inputs[:1], wanted], key=Tensor.numel).shape))
        what = f"aten::{name} ({str(got.dtype).removeprefix('torch.')}, {shape or 'a number'})"
        terms = 1.0
        if sums:  # of a product, the rows of its second factor; of others, so many at most
            rows = inputs[-1].shape[-2] if name.endswith("mm") else inputs[-1].numel() ** 0.5
            terms = max(2.0, rows, inputs[0].numel() / wanted.numel())
        allowed = _bound(wanted, own, size, terms, got.dtype) if floating else torch.zeros(())
        try:
            compare(got, wanted if floating else wanted.to(got.dtype), allowed, what)
        except AssertionError as error:
            return f"{what}, {place}: {str(error).removeprefix(f'{what}: ')}"
    return ""


def _bound(exact: Tensor, host: Tensor, size: Tensor, terms: float, dtype: torch.dtype) -> Tensor:
    """How far rounding may take each element: two roundings of its type, those of a sum of so many
    terms of a size that is kept in float32 at least, ``8 sqrt(terms) 2^-24 size``, and four times
    what the host's kernel of the same type is away from float64."""
    size = torch.where(size.isfinite(), size, 0.0).abs()
    size = size if terms > 1 else size.max()
    off = torch.where(exact.isfinite() & host.isfinite(), host.double() - exact, 0.0).abs().max()
    kept = min(roundoff(torch.float32), roundoff(dtype))
    return (
        round_either_way(exact, dtype) + ROUNDINGS * terms**0.5 * kept * size + LIKE_THE_HOST * off
    )


def _rerun(func: Any, before: Any, change: Callable[[Any], Any]) -> list[Tensor]:
    """Run an operation on the host: the arguments that it wrote to, and what it returned."""
    copies = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, before)
    args, kwargs = tree_map(change, copies)
    if func.overloadpacket.__name__ in ("_softmax", "_log_softmax"):
        args = (*args[:2], False)  # a type of its own for the result: here both have one
    return _written_tensors(func, args, kwargs, func(*args, **kwargs))


def _written_tensors(func: Any, args: Any, kwargs: Any, result: Any) -> list[Tensor]:
    """The arguments that an operation writes to, and what it returned."""
    changed = [
        args[at] if at < len(args) else kwargs.get(argument.name)
        for at, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return _tensors([*changed, result])


def _on_host(leaf: Any) -> Any:
    """A value as it is now, on the host; other devices become the host."""
    if isinstance(leaf, Tensor):
        return leaf.detach().to(HOST_DEVICE, copy=True)
    return torch.device(HOST_DEVICE) if isinstance(leaf, torch.device) else leaf


def _in_float64(leaf: Any) -> Any:
    """A number, or the type of one, in float64; whole numbers stay."""
    if isinstance(leaf, Tensor):
        return leaf.double() if leaf.is_floating_point() else leaf
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf


def _magnitude(leaf: Any) -> Any:
    floating = leaf.is_floating_point() if isinstance(leaf, Tensor) else isinstance(leaf, float)
    return abs(leaf) if floating else leaf


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
