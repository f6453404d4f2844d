"""Checks of what a backend leaves behind: asked in its process once it was opened, used and closed.

Those of one device and those of several ranks ask the same of the process; only ranks have groups.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from anygauge.interface import AnygaugeError
from anygauge.testing.check import check
from anygauge.testing.surroundings import CLOSED, OPENED, START, USED, Course, changed, entries

STEPS = (("importing, making and opening it", START, OPENED), ("closing it", USED, CLOSED))
"""Steps of which each must leave alone what it does not own."""
FIRST, MORE = 3, 6
"""Openings after which descriptors and threads are counted, and those that must not add any."""


def _left_alone(course: Course, what: str, *, more: bool = False) -> None:
    """Fail unless one of `Surroundings`' mappings is the same before and after each of `STEPS`."""
    for step, before, after in STEPS:
        found = changed(
            getattr(course.notes[before], what), getattr(course.notes[after], what), more=more
        )
        assert not found, f"{step} changed: {'; '.join(found)}"


def _prints_nothing(course: Course) -> None:
    for step, before, after in STEPS:
        printed = course.notes[after].printed[len(course.notes[before].printed) :]
        assert not printed, f"{step} printed to standard output: {printed[:80]!r}"


def _leaves_no_file(course: Course) -> None:
    left = sorted(course.notes[CLOSED].files - course.notes[START].files)
    assert not left, f"left behind in the working folder: {', '.join(left[:8])}"


def _leaves_no_thread(course: Course) -> None:
    left = course.threads_left()
    assert not left, f"threads that keep the process from ending: {', '.join(left)}"


def _leaves_no_helper(course: Course) -> None:
    left = course.helpers_left()
    assert not left, f"processes that still run: {'; '.join(each[:80] for each in left)}"


def _leaves_nothing_running(course: Course) -> None:
    _leaves_no_helper(course)
    _leaves_no_thread(course)


# -- one device -----------------------------------------------------------------------------------


@check(
    "opening and closing print nothing to standard output",
    part="device",
    of_the_close=True,
    means="commands with --json give what no program can read; a library's banner, or a print that "
    "was left in",
)
def device_prints_nothing(course: Course) -> None:
    _prints_nothing(course)


@check(
    "opening and closing leave the handlers of signals alone",
    part="device",
    of_the_close=True,
    means="a run that is asked to end writes no checkpoint, or Ctrl-C does nothing; a driver's "
    "library installs handlers when it is loaded",
)
def device_leaves_signals(course: Course) -> None:
    _left_alone(course, "signals")


@check(
    "opening and closing leave the variables that were set alone",
    part="device",
    of_the_close=True,
    means="processes that start later get other settings than the job's; a library corrects "
    "variables for itself",
)
def device_leaves_variables(course: Course) -> None:
    _left_alone(course, "environ", more=True)


@check(
    "opening and closing leave the working folder, umask, locale, warnings, logging and number "
    "formats of the process alone",
    part="device",
    of_the_close=True,
    means="files land in another place, warnings vanish or results of the host change; a library "
    "sets up the process as if it were its own",
)
def device_leaves_process(course: Course) -> None:
    _left_alone(course, "process")


@check(
    "opening and closing leave torch's settings alone: default type and device, gradients, "
    "determinism, precision",
    part="device",
    of_the_close=True,
    means="weights have another type, or losses differ from those of other devices; a plugin sets "
    "what is best for benchmarks",
)
def device_leaves_torch(course: Course) -> None:
    _left_alone(course, "torch")


@check(
    "closing gives the process its processors, threads and priority back",
    part="device",
    of_the_close=True,
    means="what the process does afterwards is slow; `open` binds it, and `close` does not undo it",
)
def device_restores_processors(course: Course) -> None:
    found = changed(course.notes[START].placed, course.notes[CLOSED].placed)
    assert not found, f"after closing: {'; '.join(found)}"


@check(
    "no thread is left that keeps the process from ending",
    part="device",
    of_the_close=True,
    means="runs end and their processes stay, with the device; a watching thread is not joined",
)
def device_leaves_no_thread(course: Course) -> None:
    _leaves_no_thread(course)


@check(
    "no helper process is left",
    part="device",
    of_the_close=True,
    means="processes pile up on the machine and may hold the device; a server or profiler of the "
    "vendor that `close` does not end",
)
def device_leaves_no_helper(course: Course) -> None:
    _leaves_no_helper(course)


@check(
    "no file is left in the working folder",
    part="device",
    of_the_close=True,
    means="users find dumps and caches beside their run files; compilers and loggers write to "
    "where they are started unless a variable says otherwise",
)
def device_leaves_no_file(course: Course) -> None:
    _leaves_no_file(course)


@check(
    "opening and closing again and again takes no more descriptors and threads",
    part="device",
    of_the_close=True,
    means="long processes that open devices, such as servers and tests, run out of descriptors; "
    "`close` forgets what `open` has made",
    limit_s=120,
)
def opens_again_and_again(course: Course) -> None:
    assert course.fresh is not None
    counts: list[tuple[int, int]] = []
    for _ in range(FIRST + MORE):
        backend = course.fresh()
        try:
            backend.open(0)
        except AnygaugeError as error:
            raise AssertionError(f"it cannot be opened after it was closed: {error}") from error
        backend.close()
        counts.append((entries("/proc/self/fd"), entries("/proc/self/task")))
    for what, numbers in zip(("descriptors", "threads"), zip(*counts, strict=True), strict=True):
        steady = numbers[FIRST - 1 :]
        # Caches may add a few now and then; what is forgotten adds some each time.
        growing = all(after > before for before, after in pairwise(steady))
        assert not growing, f"open {what} grow with each opening: {', '.join(map(str, steady))}"


# -- several ranks --------------------------------------------------------------------------------


@check(
    "closing leaves no process group",
    part="ranks",
    of_the_close=True,
    means="a second run in one process cannot make its groups, or ranks wait for each other at the "
    "end; `close` overrides that of the core and forgets the groups",
)
def leaves_no_group(course: Course) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    from torch.distributed import distributed_c10d as groups

    count = len(groups._world.pg_map)
    raise AssertionError(f"torch.distributed is still initialised, with {count} groups")


def _ranks(title: str, means: str, name: str, function: Callable[[Course], None]) -> None:
    """Register a check of one device again, for ranks that were together."""

    def asked(course: Course) -> None:
        function(course)

    asked.__name__ = name
    check(title, part="ranks", of_the_close=True, means=means)(asked)


_ranks(
    "joining and leaving a group print nothing to standard output",
    "the output of runs in one process is not what programs can read; a library's banner",
    "ranks_print_nothing",
    _prints_nothing,
)
_ranks(
    "joining and leaving a group leave the handlers of signals alone",
    "a run that is asked to end writes no checkpoint; the library of collectives installs handlers "
    "of its own",
    "ranks_leave_signals",
    lambda course: _left_alone(course, "signals"),
)
_ranks(
    "joining and leaving a group leave the variables that were set alone",
    "processes that start later get other settings than the job's; a library corrects variables "
    "for itself",
    "ranks_leave_variables",
    lambda course: _left_alone(course, "environ", more=True),
)
_ranks(
    "no helper process and no thread is left of a group",
    "processes pile up on the machine, or ranks do not end; a proxy or watchdog of the library of "
    "collectives",
    "ranks_leave_nothing_running",
    _leaves_nothing_running,
)
_ranks(
    "no file is left of a group in the working folder",
    "users find the library's logs beside their run files",
    "ranks_leave_no_file",
    _leaves_no_file,
)
