"""What a rank is in, reported to its supervisor: by a thread of its own, once a second at most.

The loop only notes where it is, which costs nothing. The thread reports it when it has changed; in
long work that is not the same on all ranks (loading, saving), it reports again and again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from anygauge.interface import Collectives
from anygauge.util.events import EventWriter

_EVERY_S = 1.0


class Progress:
    """Reports where a rank is."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events
        self._place = ""
        self._batches = 0
        self._long = 0
        self._reported: tuple[str, int] | None = None

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report for as long as this lasts."""
        done = threading.Event()

        def report() -> None:
            while not done.wait(_EVERY_S):
                self._report()

        thread = threading.Thread(target=report, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def enter(self, place: str) -> None:
        """Note what begins now, in words: ``step 3 of 10, update``."""
        self._batches = 0
        self._place = place

    def next_batch(self) -> None:
        """Note that another micro-batch begins there."""
        self._batches += 1

    @contextlib.contextmanager
    def long_work(self, place: str) -> Iterator[None]:
        """Work that may take any time: reported again and again while it lasts."""
        self.enter(place)
        self._long += 1
        # At once, too: from here on the supervisor judges this rank by what it reports.
        self._report()
        try:
            yield
        finally:
            self._long -= 1

    @contextlib.contextmanager
    def unlike_others(
        self, place: str, collectives: Collectives, *, then_limit_s: float
    ) -> Iterator[None]:
        """Long work that one rank may have alone while the others wait for it.

        Args:
            then_limit_s: how long collectives may wait afterwards.
        """
        with self.long_work(place), collectives.patient_timeout(then=then_limit_s):
            yield

    def _report(self) -> None:
        now = (self._place, self._batches)
        if not self._long and now == self._reported:
            return
        self._reported = now
        place, batches = now
        if place:
            doing = f"{place}, micro-batch {batches}" if batches else place
            self._events.send("progress", doing=doing)
