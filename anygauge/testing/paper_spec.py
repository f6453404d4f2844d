"""Checks of what is announced on paper: the spec, the probe, the options and the descriptions."""

from __future__ import annotations

import builtins
import contextlib
import importlib.resources
import io
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from anygauge.interface import (
    CAPABILITIES,
    AnygaugeError,
    Backend,
    Finding,
    Presence,
    Probe,
    read_hardware,
)
from anygauge.testing.basic import Paper
from anygauge.testing.check import NotAsked, check

HIDDEN = ("/dev", "/sys", "/proc/driver", "/opt", "/usr/local", "/etc")
"""Folders in which machines show their devices and drivers."""
WRONG_VALUES = ({"no": "such value"}, ["no such value"], "no such value", -(10**9), math.nan)
OTHER_VALUES = (True, False, 1, 2, "1")
UNPICKLED = """
import pickle, sys
spec = pickle.load(sys.stdin.buffer)
spec.probe(), spec.this_machine()
sys.stdout.buffer.write(pickle.dumps((spec.name, "torch" in sys.modules)))
"""


@check(
    "the spec that was pickled can be used in another process",
    part="basic",
    means="commands that probe in processes of their own find no device; the probe is made within "
    "a function or by code that only this process has run",
)
def spec_pickles_to_another_process(paper: Paper) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNPICKLED],
        input=pickle.dumps(paper.spec),
        capture_output=True,
        check=False,
        timeout=50,
    )
    error = done.stderr.decode(errors="replace").strip().splitlines()
    assert done.returncode == 0, error[-1] if error else f"status {done.returncode}"
    name, heavy = pickle.loads(done.stdout)
    assert name == paper.name
    assert not heavy, "reading it, its probe or this_machine imports torch"


@check(
    "what the probe finds fits together",
    part="basic",
    means="`auto` chooses a backend that cannot run, or leaves out one that can; a count that is "
    "guessed, or a driver that counts as a device",
)
def probe_fits_together(paper: Paper) -> None:
    _fits_together(paper.spec.probe())


def _fits_together(probe: Probe) -> None:
    count = probe.device_count
    assert count is None or type(count) is int, f"device_count is {count!r}, not a whole number"
    if probe.devices.presence is Presence.NO:
        assert not count, f"there are no devices ({probe.devices.detail}), and {count} of them"
    if probe.available:
        assert count != 0, f"it is available ({probe.reason}), with 0 devices"
    for name in ("devices", "driver", "software"):
        finding: Finding = getattr(probe, name)
        assert isinstance(finding.presence, Presence), f"{name}: {finding.presence!r}"
        _texts(f"{name}.looked_at", finding.looked_at)
    _texts("cards", probe.cards)
    _texts("notes", probe.notes)
    assert len(set(probe.cards)) == len(probe.cards), f"cards names one twice: {probe.cards}"
    assert all(each.strip() for each in probe.cards), f"a card without a name: {probe.cards}"


def _texts(what: str, values: Any) -> None:
    fit = isinstance(values, tuple) and all(isinstance(each, str) for each in values)
    assert fit, f"{what} is {values!r}, not a tuple of texts"


@check(
    "on a machine without devices, drivers or tools the probe says so instead of raising",
    part="basic",
    means="`anygauge backends` and `auto` show an error where they should show that there is no "
    "device; the probe takes a file, a folder or a tool for granted",
)
def probe_says_no(paper: Paper) -> None:
    variable = paper.backend().launch.visibility_variable
    hidden = {} if variable is None else {variable: ""}
    for what, machine in (
        ("where /dev, /sys and the like show nothing", _bare_machine),
        ("where no tool is on the PATH", lambda: mock.patch.dict(os.environ, {"PATH": ""})),
        (f"with {variable} empty", lambda: mock.patch.dict(os.environ, hidden)),
    ):
        with machine():
            try:
                probe = paper.spec.probe()
            except Exception as error:
                raised = f"{what} it raised {type(error).__name__}: {error}"
                raise AssertionError(raised) from error
        assert isinstance(probe, Probe), f"{what} it gave {type(probe).__name__}"
        _fits_together(probe)


@contextlib.contextmanager
def _bare_machine() -> Iterator[None]:
    """Nothing is seen in `HIDDEN`."""
    with contextlib.ExitStack() as stack:
        for module, name in (
            *((os, name) for name in ("stat", "lstat", "listdir", "scandir", "open", "access")),
            (io, "open"),
            (builtins, "open"),
        ):
            usual = getattr(module, name)
            stack.enter_context(mock.patch.object(module, name, _blind(usual, name == "access")))
        yield


def _blind(usual: Callable[..., Any], is_access: bool) -> Callable[..., Any]:
    def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | bytes | os.PathLike):
            text = str(Path(os.fsdecode(path)).absolute())
            hidden = any(text == each or text.startswith(f"{each}/") for each in HIDDEN)
            if hidden and not text.startswith((sys.prefix, sys.base_prefix)):
                if is_access:
                    return False
                raise FileNotFoundError(2, "No such file or directory", text)
        return usual(path, *args, **kwargs)

    return call


