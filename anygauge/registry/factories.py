"""What a spec announced is probed, imported and made here alone, and its faults are named."""

from __future__ import annotations

import importlib
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from anygauge.interface import (
    AnygaugeError,
    Backend,
    BackendSpec,
    Finding,
    NotAvailableError,
    PluginError,
    Presence,
    Probe,
    StrategySpec,
)
from anygauge.registry.plugins import Provided
from anygauge.util.text import describe

PROBE_LIMIT_S = 10.0
"""Seconds after which a probe counts as hung; a sound one takes milliseconds."""


def load_factory(provided: Provided[Any], kind: str) -> Callable[..., Any]:
    """Import what ``spec.factory`` names.

    Raises:
        PluginError: it cannot be imported, does not exist or cannot be called.
    """
    value = _load(provided, kind, "factory", provided.spec.factory)
    if not callable(value):
        raise PluginError(
            f"{kind} {provided.spec.name!r} of {provided.origin}: its factory "
            f"{provided.spec.factory!r} is a {type(value).__name__}, which cannot be called"
        )
    return value


def _load(provided: Provided[Any], kind: str, what: str, path: str) -> Any:
    """Import ``package.module:name``."""
    module_name, _, attribute = path.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{kind} {provided.spec.name!r} of {provided.origin}: its {what} {path!r} cannot be "
            f"loaded: {describe(error)}; install what is missing, or another release of "
            f"{provided.distribution}"
        ) from error
    return value


def load_options(provided: Provided[StrategySpec]) -> type[Any] | None:
    """The class of a strategy's own fields; None where it has none.

    Raises:
        PluginError: it cannot be imported, or is not a class.
    """
    if not provided.spec.options:
        return None
    options = _load(provided, "strategy", "options", provided.spec.options)
    if not isinstance(options, type):
        raise PluginError(
            f"strategy {provided.spec.name!r} of {provided.origin}: its options "
            f"{provided.spec.options!r} is not a class, but a {type(options).__name__}"
        )
    return options


def make_backend(provided: Provided[BackendSpec], options: Mapping[str, Any] | None) -> Backend:
    """Construct a backend; opens nothing.

    Raises:
        PluginError: the factory is broken, or gives no `Backend` of the announced name.
        AnygaugeError: what the backend itself says of its options.
    """
    title = f"backend {provided.spec.name!r} of {provided.origin}"
    factory_name = provided.spec.factory
    factory = load_factory(provided, "backend")
    if isinstance(factory, type) and not issubclass(factory, Backend):
        raise PluginError(
            f"{title}: its factory {factory_name!r} is a class that does not derive from "
            "anygauge.interface.Backend"
        )
    try:
        backend = factory(options)
    except AnygaugeError:
        raise
    except Exception as error:
        raise PluginError(
            f"{title}: its factory {factory_name!r} raised {describe(error)}"
        ) from error
    if not isinstance(backend, Backend):
        raise PluginError(
            f"{title}: its factory {factory_name!r} gave a {type(backend).__name__}, "
            "not an anygauge.interface.Backend"
        )
    if getattr(backend, "name", None) != provided.spec.name:
        raise PluginError(
            f"{title}: its factory {factory_name!r} gave a backend whose name is "
            f"{getattr(backend, 'name', None)!r}; both names must be the same"
        )
    return backend


def why_missing(missing: Callable[[], str | None]) -> str | None:
    """What a spec's ``missing`` says, where a check that raises counts as missing."""
    try:
        return missing()
    except Exception as error:
        return f"its check raised {describe(error)}"


def refuse_if_missing(provided: Provided[Any], kind: str) -> None:
    """Raises: NotAvailableError: the spec says that something is missing on this machine."""
    reason = why_missing(provided.spec.missing)
    if reason is not None:
        raise NotAvailableError(
            f"{kind} {provided.spec.name!r} of {provided.origin} cannot run here: {reason}"
        )


def guarded_probe(provided: Provided[BackendSpec]) -> Probe:
    """Probe once; one that raises, hangs or gives no `Probe` becomes an unavailable one."""
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((provided.spec.probe(), None))
        except BaseException as error:
            answers.put((None, error))

    # A daemon, so that one that never ends cannot keep the command from ending.
    threading.Thread(target=ask, name=f"probe-{provided.spec.name}", daemon=True).start()
    try:
        probe, error = answers.get(timeout=PROBE_LIMIT_S)
    except queue.Empty:
        return _failed_probe(f"the probe has not answered for {PROBE_LIMIT_S:g} s", provided)
    if error is not None:
        return _failed_probe(f"the probe raised {describe(error)}", provided)
    if not isinstance(probe, Probe):
        return _failed_probe(f"the probe gave {probe!r}, which is not a Probe", provided)
    return probe


def _failed_probe(reason: str, provided: Provided[BackendSpec]) -> Probe:
    skipped = Finding(presence=Presence.NOT_NEEDED, detail="not looked for: the probe failed")
    return Probe(
        devices=Finding.no(f"{reason}; this is a fault of {provided.origin}"),
        driver=skipped,
        software=skipped,
    )
