"""Choosing a backend: a named one never falls back, and ``auto`` gives its reasons."""

from __future__ import annotations

from dataclasses import dataclass

from anygauge.interface import BackendSpec, NotAvailableError, Probe
from anygauge.registry.load_plugins import AUTO, Provided
from anygauge.registry.registry import Registry
from anygauge.registry.specs import guarded_probe
from anygauge.util.text import join_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The backend that a run uses, and why not the others.

    Attributes:
        probe: what it found on this machine.
        rejected: (name, reason) of each backend, and of each absent plugin, not chosen.
        reason: why this one was chosen.
    """

    provided: Provided[BackendSpec]
    probe: Probe
    rejected: tuple[tuple[str, str], ...]
    reason: str

    @property
    def spec(self) -> BackendSpec:
        """The backend's."""
        return self.provided.spec


def select_backend(registry: Registry, name: str, *, need_device: bool = True) -> Selection:
    """Choose a backend by name, or the best of this machine for ``auto``.

    Args:
        need_device: whether ranks will be started here. Without it a named backend need not be
            available, and ``auto`` takes the devices that were seen even where they cannot be
            used yet.

    Raises:
        PluginError: there is no single backend of this name.
        NotAvailableError: it cannot run here; or ``auto`` finds none, or finds devices that no
            backend can use and would otherwise leave them idle without a word.
    """
    if name == AUTO:
        return _select_auto(registry, need_device=need_device)
    provided = registry.find_backend(name)
    probe = guarded_probe(provided)
    if need_device and not probe.available:
        others = [other for other, p in registry.probe_all().items() if p.available]
        raise NotAvailableError(
            f"backend {name!r} ({provided.origin}) cannot run on this machine:\n"
            f"{_describe_findings(probe)}\n"
            "Supply what is missing, run on a machine that has it, or choose another backend: "
            f"available here: {join_names(others)}."
        )
    others = [p.spec.name for p in registry.backends if p is not provided]
    return Selection(
        provided=provided,
        probe=probe,
        rejected=tuple((other, f"backend {name!r} was asked for by name") for other in others),
        reason="asked for by name",
    )


def _select_auto(registry: Registry, *, need_device: bool) -> Selection:
    """Take the highest priority that is available; see `select_backend`.

    One of priority 0 or below is not taken where devices were seen whose backend cannot run.
    """
    ranked = sorted(registry.backends, key=lambda p: (-p.spec.priority, p.spec.name))
    probes = {p.spec.name: guarded_probe(p) for p in ranked}
    chosen = next((p for p in ranked if probes[p.spec.name].available), None)
    idle = [
        p for p in ranked if probes[p.spec.name].has_hardware and not probes[p.spec.name].available
    ]
    doubled = [d for d in registry.duplicates if d.kind == "backend"]
    absent = [
        (p.entry_point or p.distribution, f"could not be probed: the plugin of {p.origin} {why}")
        for p, why in registry.absent_plugins()
    ]
    reason = "highest priority of those available"
    if chosen is None or chosen.spec.priority <= 0:
        seen = [_cannot_run(p, probes[p.spec.name], probes[p.spec.name].reason) for p in idle]
        for duplicate in doubled:
            claims = [(p, guarded_probe(p)) for p in duplicate.providers]
            seen += [_cannot_run(p, q, duplicate.reason) for p, q in claims if q.has_hardware]
        if idle and not need_device:
            chosen = idle[0]
            reason = "its devices are on this machine; they cannot be used yet, nor need they"
        elif seen:
            raise NotAvailableError(_refusal_text(seen, chosen, idle))
    if chosen is None:
        reasons = [*((p.spec.name, probes[p.spec.name].reason) for p in ranked), *absent]
        if not reasons:
            raise NotAvailableError(
                "no backend is installed: no distribution here has a plugin that provides one"
            )
        lines = "\n".join(f"  {name}: {why}" for name, why in reasons)
        raise NotAvailableError(f"no backend is available on this machine:\n{lines}")
    return Selection(
        provided=chosen,
        probe=probes[chosen.spec.name],
        rejected=(
            *((p.spec.name, _why_not(p, chosen, probes)) for p in ranked if p is not chosen),
            *((d.name, d.reason) for d in doubled),
            *absent,
        ),
        reason=reason,
    )


def _why_not(
    other: Provided[BackendSpec], chosen: Provided[BackendSpec], probes: dict[str, Probe]
) -> str:
    probe = probes[other.spec.name]
    if not probe.available:
        return probe.reason
    if not probes[chosen.spec.name].available:
        return f"{chosen.spec.name!r} has devices on this machine, which come first"
    if other.spec.priority == chosen.spec.priority:
        return f"same priority as {chosen.spec.name!r}, whose name comes first"
    return (
        f"available, but its priority {other.spec.priority} is below the "
        f"{chosen.spec.priority} of {chosen.spec.name!r}"
    )


def _describe_findings(probe: Probe) -> str:
    lines = []
    for question, finding in probe.questions:
        looked = f" (looked at {', '.join(finding.looked_at)})" if finding.looked_at else ""
        lines.append(f"  {question}: {finding.presence}: {finding.detail}{looked}")
    return "\n".join(lines)


def _cannot_run(provided: Provided[BackendSpec], probe: Probe, why: str) -> str:
    return (
        f"  {provided.spec.name} ({provided.origin}): {probe.devices.detail}\n    cannot run: {why}"
    )


def _refusal_text(
    seen: list[str], chosen: Provided[BackendSpec] | None, idle: list[Provided[BackendSpec]]
) -> str:
    advice = "Fix that"
    if chosen is not None:
        advice += (
            f", or ask for the slower one on purpose with --backend {chosen.spec.name} "
            f"(run file: backend: {chosen.spec.name})"
        )
    elif idle:
        advice += f", then name it: --backend {idle[0].spec.name}"
    return (
        "this machine has devices that no backend can use as it stands, and `auto` does not "
        "leave them idle unless you ask for it:\n" + "\n".join(seen) + f"\n{advice}."
    )
