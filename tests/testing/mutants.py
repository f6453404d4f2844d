"""Backends with one defect each: the kit must catch every one.

Installed by the tests as a distribution of its own; `ANYGAUGE_MUTATION` names the defect. The
backend without a defect is the host's processors under another name.
"""

from __future__ import annotations

import atexit
import functools
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anygauge.interface import (
    API_VERSION,
    Backend,
    BackendSpec,
    Finding,
    Graph,
    Job,
    KernelSpec,
    Level,
    Node,
    Phase,
    Probe,
    Scope,
    Setting,
    ShapePolicy,
    Support,
    hookimpl,
)

NAME = "mutant"
MUTATION = os.environ.get("ANYGAUGE_MUTATION", "none")


@functools.cache
def wrong() -> Any:
    """The mutant of `tests.testing.wrong`; None if this is one of this file."""
    # One of this file must not import the others, of which some import torch.
    own = f'"{MUTATION}"' in Path(__file__).read_text(encoding="utf-8")
    if own:
        return None
    from tests.testing.wrong import changed, mutant_named

    found = mutant_named(MUTATION)
    return None if found is None else changed(found)


def probe() -> Probe:
    if wrong() is None:
        return usual_probe()
    usual = wrong().usual_probe or usual_probe
    return usual() if wrong().probed is None else wrong().probed(usual)


def usual_probe() -> Probe:
    found = Probe(
        devices=Finding.not_needed("the host"),
        driver=Finding.not_needed("the host"),
        software=Finding.yes("the host"),
        device_count=4,
    )
    if MUTATION == "probe imports torch":
        import torch  # noqa: F401
    if MUTATION == "probe is slow":
        time.sleep(3)
    if MUTATION == "probe sets a variable":
        os.environ["MUTANT_WAS_HERE"] = "1"
    if MUTATION == "probe varies":
        return replace(found, notes=(str(random.random()),))
    if MUTATION == "probe raises":
        raise RuntimeError("no driver")
    if MUTATION == "finding without words":
        return replace(found, software=Finding.yes(""))
    return found


@hookimpl
def anygauge_provide_backends() -> Iterable[BackendSpec]:
    fields: dict[str, Any] = {
        "name": NAME,
        "factory": "anygauge_mutant:make",
        "probe": (lambda: probe()) if MUTATION == "spec does not pickle" else probe,
        "api_version": API_VERSION,
        "priority": -1000,
    }
    announced = {} if wrong() is None else wrong().announce()
    return [BackendSpec(**{**fields, **announced})]


if MUTATION == "a kernel is wrong":

    @hookimpl
    def anygauge_provide_kernels() -> Iterable[KernelSpec]:
        return [
            KernelSpec(
                operation="softmax",
                name="mutant",
                factory="anygauge_mutant:unnormalised",
                api_version=API_VERSION,
            )
        ]


