"""Loading plugins: each entry point is imported, checked and asked alone, so none harms another.

A plugin is taken whole or not at all: one that fails in any way is recorded as a
`PluginFailure` and provides nothing. Every plugin has a pluggy manager of its own, because a
hook that raises ends the whole call of a shared one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Iterable
from dataclasses import asdict
from types import ModuleType
from typing import Any

import pluggy

from anygauge.interface import API_VERSION, BackendSpec, ObjectiveSpec, PluginError
from anygauge.interface import plugins as hooks
from anygauge.interface.plugins import ENTRY_POINT_GROUP, PROJECT
from anygauge.registry.load_plugins import (
    AUTO,
    HOOK_NAMES,
    KINDS,
    AnySpec,
    LoadedPlugin,
    Plugin,
    PluginFailure,
    Provided,
)
from anygauge.util.text import describe, did_you_mean

_MOVED = "If the plugin was written for another anygauge, install a release of it made for this one"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OBJECT = (re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"), "package.module:name")
_FILE = (re.compile(r"[A-Za-z_][\w.]*:[\w./-]+"), "package:file.toml")
_PATHS = {"factory": _OBJECT, "options": _OBJECT, "hardware": _FILE}
"""Fields of specs that name something in a package, and the form of each."""


def entry_points(failures: list[PluginFailure]) -> list[tuple[Plugin, str]]:
    """Our entry points and what each names, in a stable order.

    Args:
        failures: takes those that cannot be read.
    """
    everything: list[tuple[Plugin, str]] = []
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        name, version = "an unnamed distribution", "of unknown version"
        try:
            text = distribution.read_text("entry_points.txt") or ""
            # Only our own are parsed: another project's malformed file is none of our business.
            if f"[{ENTRY_POINT_GROUP}]" not in text:
                continue
            name = distribution.metadata["Name"] or name
            version = distribution.version or version
            # The first on the path is the one that Python would import.
            if normal_name(name) in seen:
                continue
            seen.add(normal_name(name))
            for each in distribution.entry_points.select(group=ENTRY_POINT_GROUP):
                found = Plugin(distribution=name, version=version, entry_point=each.name)
                everything.append((found, each.value))
        except Exception as error:
            reason = f"its metadata cannot be read: {describe(error)}"
            failures.append(PluginFailure(distribution=name, version=version, reason=reason))
    return sorted(everything, key=lambda f: (normal_name(f[0].distribution), f[0].entry_point))


def normal_name(name: str) -> str:
    """A distribution's name as package indexes compare them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def load_plugin(found: Plugin, value: str) -> LoadedPlugin:
    """Import one plugin, check its hooks and call those that provide specs.

    Args:
        value: the module, as its entry point names it.

    Raises:
        PluginError: it cannot be used; what its code raises on import comes through.
    """
    if ":" in value or "[" in value:
        raise PluginError(
            f"the entry point's value {value!r} names an object; a plugin is a module: "
            f"write {re.split('[:[]', value)[0].strip()!r}"
        )
    try:
        module = importlib.import_module(value.strip())
    except ImportError as error:
        if (error.name or "").partition(".")[0] != PROJECT:
            raise
        raise PluginError(f"{describe(error)}. {_MOVED}") from error
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hooks)
    try:
        manager.register(module)
    except pluggy.PluginValidationError as error:
        raise PluginError(_on_one_line(error)) from error
    _check_hook_names(manager, module)
    implemented = {caller.name for caller in manager.get_hookcallers(module) or ()}
    if not implemented:
        raise PluginError(
            f"module {value!r} implements no hook; mark at least one of {', '.join(HOOK_NAMES)}"
        )
    provided: list[Provided[Any]] = []
    for hook, (_, kind) in KINDS.items():
        if hook not in implemented:
            continue
        for spec in _call_hook(manager, hook, kind):
            _check_spec(spec, hook, kind, found.distribution)
            provided.append(Provided(**asdict(found), spec=spec))
    return LoadedPlugin(**asdict(found), manager=manager, provided=tuple(provided))


def _check_hook_names(manager: pluggy.PluginManager, module: ModuleType) -> None:
    """Refuse hooks that nobody calls: misspelt ones, and those that lack the mark."""
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        unknown = [c.name for c in manager.get_hookcallers(module) or () if not c.has_spec()]
        complaints = [f"unknown hook {name!r}{did_you_mean(name, HOOK_NAMES)}" for name in unknown]
        raise PluginError("; ".join(complaints) or _on_one_line(error)) from error
    for name, value in vars(module).items():
        own = inspect.isfunction(value) and value.__module__ == module.__name__
        if own and not hasattr(value, f"{PROJECT}_impl") and did_you_mean(name, HOOK_NAMES, 0.9):
            hint = "" if name in HOOK_NAMES else did_you_mean(name, HOOK_NAMES)
            raise PluginError(
                f"function {name!r} is not marked with @anygauge.interface.hookimpl, so it would "
                f"never be called{hint}"
            )


def _call_hook(manager: pluggy.PluginManager, hook: str, kind: type[AnySpec]) -> Iterable[Any]:
    """The specs that the one plugin of `manager` gives for a hook."""
    try:
        results = getattr(manager.hook, hook)()
        # Leaves out None; a generator runs, and may raise, only here.
        if results and isinstance(results[0], Iterable):
            return list(results[0])
    except (Exception, SystemExit) as error:
        # A spec's own fields move, too: they are wrong before its version can be looked at.
        moved = isinstance(error, TypeError) and f"{kind.__name__}." in str(error)
        advice = f". {_MOVED}" if moved else ""
        raise PluginError(f"{hook} raised {describe(error)}{advice}") from error
    gave = f"a bare {type(results[0]).__name__}" if results else "None"
    raise PluginError(f"{hook} gave {gave}; it must return a list of {kind.__name__}")


def _check_spec(spec: Any, hook: str, kind: type[AnySpec], distribution: str) -> None:
    """Refuse a spec of the wrong type, API version or form."""
    if not isinstance(spec, kind):
        raise PluginError(
            f"{hook} gave {spec!r}, a {type(spec).__name__}; it must give {kind.__name__}"
        )
    title = f"{kind.__name__} {spec.name!r}"
    if spec.api_version != API_VERSION:
        remedy = f"Install a release of {distribution} made for it"
        if isinstance(spec.api_version, int) and spec.api_version > API_VERSION:
            remedy = f"Install a newer anygauge, or a release of {distribution} made for this one"
        raise PluginError(
            f"{title} is written for version {spec.api_version!r} of the plugin contract "
            f"(API_VERSION), and this anygauge has version {API_VERSION}. {remedy}"
        )
    if not isinstance(spec.name, str) or not _NAME.fullmatch(spec.name):
        raise PluginError(f"{title}: a name is letters, digits, '.', '_' and '-'")
    for field, (form, example) in _PATHS.items():
        path = getattr(spec, field, "")
        is_left_out = not path and (field != "factory" or isinstance(spec, ObjectiveSpec))
        if not (is_left_out or (isinstance(path, str) and form.fullmatch(path))):
            raise PluginError(f"{title}: {field} {path!r} must read {example!r}")
    if isinstance(spec, BackendSpec):
        if spec.name == AUTO:
            raise PluginError(f"{title}: {AUTO!r} is reserved for choosing a backend")
        if not callable(spec.probe):
            raise PluginError(f"{title}: probe {spec.probe!r} cannot be called")
        if not isinstance(spec.priority, int):
            raise PluginError(f"{title}: priority {spec.priority!r} is not an integer")


def _on_one_line(error: BaseException) -> str:
    """Pluggy's messages on one line."""
    return " ".join(str(error).split())
