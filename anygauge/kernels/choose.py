"""Chooses each operation's kernel: the run's, preferred, default, or reference; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anygauge.config.schema import RunFile
from anygauge.interface import (
    Backend,
    KernelSpec,
    NotAvailableError,
    PluginError,
    StrategySpec,
    UnknownNameError,
    UnsupportedError,
)
from anygauge.registry import Provided, Registry
from anygauge.registry.specs import load_factory, why_missing
from anygauge.util.text import did_you_mean, join_names

ATTENTION = "attention"
NORM = "rms_norm"
ROPE = "rope"
LORA = "lora_linear"
LOSS = "linear_cross_entropy"
ADAMW = "adamw"
CLIP = "clip_grad_norm"
CALLED = (ATTENTION, NORM, ROPE, LORA, LOSS, ADAMW, CLIP)
"""What a run calls itself; all else is called by the kernels that use it."""
REFERENCE = "reference"
"""The plain implementation of every operation; it runs on all devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelChoice:
    """The kernel of one operation.

    Attributes:
        reason: why this one.
        provided: where it comes from; None for a reference that no plugin provides.
        rejected: (name, reason) of those that come before it and cannot run.
    """

    operation: str
    name: str
    reason: str
    provided: Provided[KernelSpec] | None = None
    rejected: tuple[tuple[str, str], ...] = ()

    def record(self) -> dict[str, Any]:
        """For the run's record: plain values only."""
        return {
            "operation": self.operation,
            "name": self.name,
            "reason": self.reason,
            "distribution": self.provided.distribution if self.provided else None,
            "version": self.provided.version if self.provided else None,
            "rejected": [list(pair) for pair in self.rejected],
        }


def choose_kernels(
    registry: Registry, backend: Backend, requested: Mapping[str, str], *, packing: bool = False
) -> dict[str, KernelChoice]:
    """Choose for a backend, whatever the run calls of it; imports no kernel.

    The order is: the kernel asked for (which must run), the backend's preferred, a default that
    serves the device (one made for it before one for all), the reference.

    Args:
        requested: operation -> name, from the run file.
        packing: whether rows are packed, for which a backend may prefer others.

    Returns:
        Operation -> choice, for every operation that a kernel, the backend or the user names.

    Raises:
        UnknownNameError: `requested` names an operation or kernel that does not exist.
        NotAvailableError: a requested kernel cannot run on this backend or machine.
    """
    claimed = {d.name.partition("/")[0] for d in registry.duplicates if d.kind == "kernel"}
    preferred = {**backend.kernels, **(backend.packed_kernels if packing else {})}
    known = claimed | {p.spec.operation for p in registry.kernels} | set(preferred)
    for operation in requested:
        if operation not in known:
            raise UnknownNameError(
                f"kernels: there is no operation {operation!r}"
                f"{did_you_mean(operation, known) or ';'} valid operations: {join_names(known)}"
            )
    return {
        operation: _choose_kernel(
            operation, registry, backend, preferred.get(operation), requested.get(operation)
        )
        for operation in sorted(known)
    }


def _choose_kernel(
    operation: str, registry: Registry, backend: Backend, preferred: str | None, asked: str | None
) -> KernelChoice:
    by_name = {p.spec.name: p for p in registry.kernels if p.spec.operation == operation}
    doubled = {
        d.providers[0].spec.name: d.reason
        for d in registry.duplicates
        if d.kind == "kernel" and d.name.startswith(f"{operation}/")
    }

    def problem(name: str) -> str | None:
        if name == REFERENCE:
            return None
        if name in by_name:
            return why_unfit(by_name[name].spec, backend)
        return doubled.get(name, "no installed plugin provides it")

    candidates: list[tuple[str, str]] = []
    if asked is not None:
        why_not = problem(asked)
        valid = {*by_name, REFERENCE}
        if why_not is not None and asked not in by_name:
            raise UnknownNameError(
                f"kernels: {operation}: {asked!r}: {why_not}{did_you_mean(asked, valid) or ';'} "
                f"valid names: {join_names(valid)}"
            )
        if why_not is not None:
            raise NotAvailableError(
                f"kernels: {operation}: {asked!r} ({by_name[asked].origin}) cannot run on the "
                f"{backend.name} backend: {why_not}; "
                f"those that can: {join_names(name for name in valid if not problem(name))}"
            )
        candidates.append((asked, "asked for by name"))
    if preferred is not None:
        candidates.append((preferred, f"preferred by the {backend.name} backend"))
    # One made for this device knows it better than one made for all.
    for provided in sorted(by_name.values(), key=lambda p: (not p.spec.device_types, p.spec.name)):
        spec = provided.spec
        if spec.default and spec.name not in (preferred, REFERENCE) and serves(spec, backend):
            candidates.append((spec.name, f"default for {backend.device_type!r} devices"))
    rejected: list[tuple[str, str]] = []
    for name, reason in candidates:
        why_not = problem(name)
        if why_not is None:
            break
        rejected.append((name, f"{reason}, but {why_not}"))
    else:
        rejected += doubled.items()
        name, reason = REFERENCE, "no other kernel is preferred or default here"
        if operation == ATTENTION and REFERENCE not in by_name:
            reason = f"the model library's {backend.attention}: {backend.attention_why}"
    return KernelChoice(
        operation=operation,
        name=name,
        reason=reason,
        provided=by_name.get(name),
        rejected=tuple(rejected),
    )


