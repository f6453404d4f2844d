"""The registry: every plugin found, by kind and name, with doubles refused and failures kept.

What a spec announced is probed, imported and made here alone, and its faults are named.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from anygauge.interface import (
    AnygaugeError,
    Backend,
    BackendSpec,
    Finding,
    KernelSpec,
    Launcher,
    LauncherSpec,
    NotAvailableError,
    Options,
    PluginError,
    Probe,
    RunFileError,
    StrategySpec,
    Support,
    TrackerSpec,
    UnknownNameError,
)
from anygauge.registry.plugins import (
    AUTO,
    BLOCK_VARIABLE,
    Discovery,
    Duplicate,
    Plugin,
    Provided,
    SpecT,
    discover,
)
from anygauge.util.hiding import holds_secret, is_secret
from anygauge.util.text import describe, did_you_mean, listed


def missing_of(spec: StrategySpec) -> str:
    """The packages of a strategy that this machine lacks, and what installs them; or nothing."""
    names = [name for name in spec.distributions if installed_version(name) is None]
    if not names:
        return ""
    command = spec.install or f"pip install {' '.join(names)}"
    return f"{' and '.join(names)}, which this machine lacks: {command}"


def installed_version(distribution: str) -> str | None:
    """The version of a package on this machine; None without it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


class Registry:
    """What the plugins of this machine provide. Holding one imports no backend and no torch.

    Attributes:
        backends, kernels, launchers, strategies, trackers: in a stable order; names claimed twice
            are left out.
        duplicates: names that several plugins claim.
        failures: plugins that could not be loaded.
        blocked: plugins that the user has blocked.
        unmatched_blocks: names that the user has blocked and no plugin bears.
        plugins: those that were loaded.
    """

    def __init__(self, discovery: Discovery) -> None:
        self.plugins = discovery.plugins
        self.failures = discovery.failures
        self.blocked = discovery.blocked
        self.unmatched_blocks = discovery.unmatched_blocks
        self.duplicates: tuple[Duplicate, ...] = ()
        self.backends: Sequence[Provided[BackendSpec]] = self._unique(BackendSpec)
        self.kernels: Sequence[Provided[KernelSpec]] = self._unique(KernelSpec)
        self.launchers: Sequence[Provided[LauncherSpec]] = self._unique(LauncherSpec)
        self.strategies: Sequence[Provided[StrategySpec]] = self._unique(StrategySpec)
        self.trackers: Sequence[Provided[TrackerSpec]] = self._unique(TrackerSpec)

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Registry:
        """Find and load all installed plugins; a broken one is recorded in `failures`.

        Args:
            environ: where `BLOCK_VARIABLE` is read; the process's own where left out.
        """
        return cls(discover(os.environ if environ is None else environ))

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
        """Plugins that could not be asked, and why; what they would provide is not known."""
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

    def _unique(self, kind: type[SpecT]) -> tuple[Provided[SpecT], ...]:
        """All specs of a kind whose name is claimed once; records the others."""
        claims: dict[str, list[Provided[SpecT]]] = {}
        for plugin in self.plugins:
            for provided in plugin.provided:
                if isinstance(spec := provided.spec, kind):
                    within = f"{spec.operation}/" if isinstance(spec, KernelSpec) else ""
                    claims.setdefault(within + spec.name, []).append(provided)
        for name, providers in claims.items():
            if len(providers) > 1:
                doubled = Duplicate(kind=providers[0].kind, name=name, providers=tuple(providers))
                self.duplicates = (*self.duplicates, doubled)
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


# -- what a spec announced -------------------------------------------------------------------------

PROBE_LIMIT_S = 10.0
"""Seconds after which a probe counts as hung; a sound one takes milliseconds."""


def load_factory(provided: Provided[Any]) -> Callable[..., Any]:
    """Import what ``spec.factory`` names.

    Raises:
        PluginError: it cannot be imported, does not exist or cannot be called.
    """
    value = _load(provided, "factory")
    if not callable(value):
        raise PluginError(
            f"{provided.title}: its factory {provided.spec.factory!r} is a "
            f"{type(value).__name__}, which cannot be called"
        )
    return value


def _load(provided: Provided[Any], field: str) -> Any:
    """Import the ``package.module:name`` in a field of a spec."""
    path: str = getattr(provided.spec, field)
    module_name, _, attribute = path.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{provided.title}: its {field} {path!r} cannot be loaded: {describe(error)}; install "
            f"what is missing, or another release of {provided.distribution}"
        ) from error
    return value


OPTIONS_AT: Mapping[str, str] = {
    "backend": "backend_options",
    "launcher": "launch.options",
    "strategy": "strategy",
    "tracker": "tracker_options",
}
"""Where a run file has the options of each kind of plugin; of trackers, below their names."""

_SECRET = (
    "say where the secret is kept (docs/clouds.md), not what it is; what was received is not shown"
)


