"""Checks on the kit's own processes, judged once they have ended: an answer may be the last word.

A device that gives every answer and then aborts would end its users' runs in the same way.
"""

from __future__ import annotations

from anygauge.testing.check import check


@check("the process had the backend's environment, and ended with status 0", part="basic")
def ends_on_paper(trouble: str) -> None:
    """It was asked without a device."""
    if trouble:
        raise AssertionError(trouble)


@check(
    "the process had the backend's environment, closed the device and ended with status 0",
    part="device",
)
def ends_on_device(trouble: str) -> None:
    """`Backend.close` is the last that it does."""
    if trouble:
        raise AssertionError(trouble)


@check(
    "every rank had the backend's environment, closed its device and ended with status 0",
    part="ranks",
)
def ends_on_ranks(trouble: str) -> None:
    """One that is missing would hide behind the answers of the others."""
    if trouble:
        raise AssertionError(trouble)


AFTERWARDS = frozenset(each.__name__ for each in (ends_on_paper, ends_on_device, ends_on_ranks))
"""Names of the checks that no process can be asked about itself; they get its trouble."""
