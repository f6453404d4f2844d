"""Forked ranks of a device with buckets, which the run's name says whether it warms up."""

from __future__ import annotations

from typing import Any
from unittest import mock

from anygauge.interface import Graph, ShapeKind, ShapePolicy
from tests.helpers import forked

COLD = ShapePolicy(kind=ShapeKind.BUCKETED, multiple=8, buckets=12)
WARM = ShapePolicy(kind=ShapeKind.BUCKETED, multiple=8, buckets=12, warm_up=2)


def prepared(prepare_run: Any) -> Any:
    """The processes of all runs begin alike; a run's name is the first that differs."""

    def preparing(job: Any, run: Any, *args: Any) -> Any:
        with mock.patch.object(Graph, "shapes", WARM if run.name == "warm" else COLD):
            return prepare_run(job, run, *args)

    return preparing


if __name__ == "__main__":
    from anygauge.training import setup

    with mock.patch.object(setup, "prepare_run", prepared(setup.prepare_run)):
        forked.main()