def make(options: Mapping[str, Any] | None = None) -> Backend:
    if wrong() is not None:
        return wrong().backend(options)
    from anygauge_cpu.backend import CpuBackend, CpuCollectives
    from anygauge_cpu.placement import CpuPlacement

    if MUTATION == "aborts at its end":
        atexit.register(os.abort)

    class MutantGraph(Graph):
        if MUTATION == "padded beyond the maximum":
            shapes = type("Longer", (ShapePolicy,), {"padded_length": lambda s, a, m: m + 1})()
        if MUTATION.startswith("mark_step") and MUTATION.endswith("but is declared"):
            accumulates = True
        if MUTATION == "mark_step does nothing but is declared":

            def mark_step(self, phase: Phase) -> None:
                pass

        if MUTATION == "mark_step works but is declared missing":
            marks = 0

            def mark_step(self, phase: Phase) -> None:
                self.marks += 1

            def counters(self) -> Mapping[str, float]:
                return {"graphs": float(self.marks)}

        if MUTATION == "the graph limit is ignored":
            limit = 20

            def counters(self) -> Mapping[str, float]:
                return {"graphs": 0.0}

        if MUTATION == "mark_step changes nothing but is declared":
            pass
        if MUTATION == "mark_step fails after backward":

            def mark_step(self, phase: Phase) -> None:
                if phase is Phase.BACKWARD:
                    raise RuntimeError("no graph")

    class MutantPlacement(CpuPlacement):
        def open(self, local_rank: int) -> Any:
            device = super().open(local_rank)
            if MUTATION == "every rank opens the same device":
                self._device = type(device)(device.type, 0)
            return self.device

        def memory(self) -> Any:
            stats = super().memory()
            if MUTATION == "memory never moves":
                return replace(stats, in_use=2**30, peak=2**30)
            if MUTATION == "peak is only now":
                return replace(stats, peak=stats.in_use)
            if MUTATION == "memory of no known kind":
                return replace(stats, kind="some")
            return stats

        def reset_peak(self) -> None:
            if MUTATION != "peak cannot be reset":
                super().reset_peak()

        def seed(self, seed: int) -> None:
            super().seed(0 if MUTATION == "seed is ignored" else seed)

        def set_rng_state(self, state: Any) -> None:
            if MUTATION != "random state is not restored":
                super().set_rng_state(state)

        def autocast(self, dtype: Any) -> Any:
            import contextlib

            if MUTATION == "autocast is ignored":
                return contextlib.nullcontext()
            return super().autocast(dtype)

        def to_device(self, batch: Any) -> Any:
            if MUTATION == "nested tensors stay behind" and isinstance(batch, Mapping):
                return {
                    k: v if isinstance(v, Mapping) else self.to_device(v)
                    for k, v in batch.items()
                    if k != "name"
                }
            if MUTATION == "integers become floats" and hasattr(batch, "float"):
                return super().to_device(batch).float()
            return super().to_device(batch)

        def is_out_of_memory(self, error: BaseException) -> bool:
            return MUTATION == "every error is out of memory" or super().is_out_of_memory(error)

        def close(self) -> None:
            if MUTATION != "close leaves it open":
                super().close()

    class MutantCollectives(CpuCollectives):
        def all_reduce(self, tensor: Any, op: str = "sum", group: Any = None) -> Any:
            if MUTATION == "mean sums" and op == "mean":
                op = "sum"
            if MUTATION == "max sums" and op == "max":
                op = "sum"
            if MUTATION == "all_reduce is not in place":
                return super().all_reduce(tensor.clone(), op, group)
            return super().all_reduce(tensor, op, group)

        def broadcast(self, tensor: Any, source: int = 0) -> Any:
            return super().broadcast(
                tensor, 0 if MUTATION == "always broadcasts rank 0" else source
            )

        def all_gather(self, tensor: Any) -> Any:
            parts = super().all_gather(tensor)
            return parts[::-1] if MUTATION == "gathers backwards" else parts

        def barrier(self) -> None:
            if MUTATION != "barrier does nothing":
                super().barrier()

        def sum_on_host(self, values: list[float]) -> list[float]:
            if MUTATION == "host sums lose digits":
                import torch

                tensor = torch.tensor(values, dtype=torch.float32)
                return self.all_reduce(tensor, group=self.control_group).tolist()  # type: ignore[no-any-return]
            return super().sum_on_host(values)

    class Mutant(CpuBackend):
        name = "other" if MUTATION == "another name" else NAME
        graph_class = MutantGraph
        placement_class = MutantPlacement
        collectives_class = MutantCollectives
        capabilities = _capabilities(CpuBackend.capabilities)
        if MUTATION == "an engine is refused without a reason":
            unsupported_engines = {"deepspeed": ""}

        def __init__(self, options: Mapping[str, Any] | None = None) -> None:
            if MUTATION == "takes any option":
                options = {}
            super().__init__(options)
            if MUTATION == "opens when it is made":
                self.placement.open(0)

        def close(self) -> None:
            super().close()
            if MUTATION == "close raises":
                raise RuntimeError("the driver is gone")

        def diagnostics(self) -> Sequence[Any]:
            return ()  # the processors' own import torch, which takes seconds

        def environment(
            self, job: Job, node: Node, local_rank: int | None = None
        ) -> Sequence[Setting]:
            found = list(super().environment(job, node, local_rank))
            change: Callable[[], list[Setting]] = _ENVIRONMENTS.get(MUTATION, lambda: [])
            return found + change()

    return Mutant(options)


def unnormalised() -> Callable[..., Any]:
    """The factory of a softmax that forgets to divide."""

    def softmax(x: Any, dim: int) -> Any:
        return (x - x.amax(dim, keepdim=True)).exp()

    return softmax


def _capabilities(found: Mapping[str, Support]) -> Mapping[str, Support]:
    if MUTATION == "collectives work but are declared missing":
        return {**found, "collectives": Support(Level.NOT_WRITTEN_YET, "so it says")}
    if MUTATION == "float16 works but is declared missing":
        return {**found, "float16": Support(Level.UNSUPPORTED_BY_HARDWARE, "so it says")}
    if MUTATION == "a capability that nobody asks about":
        return {**found, "zero": Support(Level.FULL)}
    if MUTATION == "opening settles nothing":
        return {**found, "float16": Support(Level.DEPENDS, "so it says")}
    return found


def _setting(**changes: Any) -> list[Setting]:
    fields: dict[str, Any] = {
        "name": "MUTANT_LEVEL",
        "value": "1",
        "reason": "a reason",
        "source": "a page",
    }
    return [Setting(**{**fields, **changes})]


def _changing() -> list[Setting]:
    os.environ["MUTANT_WAS_HERE"] = "1"
    return []


_ENVIRONMENTS: dict[str, Callable[[], list[Setting]]] = {
    "environment varies": lambda: _setting(value=str(random.random())),
    "environment sets variables itself": _changing,
    "a value that is not a text": lambda: _setting(value=1),
    "a setting without a reason": lambda: _setting(reason=""),
    "a rank's value without a rank": lambda: _setting(scope=Scope.RANK),
}
