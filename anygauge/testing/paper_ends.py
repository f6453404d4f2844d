"""Checks of what a backend leaves behind on paper: commands import, probe, make and ask it.

There is a note of the process after each check of this part; a change is laid to the check during
which it came.
"""

from __future__ import annotations

import os
from itertools import pairwise

from anygauge.testing.basic import Paper
from anygauge.testing.check import CHECKS, check
from anygauge.testing.surroundings import ANNOUNCED, changed

INSTANCES = 8
"""How many are made one after the other, to see whether each takes a descriptor."""


def _left_alone(paper: Paper, what: str, *, more: bool = False) -> None:
    """Fail if one of `Surroundings`' mappings has changed; `more`: further names are no change."""
    notes = paper.course.notes
    for before, after in pairwise(notes):
        found = changed(getattr(notes[before], what), getattr(notes[after], what), more=more)
        assert not found, f"{_during(after)}: {'; '.join(found)}"


def _during(step: str) -> str:
    """What was done before a note was made."""
    if step == ANNOUNCED:
        return "when the plugin was imported"
    return f"when it was asked whether {CHECKS[step].title} ({step})"


@check(
    "importing, probing, making and asking it print nothing to standard output",
    part="basic",
    means="`anygauge backends --json` and others give what no program can read; a library's banner, "
    "or a print that was left in",
)
def paper_prints_nothing(paper: Paper) -> None:
    for before, after in pairwise(paper.course.notes):
        printed = paper.course.notes[after].printed[len(paper.course.notes[before].printed) :]
        assert not printed, f"{_during(after)} it printed {printed[:80]!r}"


@check(
    "importing, probing, making and asking it leave the handlers of signals alone",
    part="basic",
    means="Ctrl-C does nothing in any command; a vendor's library installs handlers when it is "
    "imported",
)
def paper_leaves_signals(paper: Paper) -> None:
    _left_alone(paper, "signals")


@check(
    "importing, probing, making and asking it leave all variables alone",
    part="basic",
    means="whatever the command starts has settings that nobody explains; a module sets defaults "
    "for its library when it is imported",
)
def paper_leaves_variables(paper: Paper) -> None:
    _left_alone(paper, "environ")


@check(
    "importing, probing, making and asking it leave the working folder, umask, locale, warnings, "
    "logging and number formats of the process alone",
    part="basic",
    means="every command of anygauge behaves differently where the plugin is installed; a module "
    "sets up the process as if it were its own",
)
def paper_leaves_process(paper: Paper) -> None:
    _left_alone(paper, "process")


@check(
    "importing, probing, making and asking it leave processors, priority and torch's settings "
    "alone",
    part="basic",
    means="commands are slow, or a run's settings are others than it says; what belongs in `open` "
    "is done when the backend is made",
)
def paper_leaves_settings(paper: Paper) -> None:
    for what in ("placed", "torch"):  # torch's are there once diagnostics have imported it
        _left_alone(paper, what, more=True)


@check(
    "importing, probing, making and asking it write no file to the working folder",
    part="basic",
    means="files appear wherever a user types a command; a library's log or cache",
)
def paper_leaves_no_file(paper: Paper) -> None:
    for before, after in pairwise(paper.course.notes):
        left = paper.course.notes[after].files - paper.course.notes[before].files
        assert not left, f"{_during(after)}: {', '.join(sorted(left)[:8])}"


@check(
    "no thread and no process is started on paper",
    part="basic",
    means="commands do not end, or helpers pile up; a probe that starts the vendor's service or "
    "leaves its tool running",
)
def paper_starts_nothing(paper: Paper) -> None:
    threads, helpers = paper.course.threads_left(), paper.course.helpers_left()
    assert not threads, f"threads that keep the process from ending: {', '.join(threads)}"
    assert not helpers, f"processes that still run: {'; '.join(each[:80] for each in helpers)}"


@check(
    "making one and probing take no descriptors",
    part="basic",
    means="services that list backends run out of descriptors; a device file that is opened and "
    "not closed",
)
def paper_opens_no_descriptor(paper: Paper) -> None:
    kept = []
    counts = []
    for _ in range(INSTANCES):
        kept.append(paper.backend())
        paper.spec.probe()
        counts.append(len(os.listdir("/proc/self/fd")))
    growing = all(after > before for before, after in pairwise(counts[1:]))
    assert not growing, f"open descriptors grow with each: {', '.join(map(str, counts))}"
