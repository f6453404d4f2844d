"""The registry: every plugin found, by kind and name, with doubles refused and failures kept."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from anygauge.interface import (
    AnygaugeError,
    Backend,
    BackendSpec,
    KernelSpec,
    Launcher,
    LauncherSpec,
    ObjectiveSpec,
    OptimizerSpec,
    PluginError,
    Probe,
    StrategySpec,
    Support,
    TrackerSpec,
    UnknownNameError,
    installed_version,
)
from anygauge.registry.load_plugins import (
    AUTO,
    BLOCK_VARIABLE,
    KINDS,
    BlockedPlugin,
    Duplicate,
    LoadedPlugin,
    Plugin,
    PluginFailure,
    Provided,
    SpecT,
)
from anygauge.registry.loading import entry_points, load_plugin, normal_name
from anygauge.registry.specs import guarded_probe, load_factory, read_options
from anygauge.util.text import describe, did_you_mean, join_names


def missing_of(spec: StrategySpec) -> str:
    """The packages of a strategy that this machine lacks, and what installs them; or nothing."""
    names = [name for name in spec.distributions if installed_version(name) is None]
    if not names:
        return ""
    command = spec.install or f"pip install {' '.join(names)}"
    return f"{' and '.join(names)}, which this machine lacks: {command}"


class Registry:
    """What the plugins of this machine provide. Holding one imports no backend and no torch.

    Attributes:
        backends, kernels, launchers, objectives, optimizers, strategies, trackers: in a stable
            order; names
            claimed twice are left out.
        duplicates: names that several plugins claim.
        failures: plugins that could not be loaded.
        blocked: plugins that the user has blocked.
        unmatched_blocks: names that the user has blocked and no plugin bears.
        plugins: those that were loaded.
    """

    def __init__(
        self,
        plugins: Sequence[LoadedPlugin] = (),
        failures: Sequence[PluginFailure] = (),
        blocked: Sequence[BlockedPlugin] = (),
        unmatched_blocks: Sequence[str] = (),
    ) -> None:
        self.plugins, self.failures = plugins, failures
        self.blocked, self.unmatched_blocks = blocked, unmatched_blocks
        claims: dict[tuple[str, str], list[Provided[Any]]] = {}
        for provided in (one for plugin in plugins for one in plugin.provided):
            spec = provided.spec
            within = f"{spec.operation}/" if isinstance(spec, KernelSpec) else ""
            claims.setdefault((provided.kind, within + spec.name), []).append(provided)
        self.duplicates = tuple(
            Duplicate(kind=kind, name=name, providers=tuple(providers))
            for (kind, name), providers in claims.items()
            if len(providers) > 1
        )
        unique = {kind: list[Provided[Any]]() for kind, _ in KINDS.values()}
        for (kind, _), providers in claims.items():
            unique[kind] += providers if len(providers) == 1 else ()
        self.backends: Sequence[Provided[BackendSpec]] = unique["backend"]
        self.kernels: Sequence[Provided[KernelSpec]] = unique["kernel"]
        self.launchers: Sequence[Provided[LauncherSpec]] = unique["launcher"]
        self.objectives: Sequence[Provided[ObjectiveSpec]] = unique["objective"]
        self.optimizers: Sequence[Provided[OptimizerSpec]] = unique["optimizer"]
        self.strategies: Sequence[Provided[StrategySpec]] = unique["strategy"]
        self.trackers: Sequence[Provided[TrackerSpec]] = unique["tracker"]

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Registry:
        """Find and load all installed plugins; a broken one is recorded in `failures`.

        Args:
            environ: where `BLOCK_VARIABLE` is read; the process's own where left out.
        """
        listed = (os.environ if environ is None else environ).get(BLOCK_VARIABLE, "").split(",")
        blocks = {normal_name(name.strip()): name.strip() for name in listed if name.strip()}
        plugins: list[LoadedPlugin] = []
        failures: list[PluginFailure] = []
        blocked: list[BlockedPlugin] = []
        matched: set[str] = set()
        for found, module in entry_points(failures):
            hits = blocks.keys() & {normal_name(found.entry_point), normal_name(found.distribution)}
            if hits:
                matched |= hits
                blocked.append(BlockedPlugin(**asdict(found), blocked_by=blocks[min(hits)]))
                continue
            try:
                plugins.append(load_plugin(found, module))
            # SystemExit too: a module that ends the interpreter on import must not end ours.
            except (Exception, SystemExit) as error:
                reason = str(error) if isinstance(error, PluginError) else describe(error)
                failures.append(PluginFailure(**asdict(found), reason=reason))
        return cls(
            plugins, failures, blocked, [blocks[key] for key in sorted(blocks.keys() - matched)]
        )

    def find_backend(self, name: str) -> Provided[BackendSpec]:
        """The backend of a name; likewise the others that are found by name.

        Raises:
            UnknownNameError: no plugin provides one.
            PluginError: more than one does.
        """
        return self._find("backend", name, self.backends)

    def find_launcher(self, name: str) -> Provided[LauncherSpec]:
        """See `find_backend`."""
        return self._find("launcher", name, self.launchers)

    def launcher(self, name: str) -> Callable[[], Launcher]:
        """Import a launcher's factory.

        Raises:
            PluginError: there is no single launcher of this name, or it cannot be imported.
        """
        return load_factory(self.find_launcher(name))

    def find_objective(self, name: str) -> Provided[ObjectiveSpec]:
        """See `find_backend`."""
        return self._find("objective", name, self.objectives)

    def find_optimizer(self, name: str) -> Provided[OptimizerSpec]:
        """See `find_backend`."""
        return self._find("optimizer", name, self.optimizers)

    def find_strategy(self, name: str) -> Provided[StrategySpec]:
        """See `find_backend`."""
        return self._find("strategy", name, self.strategies)

    def find_tracker(self, name: str) -> Provided[TrackerSpec]:
        """See `find_backend`."""
        return self._find("tracker", name, self.trackers)

    def probe_all(self) -> dict[str, Probe]:
        """What every backend finds on this machine, by name."""
        return {provided.spec.name: guarded_probe(provided) for provided in self.backends}

    def absent_plugins(self) -> list[tuple[Plugin, str]]:
        """List plugins that did not answer, and why; what they would provide is not known."""
        failed = [(plugin, f"failed to load: {plugin.reason}") for plugin in self.failures]
        why = f"is blocked by {BLOCK_VARIABLE}"
        return [*failed, *((plugin, why) for plugin in self.blocked)]

    def create_backend(self, name: str, options: Mapping[str, Any] | None = None) -> Backend:
        """Import and construct a backend, without probing it or opening a device.

        Args:
            options: the run file's ``backend_options``.

        Raises:
            PluginError: there is no single backend of this name, its factory cannot be imported,
                or gives no such backend.
            RunFileError: an option is unknown, or its value is wrong.
            AnygaugeError: what the backend itself says of its options.
        """
        provided = self.find_backend(name)
        factory, read = load_factory(provided), read_options(provided, options)
        title = f"{provided.title}: its factory {provided.spec.factory!r}"
        try:
            backend = factory(read)
        except AnygaugeError:
            raise
        except Exception as error:
            raise PluginError(f"{title} raised {describe(error)}") from error
        if not isinstance(backend, Backend):
            raise PluginError(
                f"{title} gave a {type(backend).__name__}, not an anygauge.interface.Backend"
            )
        if getattr(backend, "name", None) != provided.spec.name:
            raise PluginError(
                f"{title} gave a backend whose name is {getattr(backend, 'name', None)!r}; both "
                "names must be the same"
            )
        for capability, support in dict(backend.capabilities).items():
            if not isinstance(support, Support):
                raise PluginError(
                    f"{provided.title}: its capabilities have {capability!r}: {support!r}, which "
                    "is not an anygauge.interface.Support; valid: FULL, or "
                    "Support(Level.PARTIAL, 'why')"
                )
        return backend

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
            f"valid names: {join_names(valid)}"
        )
        lines = self._backend_lines() if kind == "backend" else []
        for plugin, why in self.absent_plugins():
            if name in (plugin.entry_point, plugin.distribution):
                lines.append(f"the plugin {name!r} of {plugin.origin} {why}")
        raise UnknownNameError("\n".join([message, *lines]))

    def _backend_lines(self) -> list[str]:
        """Each backend: what it drives, and whether it can run here."""
        here = {name: probe.available for name, probe in self.probe_all().items()}
        lines = [f"  {AUTO}: the best that is available on this machine"]
        for provided in sorted(self.backends, key=lambda p: p.spec.name):
            drives = provided.spec.drives or f"the devices of {provided.distribution}"
            state = "available here" if here[provided.spec.name] else "not available here"
            lines.append(f"  {provided.spec.name}: {drives}; {state}")
        return [*lines, "`anygauge backends` says why one is not available"]


def installed_plugins() -> Registry:
    """The plugins of this process, looked for once for each path that it may import from."""
    return _load_registry(tuple(sys.path), os.environ.get(BLOCK_VARIABLE, ""))


@functools.cache
def _load_registry(path: tuple[str, ...], blocked: str) -> Registry:
    return Registry.load({BLOCK_VARIABLE: blocked})
