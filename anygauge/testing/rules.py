"""Checks of a backend's environment: what its rules may read, and which values are the same."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from anygauge.interface import (
    AnygaugeError,
    Job,
    LaunchSettings,
    NetworkInterface,
    Node,
    RdmaDevice,
    Scope,
    Setting,
)
from anygauge.testing.check import of_type, sharding_spec
from anygauge.testing.paper import Paper, check_on_paper, process_unchanged

VALUES = (None, "", "0", "1", "7", "another")
"""What a variable that was read is set to in turn; None removes it."""
RANKS = 8
OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that anygauge sets for each rank."""
JOB = Job(
    name="conformance",
    run_directory="/nowhere/conformance",
    run_file="/nowhere/conformance/run.yaml",
    backend="any",
    launch=LaunchSettings(devices=2),
    rendezvous="file:///nowhere/rendezvous",
)
NODE = Node(
    hostname="node0",
    cores=tuple(range(8)),
    physical_cores=4,
    interfaces=(
        NetworkInterface(name="lo", up=True, physical=False, loopback=True),
        NetworkInterface(name="eth0", up=True, physical=True),
    ),
    libraries={"torch": "2.13.0"},
)
OTHER_NODE = replace(
    NODE,
    rank=1,
    hostname="another-node",
    cores=tuple(range(100, 148)),
    physical_cores=24,
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


def jobs(paper: Paper) -> list[Job]:
    """Make jobs of one machine, of two, and of two with eight devices each."""
    options, strategy = paper.options, sharding_spec().name
    one = replace(JOB, backend=paper.name, backend_options=options, strategy=strategy)
    two = replace(one, rendezvous="tcp://node0:29400")
    launches = (LaunchSettings(nodes=2, devices=devices) for devices in (2, RANKS))
    return [one, *(replace(two, launch=launch) for launch in launches)]


def _settings(paper: Paper) -> list[list[Setting]]:
    """Return the settings for each job, without and with a local rank."""
    backend = paper.backend()
    return [
        list(backend.environment(job, NODE, rank)) for job in jobs(paper) for rank in (None, 0, 1)
    ]


def _difference(before: Sequence[Sequence[Setting]], after: Sequence[Sequence[Setting]]) -> str:
    """The first setting that is not the same in both, in words; empty if there is none."""
    for first, second in zip(before, after, strict=True):
        was, now = ({each.name: each for each in settings} for settings in (first, second))
        for name in {**was, **now}:
            if was.get(name) != now.get(name):
                values = [each[name].value if name in each else "not set" for each in (was, now)]
                return f"{name} was {values[0]!r}, and is {values[1]!r}"
    return ""


@check_on_paper(
    "every setting has a name, a value of text, a reason and a source, and is set once",
    means="users see a variable without knowing why, or ranks get another value than is explained; "
    "a rule without reason, a number in place of text, or two rules for one variable",
)
def settings_are_sound(paper: Paper) -> None:
    for settings in _settings(paper):
        for setting in settings:
            of_type("a setting", setting, Setting)
            name = setting.name
            assert name and "=" not in name, f"{name!r} is not a variable"
            of_type(f"{name}: its value", setting.value, str | None)
            assert setting.reason.strip(), f"{name}: no reason"
            assert setting.source.strip(), f"{name}: no source"
        names = [setting.name for setting in settings]
        twice = sorted({name for name in names if names.count(name) > 1})
        assert not twice, f"set twice: {', '.join(twice)}"
        taken = sorted(set(names) & set(OWN))
        assert not taken, f"anygauge sets {', '.join(taken)} for each rank"


@check_on_paper(
    "a value has its scope: the job's is one on every machine, a node's one for all its ranks",
    means="machines or ranks of one job run with contradicting settings, and collectives hang; a "
    "value that is made of the node or the local rank has that scope",
)
def scopes_hold(paper: Paper) -> None:
    backend = paper.backend()
    for job in jobs(paper)[1:]:
        firsts: dict[str, dict[str, Any]] = {}
        for node, rank in itertools.product((NODE, OTHER_NODE), (None, *range(job.launch.devices))):
            found = backend.environment(job, node, rank)
            who = f"on {node.hostname} for {'no rank' if rank is None else f'rank {rank}'}"
            ranked = [each.name for each in found if each.scope is Scope.RANK]
            assert rank is not None or not ranked, f"{ranked} {who} has scope rank"
            shared = {node.hostname: (Scope.NODE, Scope.JOB), "the job": (Scope.JOB,)}
            for whose, scopes in shared.items():
                own = {each.name: each.value for each in found if each.scope in scopes}
                first = firsts.setdefault(whose, own)
                for name in {**first, **own}:
                    was, now = (each.get(name, "not set") for each in (first, own))
                    assert was == now, (
                        f"{name} has scope {scopes[0].value}, and is {now!r} {who}, {was!r} before"
                    )


@contextlib.contextmanager
def _other_process() -> Iterator[None]:
    """Another host name, number of processors and working folder."""
    count = (os.cpu_count() or 1) + 3
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        mock.patch.object(socket, "gethostname", lambda: "elsewhere"),
        mock.patch.object(socket, "getfqdn", lambda name="": "elsewhere.example"),
        mock.patch.object(platform, "node", lambda: "elsewhere"),
        mock.patch.object(os, os.cpu_count.__name__, lambda: count),
        mock.patch.object(os, "sched_getaffinity", lambda process: set(range(count))),
    ):
        yield


@check_on_paper(
    "the environment is a function of the job and the node alone: the same for the same, whatever "
    "the process and its machine are, and nothing is changed",
    means="`anygauge env` shows other settings than the job gets, or ranks get different ones: a "
    "rule draws numbers, reads clocks, or reads what only the command has; name variables in "
    "`Backend.variables` and read `Node.variables`",
)
def rules_read_the_node_alone(paper: Paper) -> None:
    kind = type(os.environ)
    reads = mock.patch.object(kind, "__getitem__", autospec=True, side_effect=kind.__getitem__)
    with process_unchanged("asking for the environment"), reads as read:
        usual = _settings(paper)
        found = _difference(usual, _settings(paper))
    assert not found, f"two calls with the same arguments differ: {found}"
    with _other_process():
        found = _difference(usual, _settings(paper))
    assert not found, f"with another host name, number of processors and folder: {found}"
    names = sorted({call.args[1] for call in read.call_args_list})
    for name, value in itertools.product(names, VALUES):
        with mock.patch.dict(os.environ):
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
            try:
                found = _difference(usual, _settings(paper))
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
        assert not found, f"with os.environ[{name!r}] = {value!r}: {found}"


@check_on_paper(
    "rules have an answer for a machine that shows nothing, and for any version",
    means="the run ends with a KeyError before it begins, on a new release or in a small "
    "container; a rule takes for granted what `Node` may lack",
)
def rules_hold_on_any_machine(paper: Paper) -> None:
    backend = paper.backend()
    libraries = ("torch", *backend.libraries)
    nodes = {"that shows nothing": Node(), "without network": replace(NODE, interfaces=())}
    for version in VERSIONS:
        of = f"with version {version!r} of {', '.join(libraries)}"
        nodes[of] = replace(NODE, libraries=dict.fromkeys(libraries, version))
    for (what, node), job in itertools.product(nodes.items(), jobs(paper)):
        for rank in (None, 0, job.launch.devices - 1):
            try:
                list(backend.environment(job, node, rank))
            except AnygaugeError:
                pass  # a refusal in words
            except Exception as error:
                said = f"on a machine {what}: {type(error).__name__}: {error}"
                raise AssertionError(said) from error
