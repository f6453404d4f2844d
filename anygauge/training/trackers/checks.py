"""Trackers and their options as a run file names them, checked before ranks start; no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from anygauge.config.schema import RunFile
from anygauge.interface import NotAvailableError, RunFileError, TrackerOption, TrackerSpec
from anygauge.registry import Registry
from anygauge.registry.factories import refuse_if_missing


def check_trackers(registry: Registry, run: RunFile, environ: Mapping[str, str] | None) -> None:
    """Refuse trackers that do not exist, would not start, or do not take the options given.

    Args:
        environ: the variables that rank 0 will have, where it will be started on this machine;
            None: only what the run file says is checked.

    Raises:
        PluginError: there is no single tracker of a name.
        RunFileError: an option is unknown, missing or of a wrong kind, or a tracker is named twice.
        NotAvailableError: a package is missing, or a login.
    """
    twice = sorted({name for name in run.trackers if run.trackers.count(name) > 1})
    if twice:
        raise RunFileError(f"trackers: {', '.join(twice)} is named twice; name it once")
    for name in run.trackers:
        provided = registry.find_tracker(name)
        options = run.tracker_options.get(name, {})
        check_options(provided.spec, options)
        if environ is None:
            continue
        refuse_if_missing(provided, "tracker")
        reason = provided.spec.unready(options, environ)
        if reason is not None:
            raise NotAvailableError(f"tracker {name!r}: {reason}")


def check_options(spec: TrackerSpec, options: Mapping[str, Any]) -> None:
    """Raises: RunFileError: says which option of `options` a tracker does not take, and why."""
    where = f"tracker_options.{spec.name}"
    known = {option.name: option for option in spec.options}
    valid = f"valid: {', '.join(known)}" if known else "it has none; remove them"
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise RunFileError(f"{where}: no option {name!r}; {hint}{valid}")
        problem = _problem(known[name], value)
        if problem:
            raise RunFileError(f"{where}.{name}: got {value!r}, expected {problem}")
    for option in spec.options:
        if option.required and option.name not in options:
            raise RunFileError(
                f"{where}.{option.name}: is needed, and left out. {option.description}"
            )


def _problem(option: TrackerOption, value: Any) -> str | None:
    """What was expected instead of a value, or None."""
    fits = {
        "text": isinstance(value, str) and bool(value),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "truth": isinstance(value, bool),
        "list of text": isinstance(value, list) and all(isinstance(item, str) for item in value),
    }
    if not fits[option.kind]:
        return {"truth": "true or false", "text": "a text"}.get(option.kind, f"a {option.kind}")
    if option.choices and value not in option.choices:
        return "one of " + ", ".join(option.choices)
    return None
