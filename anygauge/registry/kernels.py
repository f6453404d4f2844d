"""Which kernel serves each operation: asked for, preferred, default, or the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anygauge.interface import Backend, KernelSpec, NotAvailableError, UnknownNameError
from anygauge.registry.factories import why_missing
from anygauge.registry.plugins import Provided
from anygauge.registry.words import did_you_mean, listed

if TYPE_CHECKING:
    from anygauge.registry.registry import Duplicate

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
    kernels: Sequence[Provided[KernelSpec]],
    duplicates: Sequence[Duplicate],
    backend: Backend,
    requested: Mapping[str, str],
    *,
    packing: bool = False,
) -> dict[str, KernelChoice]:
    """Choose once for a run; imports no kernel.

    The order is: the kernel asked for (which must run), the backend's preferred, a default that
    serves the device (one made for it before one for all), the reference.

    Args:
        kernels: all that are installed.
        duplicates: names claimed twice, which are refused when asked for.
        backend: whose device type and preferences count.
        requested: operation -> name, from the run file.
        packing: whether rows are packed, for which a backend may prefer others.

    Returns:
        Operation -> choice, for every operation that a kernel, the backend or the user names.

    Raises:
        UnknownNameError: `requested` names an operation or kernel that does not exist.
        NotAvailableError: a requested kernel cannot run on this backend or machine.
    """
    claimed = {p.spec.operation for d in duplicates if d.kind == "kernel" for p in d.providers}
    preferred = {**backend.kernels, **(backend.packed_kernels if packing else {})}
    known = claimed | {p.spec.operation for p in kernels} | set(preferred)
    for operation in requested:
        if operation not in known:
            raise UnknownNameError(
                f"kernels: there is no operation {operation!r}"
                f"{did_you_mean(operation, known) or ';'} valid operations: {listed(known)}"
            )
    return {
        operation: _choose(
            operation,
            [p for p in kernels if p.spec.operation == operation],
            duplicates,
            backend,
            preferred.get(operation),
            requested.get(operation),
        )
        for operation in sorted(known)
    }


def _choose(
    operation: str,
    kernels: Sequence[Provided[KernelSpec]],
    duplicates: Sequence[Duplicate],
    backend: Backend,
    preferred: str | None,
    asked: str | None,
) -> KernelChoice:
    by_name = {p.spec.name: p for p in kernels}
    if asked is not None:
        return _asked(operation, by_name, duplicates, backend, asked)
    rejected: list[tuple[str, str]] = []
    if preferred is not None:
        reason = f"preferred by the {backend.name} backend"
        if preferred == REFERENCE:
            return _reference(operation, by_name, reason, [])
        problem = _problem(operation, by_name, duplicates, backend, preferred)
        if problem is None:
            return KernelChoice(
                operation=operation, name=preferred, reason=reason, provided=by_name[preferred]
            )
        rejected.append((preferred, f"{reason}, but {problem}"))
    # One made for this device knows it better than one made for all.
    defaults = sorted(
        (p for p in kernels if p.spec.default and p.spec.name not in (preferred, REFERENCE)),
        key=lambda p: (not p.spec.device_types, p.spec.name),
    )
    for provided in defaults:
        problem = _problem(operation, by_name, duplicates, backend, provided.spec.name)
        if problem is None:
            return KernelChoice(
                operation=operation,
                name=provided.spec.name,
                reason=f"default for {backend.device_type!r} devices",
                provided=provided,
                rejected=tuple(rejected),
            )
        rejected.append((provided.spec.name, problem))
    rejected += [
        (d.providers[0].spec.name, d.reason)
        for d in duplicates
        if d.kind == "kernel" and d.providers[0].spec.operation == operation
    ]
    reason = "no other kernel is preferred or default here"
    if operation == "attention" and REFERENCE not in by_name:
        reason = f"the model library's {backend.attention}: {backend.attention_why}"
    return _reference(operation, by_name, reason, rejected)


def _asked(
    operation: str,
    by_name: Mapping[str, Provided[KernelSpec]],
    duplicates: Sequence[Duplicate],
    backend: Backend,
    asked: str,
) -> KernelChoice:
    reason = "asked for by name"
    if asked == REFERENCE:
        return _reference(operation, by_name, reason, [])
    problem = _problem(operation, by_name, duplicates, backend, asked)
    if problem is None:
        return KernelChoice(operation=operation, name=asked, reason=reason, provided=by_name[asked])
    valid = {*by_name, REFERENCE}
    can_run = [n for n in valid if n == REFERENCE or not unfit(by_name[n].spec, backend)]
    if asked not in by_name:
        raise UnknownNameError(
            f"kernels: {operation}: {asked!r}: {problem}{did_you_mean(asked, valid) or ';'} "
            f"valid names: {listed(valid)}"
        )
    raise NotAvailableError(
        f"kernels: {operation}: {asked!r} ({by_name[asked].origin}) cannot run on the "
        f"{backend.name} backend: {problem}; those that can: {listed(can_run)}"
    )


def _problem(
    operation: str,
    by_name: Mapping[str, Provided[KernelSpec]],
    duplicates: Sequence[Duplicate],
    backend: Backend,
    name: str,
) -> str | None:
    """Why a kernel cannot serve, or None."""
    if name in by_name:
        return unfit(by_name[name].spec, backend)
    for duplicate in duplicates:
        if (duplicate.kind, duplicate.name) == ("kernel", f"{operation}/{name}"):
            return duplicate.reason
    return "no installed plugin provides it"


def unfit(spec: KernelSpec, backend: Backend) -> str | None:
    """Why a kernel cannot run on a backend here, or None."""
    if spec.device_types and backend.device_type not in spec.device_types:
        return f"it serves {listed(spec.device_types)} devices, not {backend.device_type!r}"
    return why_missing(spec.missing)


def _reference(
    operation: str,
    by_name: Mapping[str, Provided[KernelSpec]],
    reason: str,
    rejected: Sequence[tuple[str, str]],
) -> KernelChoice:
    return KernelChoice(
        operation=operation,
        name=REFERENCE,
        reason=reason,
        provided=by_name.get(REFERENCE),
        rejected=tuple(rejected),
    )
