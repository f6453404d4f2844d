"""The registry: every plugin found, by kind and name, with doubles refused and failures kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anygauge.interface import (
    Backend,
    BackendSpec,
    KernelSpec,
    Launcher,
    LauncherSpec,
    PluginError,
    Probe,
    Tracker,
    TrackerSpec,
    UnknownNameError,
)
from anygauge.registry.factories import load_factory, make_backend, refuse_if_missing
from anygauge.registry.kernels import KernelChoice, choose_kernels
from anygauge.registry.plugins import (
    AUTO,
    BLOCK_VARIABLE,
    BlockedPlugin,
    Discovery,
    LoadedPlugin,
    PluginFailure,
    Provided,
    SpecT,
    discover,
)
from anygauge.registry.selection import Selection, guarded_probe, select_auto, select_named
from anygauge.registry.words import did_you_mean, listed, plugin_words


@dataclass(frozen=True, kw_only=True, slots=True)
class Duplicate:
    """One name that several plugins claim; none of them gets it.

    Attributes:
        kind: ``backend``, ``kernel``, ``launcher`` or ``tracker``.
        name: the name; for a kernel, ``operation/name``.
    """

    kind: str
    name: str
    providers: tuple[Provided[Any], ...]

    @property
    def reason(self) -> str:
        """Who claims the name, and what to do."""
        claims = " and ".join(f"{p.origin} (plugin {p.entry_point!r})" for p in self.providers)
        return (
            f"{self.kind} {self.name!r} is provided by {claims}; uninstall all but one, or name "
            f"the plugins to skip in {BLOCK_VARIABLE}"
        )


class Registry:
    """What the plugins of this machine provide. Holding one imports no backend and no torch.

    Attributes:
        backends, kernels, launchers, trackers: in a stable order; names claimed twice are left
            out and stand in `duplicates`.
        failures: plugins that could not be loaded.
        blocked: plugins that the user has blocked.
        unmatched_blocks: names that the user has blocked and no plugin bears.
        plugins: those that were loaded.
    """

    def __init__(self, discovery: Discovery) -> None:
        self.plugins: tuple[LoadedPlugin, ...] = discovery.plugins
        self.failures: tuple[PluginFailure, ...] = discovery.failures
        self.blocked: tuple[BlockedPlugin, ...] = discovery.blocked
        self.unmatched_blocks: tuple[str, ...] = discovery.unmatched_blocks
        self._duplicates: list[Duplicate] = []
        self.backends: Sequence[Provided[BackendSpec]] = self._unique(BackendSpec, "backend")
        self.kernels: Sequence[Provided[KernelSpec]] = self._unique(KernelSpec, "kernel")
        self.launchers: Sequence[Provided[LauncherSpec]] = self._unique(LauncherSpec, "launcher")
        self.trackers: Sequence[Provided[TrackerSpec]] = self._unique(TrackerSpec, "tracker")

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Registry:
        """Find and load all installed plugins; a broken one is recorded in `failures`.

        Args:
            environ: where `BLOCK_VARIABLE` is read; the process's own where left out.
        """
        return cls(discover(os.environ if environ is None else environ))

    @property
    def duplicates(self) -> tuple[Duplicate, ...]:
        """Names that several plugins claim."""
        return tuple(self._duplicates)

    # -- backends ----------------------------------------------------------------------------

    def find_backend(self, name: str) -> Provided[BackendSpec]:
        """The backend of a name.

        Raises:
            UnknownNameError: no plugin provides one.
            PluginError: more than one does.
        """
        return self._find("backend", name, self.backends)

    def probe(self, name: str) -> Probe:
        """What a backend finds on this machine; a probe that raises counts as unavailable.

        Raises:
            PluginError: there is no single backend of this name.
        """
        return guarded_probe(self.find_backend(name))

    def probe_all(self) -> dict[str, Probe]:
        """Every backend's findings, by name."""
        return {provided.spec.name: guarded_probe(provided) for provided in self.backends}

    def select_backend(self, name: str, *, need_device: bool = True) -> Selection:
        """Choose a backend by name, or the best of this machine for ``auto``.

        Args:
            need_device: whether ranks will be started here. Without it a named backend need not
                be available, and ``auto`` takes the devices that were seen even where they
                cannot be used yet.

        Raises:
            PluginError: there is no single backend of this name.
            NotAvailableError: it cannot run here; or ``auto`` finds none, or finds devices that
                no backend can use and would otherwise leave them idle without a word.
        """
        if name == AUTO:
            return select_auto(self, need_device=need_device)
        return select_named(self, self.find_backend(name), need_device=need_device)

    def create_backend(
        self, selection: Selection | str, options: Mapping[str, Any] | None = None
    ) -> Backend:
        """Import and construct a backend, without opening a device.

        Args:
            selection: what `select_backend` returned, or a name (which is not probed then,
                except for ``auto``).
            options: the run file's ``backend_options``.

        Raises:
            PluginError: its factory cannot be imported, or gives no such backend.
        """
        if selection == AUTO:
            selection = self.select_backend(AUTO)
        name = selection if isinstance(selection, str) else selection.spec.name
        return make_backend(self.find_backend(name), options)

    # -- launchers, trackers, kernels ----------------------------------------------------------

    def find_launcher(self, name: str) -> Provided[LauncherSpec]:
        """Raises: PluginError: no plugin, or more than one, provides a launcher of this name."""
        return self._find("launcher", name, self.launchers)

    def launcher(self, name: str) -> Callable[..., Launcher]:
        """Import a launcher's factory; it is called without arguments.

        Raises:
            PluginError: there is no single launcher of this name, or it cannot be imported.
        """
        return load_factory(self.find_launcher(name), "launcher")

    def find_tracker(self, name: str) -> Provided[TrackerSpec]:
        """Raises: PluginError: no plugin, or more than one, provides a tracker of this name."""
        return self._find("tracker", name, self.trackers)

    def tracker(self, name: str) -> Callable[..., Tracker]:
        """Import a tracker's factory; it is called with a `TrackerContext`.

        Raises:
            PluginError: there is no single tracker of this name, or it cannot be imported.
            NotAvailableError: it says that something is missing here.
        """
        provided = self.find_tracker(name)
        refuse_if_missing(provided, "tracker")
        return load_factory(provided, "tracker")

    def resolve_kernels(
        self, backend: Backend, requested: Mapping[str, str], *, packing: bool = False
    ) -> dict[str, KernelChoice]:
        """Which kernel serves each operation on a backend; see `choose_kernels`.

        Raises:
            PluginError: `requested` names an operation or kernel that does not exist.
            NotAvailableError: a requested kernel cannot run on this backend or machine.
        """
        return choose_kernels(self.kernels, self.duplicates, backend, requested, packing=packing)

    def load_kernel(self, choices: Mapping[str, KernelChoice], operation: str) -> Any:
        """The kernel of an operation, from its factory, made with those that it uses.

        Args:
            choices: of the run; see `resolve_kernels`.

        Returns:
            None for an operation that nobody names, and for a reference that no plugin provides.

        Raises:
            PluginError: the factory is broken, or uses an operation that has no kernel.
        """
        choice = choices.get(operation)
        if choice is None or choice.provided is None:
            return None
        used = {name: self.load_kernel(choices, name) for name in choice.provided.spec.uses}
        for name, kernel in used.items():
            if kernel is None:
                raise PluginError(
                    f"kernel {choice.name!r} of {choice.provided.origin} is made with {name!r}, "
                    "which no plugin provides here; install one, or ask for another "
                    f"{operation} (kernels.{operation})"
                )
        return load_factory(choice.provided, "kernel")(**used)

    # -- by name -------------------------------------------------------------------------------

    def _unique(self, kind: type[SpecT], title: str) -> tuple[Provided[SpecT], ...]:
        """All specs of a kind whose name is claimed once; records the others."""
        claims: dict[str, list[Provided[SpecT]]] = {}
        for plugin in self.plugins:
            for provided in plugin.provided:
                if isinstance(provided.spec, kind):
                    claims.setdefault(_key(provided.spec), []).append(provided)
        for name, providers in claims.items():
            if len(providers) > 1:
                self._duplicates.append(
                    Duplicate(kind=title, name=name, providers=tuple(providers))
                )
        return tuple(claimed[0] for claimed in claims.values() if len(claimed) == 1)

    def _find(self, kind: str, name: str, everything: Sequence[Provided[SpecT]]) -> Provided[SpecT]:
        for provided in everything:
            if provided.spec.name == name:
                return provided
        for duplicate in self.duplicates:
            if (duplicate.kind, duplicate.name) == (kind, name):
                raise PluginError(duplicate.reason)
        valid = [provided.spec.name for provided in everything]
        if kind == "backend":
            valid.append(AUTO)
        message = (
            f"there is no {kind} named {name!r}{did_you_mean(name, valid) or ';'} "
            f"valid names: {listed(valid)}"
        )
        lines = self._backend_lines() if kind == "backend" else []
        raise UnknownNameError("\n".join([message, *lines, *self._absent_plugins(name)]))

    def _backend_lines(self) -> list[str]:
        """Each backend: what it drives, and whether it can run here."""
        here = {name: probe.available for name, probe in self.probe_all().items()}
        lines = [f"  {AUTO}: the best that is available on this machine"]
        for provided in sorted(self.backends, key=lambda p: p.spec.name):
            drives = provided.spec.drives or f"the devices of {provided.distribution}"
            state = "available here" if here[provided.spec.name] else "not available here"
            lines.append(f"  {provided.spec.name}: {drives}; {state}")
        return [*lines, "`anygauge backends` says why one is not available"]

    def _absent_plugins(self, name: str) -> list[str]:
        """What is known of plugins that might have provided a missing name."""
        lines = []
        for failure in self.failures:
            origin = plugin_words(failure.distribution, failure.version)
            if name in (failure.entry_point, failure.distribution):
                lines.append(f"the plugin {name!r} of {origin} failed to load: {failure.reason}")
            else:
                lines.append(
                    f"the plugin {failure.entry_point!r} of {origin} failed to load and may have "
                    "provided it; `anygauge backends` shows why"
                )
        for skipped in self.blocked:
            if name in (skipped.entry_point, skipped.distribution):
                origin = plugin_words(skipped.distribution, skipped.version)
                lines.append(f"the plugin {name!r} of {origin} is blocked by {BLOCK_VARIABLE}")
        return lines


def _key(spec: Any) -> str:
    """What must be unique: the name, within the operation for kernels."""
    return f"{spec.operation}/{spec.name}" if isinstance(spec, KernelSpec) else str(spec.name)
