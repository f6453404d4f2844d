"""The kit for backends against `hpu`, on the stand-in for Gaudi's software: it finds what a backend
declares and does not do. Of Gaudi's own arithmetic and speed it can say nothing here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from anygauge.testing import BackendContract
from anygauge.testing.loop_checks import host_kernels
from anygauge.testing.process import Subject
from tests.helpers.gaudi import needs_cards, standin_environment, standin_site

pytestmark = needs_cards


def test_the_host_updates_by_the_formula_of_its_kernel(tmp_path: Path) -> None:
    """Which is chosen where the stand-in is on the path, and only there."""
    environment = standin_environment(standin_site(tmp_path), tmp_path / "record")
    there = Subject(name="hpu", environment=environment)
    assert host_kernels(there, adapter=False)["adamw"] == "early_epsilon"
    assert "early_epsilon" not in host_kernels(Subject(name="cpu"), adapter=True).values()
    with pytest.raises(
        AssertionError, match=r"kernels: the process ended with status 1: .*anygauge backends"
    ):
        host_kernels(Subject(name="nobody"), adapter=True)


class OnStandIn(BackendContract):
    """A release of Gaudi's software and the options of a run; other tests make runs, too."""

    backend = "hpu"
    rank_counts = (2,)
    version: ClassVar[str]

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory: pytest.TempPathFactory) -> Subject:
        """With the stand-in on the path of every process."""
        folder: Path = tmp_path_factory.mktemp("standin")
        environment = standin_environment(standin_site(folder, cls.version), folder / "record")
        return Subject(name=cls.backend, options=cls.options, environment=environment)

    @pytest.fixture(scope="class")
    @classmethod
    def devices(cls) -> int:
        """The stand-in's; this process itself has not got it."""
        return 8


for name, test in vars(BackendContract).items():
    if name.startswith("test_") and "runs" in inspect.signature(test).parameters:
        setattr(OnStandIn, name, pytest.mark.slow(test))


class TestLazy(OnStandIn):
    """Graphs that are accumulated, and cut at a limit that the kit can reach."""

    version = "1.20.0"
    options: ClassVar[Mapping[str, Any]] = {"mode": "lazy", "graph_limit": 50}


class TestCompiled(OnStandIn):
    """Decoder layers that are compiled."""

    version = "1.21.0"
