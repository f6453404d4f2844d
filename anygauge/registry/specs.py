"""What a spec announced: imported, read and probed here alone, and its faults are named."""

from __future__ import annotations

import importlib
import queue
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from anygauge.interface import (
    BackendSpec,
    Finding,
    NotAvailableError,
    Options,
    PluginError,
    Probe,
    RunFileError,
)
from anygauge.registry.load_plugins import Provided
from anygauge.util.hiding import holds_secret, is_secret
from anygauge.util.text import describe, did_you_mean

PROBE_LIMIT_S = 10.0
"""Seconds after which a probe counts as hung; a sound one takes milliseconds."""


def load_factory(provided: Provided[Any]) -> Callable[..., Any]:
    """Import what ``spec.factory`` names.

    Raises:
        PluginError: it cannot be imported, does not exist or cannot be called.
    """
    value = _load_attribute(provided, "factory")
    if not callable(value):
        raise PluginError(
            f"{provided.title}: its factory {provided.spec.factory!r} is a "
            f"{type(value).__name__}, which cannot be called"
        )
    return value


def _load_attribute(provided: Provided[Any], field: str) -> Any:
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


OPTIONS_AT = {
    "backend": "backend_options",
    "launcher": "launch.options",
    "objective": "objective_options",
    "tracker": "tracker_options.{}",
}
"""Where a run file has the options of each kind of plugin; `config` reads those of strategies."""

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
    options = _load_attribute(provided, "options")
    if not (isinstance(options, type) and issubclass(options, Options)):
        raise PluginError(
            f"{provided.title}: its options {provided.spec.options!r} is not a class that derives "
            "from anygauge.interface.Options"
        )
    return options


def read_options(provided: Provided[Any], given: Mapping[str, Any] | None) -> Any:
    """Read a plugin's options in a run file as an object of its class of options.

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
        of = (model, OPTIONS_AT[kind].format(name), f"the {name} {kind}")
        raise RunFileError("\n".join(_problem(*of, one) for one in error.errors())) from None


def _problem(model: type[Options], place: str, owner: str, error: ErrorDetails) -> str:
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


def why_missing(missing: Callable[..., str | None], *options: Any) -> str | None:
    """Return a spec's ``missing``, where a check that raises counts as missing."""
    try:
        return missing(*options)
    except Exception as error:
        return f"its check raised {describe(error)}"


def refuse_if_missing(provided: Provided[Any], *options: Any) -> None:
    """Raises: NotAvailableError: the spec says that something is missing on this machine."""
    reason = why_missing(provided.spec.missing, *options)
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
