"""Checks of the rules on paper: what they may read, and where their values are the same."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from anygauge.interface import (
    AnygaugeError,
    Backend,
    Job,
    LaunchSettings,
    Level,
    NetworkInterface,
    Node,
    RdmaDevice,
    Scope,
    Setting,
)
from anygauge.testing.basic import NODE, Paper
from anygauge.testing.check import check

VALUES = (None, "", "0", "1", "7", "another")
"""What a variable that was read is set to in turn; None removes it."""
RANKS = 8
OTHER_NODE = dataclasses.replace(
    NODE,
    rank=1,
    hostname="another-node",
    cores=tuple(range(100, 148)),
    physical_cores=24,
    memory_bytes=2**40,
    interfaces=(
        NetworkInterface(name="lo0", up=True, physical=False, loopback=True),
        NetworkInterface(name="ens9f1", up=True, physical=True),
        NetworkInterface(name="ib7", up=True, physical=True),
    ),
    rdma_devices=(RdmaDevice(name="mlx5_7", driver="mlx5_core", link_layer="InfiniBand"),),
)
"""Another machine of a job: nothing but the versions of libraries and the user's variables are as
on the first, which users have the same everywhere."""
VERSIONS = ("2.15.0a0+git1a2b3c4", "2.15.0.dev20260801+vendor9", "1", "unknown", "")
EMPTY_WORDS = ("todo", "tbd", "fixme", "n/a", "none", "unknown", "reason", "xxx")


@contextlib.contextmanager
def _recorded() -> Iterator[set[str]]:
    """The names of variables that are read meanwhile."""
    read: set[str] = set()
    usual = type(os.environ).__getitem__

    def note(self: Any, name: str) -> str:
        read.add(name)
        return usual(self, name)

    with mock.patch.object(type(os.environ), "__getitem__", note):
        yield read


def _settings(backend: Backend, paper: Paper) -> list[list[Setting]]:
    return [
        list(backend.environment(job, NODE, rank)) for job in paper.jobs() for rank in (None, 0, 1)
    ]


def _differences(before: Sequence[Sequence[Setting]], after: Sequence[Sequence[Setting]]) -> str:
    """The first setting that is not the same in both, in words; empty if there is none."""
    for first, second in zip(before, after, strict=True):
        was = {each.name: each for each in first}
        now = {each.name: each for each in second}
        for name in [*was, *(name for name in now if name not in was)]:
            if was.get(name) != now.get(name):
                values = [each[name].value if name in each else "not set" for each in (was, now)]
                return f"{name} was {values[0]!r}, and is {values[1]!r}"
    return ""


@check(
    "rules read the job and the node, not the variables of the process that asks",
    part="basic",
    means="`anygauge env` shows other settings than the job gets, since a node's agent has other "
    "variables than the command; name them in `Backend.variables` and read `Node.variables`",
)
def rules_read_no_variables(paper: Paper) -> None:
    backend = paper.backend()
    with _recorded() as read:
        usual = _settings(backend, paper)
    for name in sorted(read):
        for value in VALUES:
            changes = {} if value is None else {name: value}
            with mock.patch.dict(os.environ, changes):
                if value is None:
                    os.environ.pop(name, None)
                try:
                    found = _differences(usual, _settings(backend, paper))
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"
            assert not found, f"with os.environ[{name!r}] = {value!r}: {found}"


@check(
    "rules read the node that they are given, not the machine that they run on",
    part="basic",
    means="a job of several machines gets the settings of the one that started it; "
    "`os.sched_getaffinity`, `socket.gethostname` or the working folder stand in a rule",
)
def rules_read_no_machine(paper: Paper) -> None:
    backend = paper.backend()
    usual = _settings(backend, paper)
    for what, elsewhere in _ELSEWHERE.items():
        with elsewhere():
            found = _differences(usual, _settings(backend, paper))
        assert not found, f"with another {what}: {found}"


@contextlib.contextmanager
def _another_name() -> Iterator[None]:
    with (
        mock.patch.object(socket, "gethostname", lambda: "elsewhere"),
        mock.patch.object(socket, "getfqdn", lambda name="": "elsewhere.example"),
        mock.patch.object(platform, "node", lambda: "elsewhere"),
    ):
        yield


@contextlib.contextmanager
def _other_processors() -> Iterator[None]:
    count = (os.cpu_count() or 1) + 3
    with (
        mock.patch.object(os, os.cpu_count.__name__, lambda: count),
        mock.patch.object(os, "sched_getaffinity", lambda process: set(range(count))),
    ):
        yield


@contextlib.contextmanager
def _another_folder() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


_ELSEWHERE: Mapping[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "host name": _another_name,
    "number of processors": _other_processors,
    "working folder": _another_folder,
}


@check(
    "what has the scope of the job is the same on every machine of it",
    part="basic",
    means="machines of one job run with contradicting settings, and collectives hang; a value that "
    "is made of the node has scope node",
)
def job_scope_is_one_value(paper: Paper) -> None:
    backend = paper.backend()
    for job in (paper.jobs()[1], _wide(paper)):
        here, there = (
            {
                setting.name: setting.value
                for setting in backend.environment(job, node, None)
                if setting.scope is Scope.JOB
            }
            for node in (NODE, OTHER_NODE)
        )
        for name in [*here, *(name for name in there if name not in here)]:
            values = [each.get(name, "not set") for each in (here, there)]
            assert values[0] == values[1], (
                f"{name} has scope job, and is {values[0]!r} on {NODE.hostname}, {values[1]!r} on "
                f"{OTHER_NODE.hostname}"
            )


@check(
    "what has the scope of a node or of the job is the same for every rank of it",
    part="basic",
    means="ranks of one machine contradict each other; a value that is made of the local rank has "
    "scope rank",
)
def node_scope_is_one_value(paper: Paper) -> None:
    backend, job = paper.backend(), _wide(paper)
    for node in (NODE, OTHER_NODE):
        first: dict[str, Setting] | None = None
        for rank in range(RANKS):
            found = {
                setting.name: setting
                for setting in backend.environment(job, node, rank)
                if setting.scope is not Scope.RANK
            }
            first = found if first is None else first
            for name in [*first, *(name for name in found if name not in first)]:
                assert first.get(name) == found.get(name), (
                    f"{name} is not of scope rank, and is {_value(first, name)} for rank 0, "
                    f"{_value(found, name)} for rank {rank}"
                )


def _value(settings: Mapping[str, Setting], name: str) -> str:
    return repr(settings[name].value) if name in settings else "not set"


def _wide(paper: Paper) -> Job:
    return dataclasses.replace(paper.jobs()[1], launch=LaunchSettings(nodes=2, devices=RANKS))


@check(
    "rules have an answer for a machine that shows nothing, and for any version",
    part="basic",
    means="the run ends with a KeyError before it begins, on a new release or in a small "
    "container; a rule takes for granted what `Node` may lack",
)
def rules_hold_on_any_machine(paper: Paper) -> None:
    backend = paper.backend()
    libraries = ("torch", *backend.libraries)
    nodes = {
        "that shows nothing": Node(),
        "without network": dataclasses.replace(NODE, interfaces=()),
        **{
            f"with version {version!r} of {', '.join(libraries)}": dataclasses.replace(
                NODE, libraries=dict.fromkeys(libraries, version)
            )
            for version in VERSIONS
        },
    }
    for what, node in nodes.items():
        for job in (*paper.jobs(), _wide(paper)):
            for rank in (None, 0, job.launch.devices - 1):
                try:
                    list(backend.environment(job, node, rank))
                except AnygaugeError:
                    pass  # a refusal in words
                except Exception as error:
                    raise AssertionError(
                        f"on a machine {what}: {type(error).__name__}: {error}"
                    ) from error


@check(
    "no variable is set twice, and none that anygauge sets for every rank",
    part="basic",
    means="the value that ranks get is not the one that is explained, or a rank takes itself for "
    "another; two rules for one variable",
)
def variables_are_set_once(paper: Paper) -> None:
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for settings in _settings(paper.backend(), paper):
        names = [setting.name for setting in settings]
        twice = sorted({name for name in names if names.count(name) > 1})
        assert not twice, f"set twice: {', '.join(twice)}"
        taken = sorted(set(names) & set(own))
        assert not taken, f"anygauge sets {', '.join(taken)} for each rank"


@check(
    "every reason is words: of capabilities that are not full, and of engines that are refused",
    part="basic",
    means="users are refused something and do not learn why; a placeholder was left",
)
def reasons_are_words(paper: Paper) -> None:
    backend = paper.backend()
    reasons = {
        f"capabilities[{name!r}]": support.reason
        for name, support in backend.capabilities.items()
        if support.level is not Level.FULL
    }
    reasons |= {
        f"unsupported_engines[{n!r}]": text for n, text in backend.unsupported_engines.items()
    }
    reasons["attention_why"] = backend.attention_why
    for where, reason in reasons.items():
        plain = reason.strip().lower().rstrip(".!:")
        words = len(plain) > 2 and any(letter.isalpha() for letter in plain)
        assert words and plain not in EMPTY_WORDS, f"{where}: {reason!r} gives no reason"
        assert "\n" not in reason, f"{where}: more than a line"


@check(
    "what is switched off names the option that does it",
    part="basic",
    means="users do not find out how to switch it on; the reason lacks the option's name",
)
def switches_are_named(paper: Paper) -> None:
    backend = paper.backend()
    options = type(backend.options).model_fields
    for name, support in backend.capabilities.items():
        if support.level is Level.SWITCHED_OFF:
            assert any(option in support.reason for option in options), (
                f"{name} is switched off, and its reason, {support.reason!r}, names none of "
                f"the backend's options ({', '.join(options) or 'it has none'})"
            )