@check(
    "the description of its cards can be read, and what it leaves to the machine is given",
    part="basic",
    means="plans of runs on its cards are refused; a figure without source, a wrong unit or a file "
    "that is not in the package",
)
def hardware_file_is_sound(paper: Paper) -> None:
    spec = paper.spec
    given = spec.this_machine()
    for name, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        assert number and math.isfinite(value) and value > 0, f"this_machine: {name} = {value!r}"
    assert spec.this_machine() == given, "two calls of this_machine differ"
    if not spec.hardware:
        raise NotAsked("it describes no cards")
    package, _, file = spec.hardware.partition(":")
    assert package and file, f"hardware is {spec.hardware!r}, not 'package:file.toml'"
    try:
        text = importlib.resources.files(package).joinpath(file).read_text(encoding="utf-8")
    except (ImportError, OSError) as error:
        raise AssertionError(f"{spec.hardware} cannot be read: {error}") from error
    cards, machines = read_hardware(text, spec.hardware, backend=spec.name)
    assert cards or machines, f"{spec.hardware} describes nothing"


@check(
    "lists of names are tuples of texts",
    part="basic",
    means="an option, variable or library is never found, letter by letter; a comma is missing "
    "after the only name",
)
def lists_are_lists(paper: Paper) -> None:
    backend = paper.backend()
    for name in ("libraries", "variables", "files", "readings"):
        _texts(name, getattr(backend, name))
    for name in ("container_flags", "capabilities"):
        _texts(f"launch.{name}", getattr(backend.launch, name))
    for file in backend.files:
        assert file.startswith("/") or "/" not in file, (
            f"files: {file!r} is neither an absolute path nor the bare name of a library"
        )
    variable = backend.launch.visibility_variable
    assert variable is None or (isinstance(variable, str) and variable.isidentifier()), (
        f"launch.visibility_variable is {variable!r}"
    )
    assert backend.launch.binding in ("cores", "none"), (
        f"launch.binding: {backend.launch.binding!r}"
    )


# -- options --------------------------------------------------------------------------------------


@check(
    "a value that an option cannot have is refused in words",
    part="basic",
    means="a slip of the pen in `backend_options` changes nothing, or ends the run later without a "
    "cause; a field of its options takes any value",
)
def wrong_values_are_refused(paper: Paper) -> None:
    known = type(paper.backend().options).model_fields
    if not known:
        raise NotAsked("it has no options")
    for name in known:
        taken = []
        for value in WRONG_VALUES:
            try:
                paper.registry.create_backend(paper.name, {**paper.options, name: value})
            except AnygaugeError as error:
                assert name in str(error), f"the error does not name {name}: {error}"
            except Exception as error:
                raise AssertionError(
                    f"{name} = {value!r}: {type(error).__name__}: {error}, which says nothing of "
                    "the option"
                ) from error
            else:
                taken.append(value)
        assert len(taken) < len(WRONG_VALUES), (
            f"backend_options.{name} takes anything: {', '.join(map(repr, taken))}"
        )


@check(
    "an instance shares its facets with no other",
    part="basic",
    means="a second run in one process changes the first; a facet is made once, with the class",
)
def facets_are_its_own(paper: Paper) -> None:
    first, second = paper.backend(), paper.backend()
    for facet in ("placement", "graph", "collectives"):
        assert getattr(first, facet) is not getattr(second, facet), f"two instances share {facet}"


@check(
    "instances with other options leave each other as they are",
    part="basic",
    means="what the second run of a process switches off is off in the first, too; a constructor "
    "changes the class",
)
def instances_do_not_interfere(paper: Paper) -> None:
    first = paper.backend()
    before = _description(paper, first)
    for name in type(first.options).model_fields:
        for value in OTHER_VALUES:
            with contextlib.suppress(AnygaugeError):
                paper.registry.create_backend(paper.name, {**paper.options, name: value})
            for what, one in (
                ("an instance that was there", first),
                ("a new one", paper.backend()),
            ):
                for key, text in _description(paper, one).items():
                    assert text == before[key], (
                        f"after another with {name} = {value!r} was made, {what} has other "
                        f"{key}: {before[key]}, then {text}"
                    )
    _own_class(paper, before)


def _own_class(paper: Paper, before: Mapping[str, str]) -> None:
    """What one instance says of itself must not change the next."""
    again = _description(paper, paper.backend())
    for key, text in again.items():
        assert text == before[key], f"a second instance has other {key}: {before[key]}, then {text}"


def _description(paper: Paper, backend: Backend) -> dict[str, str]:
    found = {
        "capabilities": {name: str(backend.support(name)) for name in CAPABILITIES},
        "engine_settings": {
            spec.engine: backend.engine_settings(spec.engine)
            for spec in (provided.spec for provided in paper.registry.strategies)
        },
    }
    for name in (
        *("options", "launch", "kernels", "packed_kernels", "attention"),
        *("unsupported_engines", "libraries", "variables", "files", "readings", "device_type"),
    ):
        found[name] = getattr(backend, name)
    for name in ("limit", "accumulates", "shapes", "compiler"):
        found[f"graph.{name}"] = getattr(backend.graph, name)
    return {name: repr(value) for name, value in found.items()}