def serves(spec: KernelSpec, backend: Backend) -> bool:
    """Whether a kernel is meant for a backend's device."""
    return not spec.device_types or backend.device_type in spec.device_types


def why_unfit(spec: KernelSpec, backend: Backend) -> str | None:
    """Why a kernel cannot run on a backend here, or None."""
    if not serves(spec, backend):
        return f"it serves {join_names(spec.device_types)} devices, not {backend.device_type!r}"
    return why_missing(spec.missing)


def kernels_of_run(run: RunFile, backend: Backend, registry: Registry) -> dict[str, KernelChoice]:
    """The kernel of each operation that the run calls, itself or through another kernel.

    Raises:
        UnsupportedError: the run file asks for one that nothing would call, or for two attentions.
        UnknownNameError, NotAvailableError: see `choose_kernels`.
    """
    strategy = registry.find_strategy(run.strategy.name).spec
    named = run.model.attention
    if named != "auto" and ATTENTION in run.kernels:
        raise UnsupportedError(
            f"model.attention is {named!r} and kernels.attention is "
            f"{run.kernels[ATTENTION]!r}: one of them must be left out"
        )
    chosen = choose_kernels(registry, backend, run.kernels, packing=run.data.isolates)
    if named != "auto":
        chosen.pop(ATTENTION, None)
    for operation in (ADAMW, CLIP, LORA):
        unused = _why_unused(run, strategy, operation) if operation in chosen else ""
        if unused and run.kernels.get(operation, REFERENCE) != REFERENCE:
            raise UnsupportedError(
                f"kernels.{operation}: {run.kernels[operation]!r} would never be called: {unused}. "
                "Leave it out"
            )
        if unused:
            chosen[operation] = KernelChoice(operation=operation, name=REFERENCE, reason=unused)
    providers = (chosen[op].provided for op in CALLED if op in chosen)
    called = set(CALLED).union(*(provided.spec.uses for provided in providers if provided))
    for operation in sorted(run.kernels.keys() - called):
        around = kernels_using(registry, operation)
        raise UnsupportedError(
            f"kernels.{operation}: {run.kernels[operation]!r} would never be called: no kernel of "
            f"this run uses {operation}. Leave it out"
            + (f", or ask for one that does ({around})" if around else "")
        )
    return {operation: choice for operation, choice in chosen.items() if operation in called}


def kernels_using(registry: Registry, operation: str) -> str:
    """The kernels that are made with one of an operation, as a run file asks for them."""
    found = (p.spec for p in registry.kernels if operation in p.spec.uses)
    return ", ".join(sorted(f"kernels.{spec.operation}: {spec.name}" for spec in found))


def _why_unused(run: RunFile, strategy: StrategySpec, operation: str) -> str:
    """Why a run would not call an operation; empty if it does."""
    if operation == LORA:
        return "" if run.adapter is not None else "there is no adapter"
    if why := strategy.unused_kernels(run.strategy).get(operation):
        return why
    if operation == ADAMW:
        return run.why_no_adamw_kernel
    return "" if run.train.max_grad_norm else "train.max_grad_norm is 0"


def load_kernel(choices: Mapping[str, KernelChoice], operation: str) -> Any:
    """The kernel of an operation, from its factory, made with those that it uses.

    Returns:
        None for an operation that nobody names, and for a reference that no plugin provides.

    Raises:
        PluginError: the factory is broken, or uses an operation that has no kernel.
    """
    choice = choices.get(operation)
    if choice is None or choice.provided is None:
        return None
    used = {name: load_kernel(choices, name) for name in choice.provided.spec.uses}
    for name, kernel in used.items():
        if kernel is None:
            raise PluginError(
                f"kernel {choice.name!r} of {choice.provided.origin} is made with {name!r}, "
                "which no plugin provides here; install one, or ask for another "
                f"{operation} (kernels.{operation})"
            )
    return load_factory(choice.provided)(**used)
