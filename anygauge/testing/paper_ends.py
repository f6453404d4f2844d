"""Checks of what a backend leaves behind on paper: commands import, probe, make and ask it.

There is a note of the process after each check of this part; a change is laid to the check during
which it came.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from anygauge.testing.basic import NODE, Paper
from anygauge.testing.check import CHECKS, check
from anygauge.testing.surroundings import ANNOUNCED, Surroundings, changed, entries

PROBED, MADE, ASKED = "probed", "made", "asked"
WHEN = {
    ANNOUNCED: "when the plugin was imported",
    PROBED: "when it was probed",
    MADE: "when one was made",
    ASKED: "when it was asked for the environment",
}
INSTANCES = 8
"""How many are made one after the other, to see whether each takes a descriptor."""


def _notes(paper: Paper) -> dict[str, Surroundings]:
    """Of all steps until now, and of some that are taken again."""
    steps: dict[str, Callable[[], Any]] = {
        PROBED: paper.spec.probe,
        MADE: paper.backend,
        ASKED: lambda: [paper.backend().environment(job, NODE) for job in paper.jobs()],
    }
    for step, take in steps.items():
        if step not in paper.course.notes:
            with contextlib.suppress(Exception):  # other checks are about what it raises
                take()
            paper.course.note(step)
    return paper.course.notes


def _left_alone(paper: Paper, what: str, *, more: bool = False) -> None:
    """Fail if one of `Surroundings`' mappings has changed; `more`: further names are no change."""
    notes = _notes(paper)
    for before, after in pairwise(notes):
        found = changed(getattr(notes[before], what), getattr(notes[after], what), more=more)
        assert not found, f"{_during(after)}: {'; '.join(found)}"


def _during(step: str) -> str:
    """What was done before a note was made."""
    if step in WHEN:
        return WHEN[step]
    return f"when it was asked whether {CHECKS[step].title} ({step})"


@check(
    "importing, probing, making and asking it print nothing to standard output",
    part="basic",
    means="`anygauge backends --json` and others give what no program can read; a library's "
    "banner, or a print that was left in",
)
def paper_prints_nothing(paper: Paper) -> None:
    notes = _notes(paper)
    for before, after in pairwise(notes):
        printed = notes[after].printed[len(notes[before].printed) :]
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
    notes = _notes(paper)
    for before, after in pairwise(notes):
        left = notes[after].files - notes[before].files
        assert not left, f"{_during(after)}: {', '.join(sorted(left)[:8])}"


@check(
    "no thread and no process is started on paper",
    part="basic",
    means="commands do not end, or helpers pile up; a probe that starts the vendor's service or "
    "leaves its tool running",
)
def paper_starts_nothing(paper: Paper) -> None:
    _notes(paper)
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
        counts.append(entries("/proc/self/fd"))
    growing = all(after > before for before, after in pairwise(counts[1:]))
    assert not growing, f"open descriptors grow with each: {', '.join(map(str, counts))}"
