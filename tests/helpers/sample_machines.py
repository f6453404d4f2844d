"""Jobs and machines to work out environments for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from anygauge.interface import Job, NetworkInterface, Node, Setting
from tests.helpers.jobs import make_job

LO = NetworkInterface(name="lo", up=True, physical=False, loopback=True)
ETH0 = NetworkInterface(name="eth0", up=True, physical=True)
ETH1 = NetworkInterface(name="eth1", up=True, physical=True)
DOWN = NetworkInterface(name="eth9", up=False, physical=True)
BRIDGE = NetworkInterface(name="docker0", up=True, physical=False)
VIRTUAL = NetworkInterface(name="veth0", up=True, physical=False)


def job(nodes: int = 1, devices: int = 1, **fields: Any) -> Job:
    """A job of so many machines and ranks on each."""
    return make_job(
        run_directory="/runs/run",
        nodes=nodes,
        devices=devices,
        **{"backend": "any", "strategy": "zero", "rendezvous": "tcp://head:29500", **fields},
    )


def by_name(settings: Any) -> Mapping[str, Setting]:
    """Settings by their name; one name twice is a mistake."""
    names = [setting.name for setting in settings]
    assert len(names) == len(set(names)), names
    return {setting.name: setting for setting in settings}


def assert_pure(compute: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls agree, and neither looks at the process's environment or opens a file."""

    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError(f"not pure: {arguments} {keywords}")

    first = compute()
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", None)
        patch.setattr(os, "getenv", refuse)
        patch.setattr("builtins.open", refuse)
        patch.setattr("pathlib.Path.open", refuse)
        patch.setattr("io.open", refuse)
        second = compute()
    assert first == second


def machine(cores: int = 8, threads_per_core: int = 1, **fields: Any) -> Node:
    """A machine of so many physical cores."""
    return Node(
        cores=tuple(range(cores * threads_per_core)),
        physical_cores=cores,
        interfaces=fields.pop("interfaces", (LO, ETH0)),
        **fields,
    )
