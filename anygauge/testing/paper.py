"""Checks that need no device: what a backend announces and says of itself before it is opened.

They run in a process of their own, since one of them is that torch is not imported there. Those of
the environment are in `rules`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from anygauge.interface import (
    CAPABILITIES,
    AnygaugeError,
    Backend,
    BackendSpec,
    LaunchProfile,
    Level,
    Probe,
    Support,
)
from anygauge.registry import Registry
from anygauge.testing.check import check, of_type

HEAVY = ("torch", "transformers", "tensorflow", "jax", "numpy.distutils")
PROBE_S = 2.0
"""Seconds: commands that only list backends wait for every probe."""
ATTRIBUTES = {
    "device_type": str,
    **dict.fromkeys(("libraries", "variables", "files", "readings"), tuple[str, ...]),
    "launch": LaunchProfile,
}
"""Of a backend, and what each must be."""
WRONG_VALUES = ({"no": "such value"}, ["no such value"], "no such value", -(10**9), math.nan)
EMPTY_WORDS = ("todo", "tbd", "fixme", "n/a", "none", "unknown", "reason", "xxx")
check_on_paper = partial(check, part="basic")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Paper:
    """A backend as it stands on paper: nothing is open.

    Attributes:
        name: as users write it.
        options: the run file's ``backend_options``.
    """

    name: str
    options: Mapping[str, Any]
    registry: Registry

    @property
    def spec(self) -> BackendSpec:
        """What the plugin announced."""
        return self.registry.find_backend(self.name).spec

    def backend(self, **options: Any) -> Backend:
        """A new one, not opened, with further options."""
        return self.registry.create_backend(self.name, {**self.options, **options})


@contextlib.contextmanager
def process_unchanged(what: str) -> Iterator[None]:
    """Fail if what is done meanwhile changes the process, or imports what is heavy."""
    before, loaded = _process_state(), _heavy_modules()
    yield
    assert _process_state() == before, f"{what} changed the process's environment, folder or umask"
    imported = sorted(_heavy_modules() - loaded)
    assert not imported, f"{what} imported {', '.join(imported)}"


def _process_state() -> tuple[dict[str, str], str, int]:
    return dict(os.environ), str(Path.cwd()), os.umask(os.umask(0o22))


def _heavy_modules() -> set[str]:
    return {name for name in HEAVY if name in sys.modules}


@check_on_paper(
    "the plugin announces exactly one backend of this name, for this version of the contract, "
    "without importing torch",
    means="users cannot name the backend, or get another one; anygauge refuses a plugin that is "
    "older; every command takes seconds where the announcing module imports the backend's own",
)
def announced(paper: Paper) -> None:
    spec, imported = paper.spec, sorted(_heavy_modules())
    assert not imported, f"importing the plugin imported {', '.join(imported)}"
    plain = spec.name.replace("-", "").replace("_", "").isalnum() and spec.name == spec.name.lower()
    assert plain, f"{spec.name!r} is not a plain name in lower case"


@check_on_paper(
    "the probe is cheap, imports nothing heavy, changes nothing, and answers in words that fit",
    means="commands that only list backends are slow, or change what they run in; `anygauge "
    "backends` cannot say why a device is missing, or `auto` chooses one that cannot run; a "
    "driver's library that the probe loads, a count that is guessed, a driver that counts as one",
)
def probe_is_pure(paper: Paper) -> None:
    with process_unchanged("the probe"):
        began = time.perf_counter()
        probe = paper.spec.probe()
        took = time.perf_counter() - began
        second = paper.spec.probe()
        paper.spec.this_machine()
    assert probe == second, "two probes of the same machine differ"
    assert took < PROBE_S, f"the probe took {took:.1f} s"
    of_type("probe()", probe, Probe)
    for name in ("devices", "driver", "software"):
        detail = getattr(probe, name).detail
        assert detail.strip() and "\n" not in detail, f"{name}: not a line of words: {detail!r}"
    count = probe.device_count
    if probe.devices.presence == "no":
        assert not count, f"there are no devices ({probe.devices.detail}), and {count} of them"
    if probe.available:
        assert count is None or count > 0, f"it is available ({probe.reason}), with {count} devices"
    named = len(set(probe.cards)) == len(probe.cards) and all(c.strip() for c in probe.cards)
    assert named, f"cards names one twice, or without a name: {probe.cards}"


@check_on_paper(
    "constructing it has no side effect; an instance shares nothing with others, and one that is "
    "not open says so",
    means="a command takes the device, or seconds, only to ask a question; a second run in one "
    "process changes the first; code that asks too early computes on the wrong device",
)
def light_construction(paper: Paper) -> None:
    with process_unchanged("constructing it"):
        first, second = paper.backend(), paper.backend()
    assert not first.placement.is_open, "constructing it opened a device"
    for facet in ("placement", "graph", "collectives"):
        assert getattr(first, facet) is not getattr(second, facet), f"two instances share {facet}"
    try:
        _ = first.placement.device
    except RuntimeError as error:
        assert "open" in str(error), f"the error does not say what to do: {error}"
    else:
        raise AssertionError("placement.device gave a device before open()")


@check_on_paper(
    "what it says of itself is sound: type, capabilities, lists, shapes, reasons, `doctor`",
    means="runs are refused without a reason that a user can read, rows are cut, or `doctor` does "
    "not say what to do; a placeholder that was left, or a comma missing after the only name",
)
def described(paper: Paper) -> None:
    backend = paper.backend()
    for name, hint in ATTRIBUTES.items():
        of_type(name, getattr(backend, name), hint)
    assert backend.device_type, "device_type is empty"
    unknown = sorted(set(backend.capabilities) - set(CAPABILITIES))
    every = ", ".join(CAPABILITIES)
    assert not unknown, f"capabilities {', '.join(unknown)}; those that are asked about: {every}"
    reasons = {f"unsupported_engines[{n!r}]": why for n, why in backend.unsupported_engines.items()}
    reasons["attention_why"] = backend.attention_why
    for name in CAPABILITIES:
        support = backend.support(name)
        of_type(f"support({name!r})", support, Support)
        if support.level is not Level.FULL:
            reasons[f"capabilities[{name!r}]"] = support.reason
        if support.level is Level.SWITCHED_OFF:
            named = any(option in support.reason for option in type(backend.options).model_fields)
            assert named, f"{name} is switched off, and {support.reason!r} names no option"
    for where, reason in reasons.items():
        plain = reason.strip().lower().rstrip(".!:")
        words = len(plain) > 2 and any(letter.isalpha() for letter in plain) and "\n" not in plain
        assert words and plain not in EMPTY_WORDS, f"{where}: {reason!r} gives no reason"
    for maximum in (64, 100, 1024):
        for longest in (1, 7, maximum):
            padded = backend.graph.shapes.padded_length(longest, maximum)
            assert longest <= padded <= maximum, f"{longest} of {maximum} tokens became {padded}"
    for line in backend.diagnostics():
        assert line.name and line.seen, f"a check of doctor without words: {line}"
        known = line.outcome == "pass" or (line.outcome in ("skip", "warn", "fail") and line.remedy)
        assert known, f"{line.name}: outcome {line.outcome!r}, remedy {line.remedy!r}"


@check_on_paper(
    "an unknown option, and a value that an option cannot have, are refused in words",
    means="a slip of the pen in `backend_options` changes nothing, or ends the run later without a "
    "cause; a field of its options takes any value",
)
def options_are_checked(paper: Paper) -> None:
    for name in ("no_such_option_of_any_backend", *type(paper.backend().options).model_fields):
        taken = []
        for value in WRONG_VALUES:
            try:
                paper.backend(**{name: value})
            except AnygaugeError as error:
                assert name in str(error), f"the error does not name {name}: {error}"
            else:
                taken.append(value)
        some = len(taken) < len(WRONG_VALUES)
        assert some, f"backend_options.{name} takes anything: {', '.join(map(repr, taken))}"


for _part, _name, _title in (
    ("basic", "paper", "the process had the backend's environment, and"),
    ("device", "device", "the process had the backend's environment, closed the device and"),
    ("ranks", "ranks", "every rank had the backend's environment, closed its device and"),
):

    def _asked(trouble: str) -> None:
        # A process that gives every answer and then aborts would end its users' runs so, too.
        assert not trouble, trouble

    _asked.__name__ = f"ends_on_{_name}"
    check(
        f"{_title} ended with status 0",
        part=_part,
        of_the_end=True,
        means="a run that was right is reported as failed; look for threads, drivers and groups "
        "that outlive the interpreter, and for an environment that cannot be made",
    )(_asked)
