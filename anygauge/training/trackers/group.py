"""A run's trackers: checked before ranks start, then each in a thread of its own; no torch.

The thread is why none of them can slow or stop training.
"""

from __future__ import annotations

import functools
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from anygauge.config.schema import RunFile
from anygauge.interface import (
    AnygaugeError,
    NotAvailableError,
    RunFileError,
    RunStatus,
    Tracker,
    TrackerContext,
)
from anygauge.registry import Registry
from anygauge.registry.specs import load_factory, read_options, refuse_if_missing
from anygauge.util.hiding import is_secret
from anygauge.util.text import describe, flatten_values

OPEN_S = 120.0
"""Seconds in which a tracker must open."""
CLOSE_S = 30.0
"""Seconds in which all trackers together must close."""
LONGEST_QUEUE = 10_000
"""Records that may wait for a tracker that is slower than training."""
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
"""User and password in an address."""


class Trackers:
    """All trackers of a run; on ranks other than 0 there are none.

    Attributes:
        troubles: what went wrong with trackers, a sentence each, shown as a warning at the time.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Tracker]],
        warn: Callable[[str], None],
        *,
        open_s: float = OPEN_S,
        close_s: float = CLOSE_S,
    ) -> None:
        """Open all of them.

        Args:
            makers: name -> what makes the tracker, in its own thread.
            warn: shows a warning to the user; called from any thread.

        Raises:
            AnygaugeError: one cannot be opened, or not in time; the others were closed.
        """
        self.troubles: list[str] = []
        self._warn = warn
        self._close_s = close_s
        self._threads = [_TrackerThread(name, make, self._warn_of) for name, make in makers.items()]
        deadline = time.monotonic() + open_s
        try:
            for thread in self._threads:
                thread.wait_until_open(deadline)
        except BaseException:
            self.close("failed", {})
            raise

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`; returns at once and never raises."""
        for thread in self._threads:
            thread.log(step, metrics)

    def close(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """See `Tracker.close`; returns in time and never raises. Further calls do nothing."""
        threads, self._threads = self._threads, []
        deadline = time.monotonic() + self._close_s
        for thread in threads:
            thread.end(status, summary)
        for thread in threads:
            thread.join(deadline)

    def _warn_of(self, text: str) -> None:
        self.troubles.append(text)
        self._warn(text)


class _TrackerThread:
    """One tracker and the thread that makes, feeds and closes it."""

    def __init__(
        self, name: str, make: Callable[[], Tracker], trouble: Callable[[str], None]
    ) -> None:
        self._title = f"tracker {name!r}"
        self._make = make
        self._trouble = trouble
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue()
        self._end: tuple[RunStatus, Mapping[str, float]] = ("failed", {})
        self._error: BaseException | None = None
        self._open = threading.Event()
        self._dropped = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def wait_until_open(self, deadline: float) -> None:
        in_time = self._open.wait(max(0.0, deadline - time.monotonic()))
        if in_time and self._error is None:
            return
        self._dropped = True
        if isinstance(self._error, AnygaugeError):
            raise self._error
        why = "did not start in time; is its server reachable?"
        if self._error is not None:
            why = f"could not start: {describe(self._error)}."
        raise AnygaugeError(
            f"{self._title} {why} Remove it from trackers to train without it"
        ) from self._error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._dropped:
            return
        if self._waiting.qsize() >= LONGEST_QUEUE:
            self._drop(step, f"it is {LONGEST_QUEUE:,} records behind")
            return
        self._waiting.put((step, dict(metrics)))

    def end(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        self._end = (status, dict(summary))
        self._waiting.put(None)

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and self._open.is_set():
            self._trouble(
                f"{self._title} did not shut down in time; its last records may be missing"
            )

    def _run(self) -> None:
        try:
            tracker = self._make()
        except BaseException as error:
            self._error = error
            return
        finally:
            self._open.set()
        for item in iter(self._waiting.get, None):
            if self._dropped:
                continue
            try:
                tracker.log(*item)
            except BaseException as error:
                self._drop(item[0], describe(error))
        try:
            tracker.close(*self._end)
        except BaseException as error:
            self._trouble(f"{self._title} could not be closed: {describe(error)}")

    def _drop(self, step: int, reason: str) -> None:
        self._dropped = True
        self._trouble(
            f"{self._title} is disabled from step {step} on: {reason}. Training "
            "continues; metrics.jsonl has everything"
        )


def open_trackers(
    registry: Registry,
    run: RunFile,
    run_directory: Path,
    warn: Callable[[str], None],
    *,
    resumed_from_step: int | None = None,
) -> Trackers:
    """Open the trackers that a run file names; `check_trackers` has found nothing wrong with them.

    Raises:
        AnygaugeError: one of them cannot be opened; says why and what to do.
    """
    parameters = flat_parameters(run)
    makers = {}
    for name in run.trackers:
        provided = registry.find_tracker(name)
        context = TrackerContext(
            run_directory=run_directory,
            run_name=run.name,
            options=read_options(provided, run.tracker_options.get(name)),
            parameters=parameters,
            resumed_from_step=resumed_from_step,
        )
        makers[name] = functools.partial(load_factory(provided), context)
    return Trackers(makers, warn)


def check_trackers(registry: Registry, run: RunFile, environ: Mapping[str, str] | None) -> None:
    """Refuse trackers that do not exist, would not start, or do not take the options given.

    Args:
        environ: the variables that rank 0 will have, where it will be started on this machine;
            None: only what the run file says is checked.

    Raises:
        PluginError: no tracker, or more than one, has a name.
        RunFileError: an option is unknown, missing or of a wrong kind, or a tracker is named twice.
        NotAvailableError: a package is missing, or a login.
    """
    twice = sorted({name for name in run.trackers if run.trackers.count(name) > 1})
    if twice:
        raise RunFileError(f"trackers: {', '.join(twice)} is listed twice; list it once")
    for name in run.trackers:
        provided = registry.find_tracker(name)
        options = read_options(provided, run.tracker_options.get(name))
        if environ is None:
            continue
        refuse_if_missing(provided)
        reason = provided.spec.unready(options, environ)
        if reason is not None:
            raise NotAvailableError(f"tracker {name!r}: {reason}")


def flat_parameters(run: RunFile) -> dict[str, str | int | float | bool | None]:
    """A run file as a flat table for trackers: dotted path -> value, a list as JSON.

    Left out because others read it: the values of ``environment``, texts whose name says that
    they are a secret, and user and password within an address.
    """
    values = flatten_values(_hide_private(run.model_dump(mode="json", exclude={"environment"})))
    return {path: json.dumps(v) if isinstance(v, list) else v for path, v in values}


def _hide_private(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _hide_private(below)
            for name, below in value.items()
            # A number such as a count of key heads is not a secret.
            if not (is_secret(str(name)) and isinstance(below, str))
        }
    if isinstance(value, list):
        return [_hide_private(item) for item in value]
    return _CREDENTIALS.sub("", value) if isinstance(value, str) else value