def load_options(provided: Provided[Any]) -> type[Options]:
    """The class of a plugin's options; one without fields where its spec names none.

    Raises:
        PluginError: it cannot be imported, or does not derive from `Options`.
    """
    if not provided.spec.options:
        return Options
    options = _load(provided, "options")
    if not (isinstance(options, type) and issubclass(options, Options)):
        raise PluginError(
            f"{provided.title}: its options {provided.spec.options!r} is not a class that derives "
            "from anygauge.interface.Options"
        )
    return options


def read_options(provided: Provided[Any], given: Mapping[str, Any] | None) -> Any:
    """What a run file says for a plugin, as an object of its class of options.

    Raises:
        PluginError: as of `load_options`.
        RunFileError: it has no such option, needs one that is left out, or a value is wrong; names
            all of them, ``backend_options.NAME: ...``, a line each.
    """
    model = load_options(provided)
    try:
        return model.model_validate(dict(given or {}))
    except ValidationError as error:
        kind, name = provided.kind, provided.spec.name
        place = f"{OPTIONS_AT[kind]}.{name}" if kind == "tracker" else OPTIONS_AT[kind]
        raise RunFileError(
            "\n".join(_complaint(model, place, f"the {name} {kind}", one) for one in error.errors())
        ) from None


def _complaint(model: type[Options], place: str, owner: str, error: ErrorDetails) -> str:
    """One of pydantic's complaints, with place, what is valid and the nearest of it."""
    where, given = error["loc"], error["input"]
    # Names of alternatives that pydantic has tried are not part of the place.
    tried = re.compile(r"constrained|\[key\]|^[A-Z].*[a-z]")
    place = ".".join((place, *(str(part) for part in where if not tried.search(str(part)))))
    field = model.model_fields.get(str(where[0])) if len(where) == 1 else None
    if error["type"] == "extra_forbidden":
        near = did_you_mean(str(where[0]), model.model_fields) or ";"
        has = f"{near} it has: {', '.join(model.model_fields)}"
        if not model.model_fields:
            has = "; it has none, remove it"
        return f"{place}: {owner} has no such option{has if len(where) == 1 else ''}"
    if error["type"] == "missing":
        means = f": {field.description}" if field is not None and field.description else ""
        return f"{place}: {owner} needs it{means}"
    message = error["msg"].removeprefix("Value error, ")
    named = any(is_secret(str(part)) for part in where)
    if "secrets" in where or named or holds_secret(str(given)):
        return f"{place}: {_SECRET}"
    if isinstance(given, Options | dict):
        return f"{place}: {message}"
    if error["type"] == "string_type" and isinstance(given, int | float):
        message += " (put it in quotes)"
    if error["type"] == "literal_error" and isinstance(given, str):
        message += did_you_mean(given, re.findall(r"'([^']*)'", error["ctx"]["expected"]))
    return f"{place}: {given!r}: {message[:1].lower()}{message[1:]}"


def why_missing(missing: Callable[[], str | None]) -> str | None:
    """What a spec's ``missing`` says, where a check that raises counts as missing."""
    try:
        return missing()
    except Exception as error:
        return f"its check raised {describe(error)}"


def refuse_if_missing(provided: Provided[Any]) -> None:
    """Raises: NotAvailableError: the spec says that something is missing on this machine."""
    reason = why_missing(provided.spec.missing)
    if reason is not None:
        raise NotAvailableError(f"{provided.title} cannot run here: {reason}")


def guarded_probe(provided: Provided[BackendSpec]) -> Probe:
    """Probe once; one that raises, hangs or gives no `Probe` becomes an unavailable one."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(provided.spec.probe())
        except BaseException as error:
            answers.put(error)

    # A daemon, so that one that never ends cannot keep the command from ending.
    threading.Thread(target=ask, name=f"probe-{provided.spec.name}", daemon=True).start()
    try:
        answer = answers.get(timeout=PROBE_LIMIT_S)
    except queue.Empty:
        why = f"has not answered for {PROBE_LIMIT_S:g} s"
    else:
        if isinstance(answer, Probe):
            return answer
        is_error = isinstance(answer, BaseException)
        why = f"raised {describe(answer)}" if is_error else f"gave {answer!r}, which is not a Probe"
    skipped = Finding.not_needed("not looked for: the probe failed")
    return Probe(
        devices=Finding.no(f"the probe {why}; this is a fault of {provided.origin}"),
        driver=skipped,
        software=skipped,
    )


def installed_plugins() -> Registry:
    """The plugins of this process, looked for once for each path that it may import from."""
    return _loaded(tuple(sys.path), os.environ.get(BLOCK_VARIABLE, ""))


@functools.cache
def _loaded(path: tuple[str, ...], blocked: str) -> Registry:
    return Registry.load({BLOCK_VARIABLE: blocked})
