"""Rows to chunks of tokens, in this process or by several workers, in the rows' order."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from anygauge.data.encode import BAD, Encoded, RowEncoder
from anygauge.data.readers import RawRow
from anygauge.data.rows import EncodedChunk, batch_of
from anygauge.data.template import Rendering, unwatched
from anygauge.interface import AnygaugeError, DataAccessError, DataError
from anygauge.util import errors
from anygauge.util.processes import tie_to_parent

CHUNK = 1024
"""Rows that are tokenised at once."""
FEW_ROWS = 10_000
"""As many are tokenised here before workers are started, which takes seconds."""
MOST_WORKERS = 16
START_S = 300.0
"""Until a worker has begun: it imports the model library, perhaps from a slow disk."""
SILENCE_S = 60.0
"""For one rendering of a chat template, which takes milliseconds."""
SHARE_OF_MEMORY = 0.75
"""Of a machine, for rows."""
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, kw_only=True)
class Tokenise:
    """What is done with a chunk of rows.

    Attributes:
        origin: how a row's place is written: ``data.jsonl:{}``.
        skip: leave out rows that cannot be used.
    """

    encoder: RowEncoder
    origin: str
    skip: bool = False

    def __call__(self, rows: tuple[RawRow, ...]) -> EncodedChunk:
        """What the rows became.

        Raises:
            DataError: one cannot be used.
        """
        places = [row.place for row in rows]
        bad: list[str] = []
        try:
            encoded = self.encoder.encode([row.record(self.origin) for row in rows])
        except DataError:
            if not self.skip:
                raise
            encoded = []
            for number, row in enumerate(rows):
                try:
                    one = self.encoder.encode([row.record(self.origin)])
                    encoded += [replace(each, record=number) for each in one]
                except DataError as error:
                    encoded.append(Encoded(record=number, fate=BAD))
                    bad.append(str(error))
        return EncodedChunk(records=len(rows), batch=batch_of(encoded, places), bad=bad)


def share_of_memory(parts: int) -> int:
    """Bytes that one of so many processes of this machine may take for rows."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(installed * SHARE_OF_MEMORY / parts)


def usable_cores() -> int:
    """Processor cores that this process may use, by affinity and by the control group's quota."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def chunks_of(
    rows: Iterator[RawRow], work: Tokenise, workers: int | None, rendering: Rendering
) -> Iterator[EncodedChunk]:
    """What rows became, chunk by chunk.

    Args:
        workers: processes; None: as many as cores, once there are many rows.
        rendering: gets what is being rendered; of several workers, what has begun first.

    Raises:
        DataError: a row cannot be used; or a worker was ended.
    """
    chunks: Iterator[tuple[RawRow, ...]] = iter(lambda: tuple(islice(rows, CHUNK)), ())
    if workers is None:
        yield from map(work, islice(chunks, -(-FEW_ROWS // CHUNK)))
        workers = min(usable_cores(), MOST_WORKERS)
    following = next(chunks, None)
    if following is None:
        return
    chunks = chain([following], chunks)
    if workers == 1:
        yield from map(work, chunks)
    else:
        yield from _by_workers(chunks, work, workers, rendering)


def _by_workers(
    chunks: Iterator[tuple[RawRow, ...]], work: Tokenise, workers: int, rendering: Rendering
) -> Iterator[EncodedChunk]:
    memory, _ = resource.getrlimit(resource.RLIMIT_DATA)
    share = None if memory == resource.RLIM_INFINITY else memory // workers
    begun: deque[Future[EncodedChunk | tuple[str, str]]] = deque()
    with _Watch(rendering) as watch, _pool([work], workers, share, watch) as pool:
        for chunk in chunks:
            begun.append(pool.submit(_work, 0, chunk))
            if len(begun) > 2 * workers:
                yield _result(begun.popleft())
        while begun:
            yield _result(begun.popleft())


class Tokeniser:
    """Tokenises rows of several sources during a run, in a process of its own or in this one.

    Args:
        works: of each source.
        memory: bytes that the process may have; None: no process.
    """

    def __init__(self, works: Sequence[Tokenise], memory: int | None = None) -> None:
        self._works, self._memory = tuple(works), memory
        self._lock = threading.Lock()
        self._pool: ProcessPoolExecutor | None = None
        self._watch = _Watch(unwatched)

    def __call__(self, source: int, rows: tuple[RawRow, ...]) -> EncodedChunk:
        """What rows of a source became.

        Raises:
            DataError: one cannot be used, or takes too long or too much memory.
        """
        if self._memory is None:
            return self._works[source](rows)
        with self._lock:
            if self._pool is None:
                self._pool = _pool(self._works, 1, self._memory, self._watch.__enter__())
        future = self._pool.submit(_work, source, rows)
        limit = f"{SILENCE_S:.0f} s"
        while True:
            before = self._watch.seen
            try:
                return _result(future, SILENCE_S if before else START_S)
            except MemoryError:
                limit = f"{self._memory / 2**30:.1f} GiB"
            except TimeoutError:
                if self._watch.seen != before:
                    continue
                self._watch.kill()
            template, row = self._watch.oldest
            raise DataError(
                f"{template or 'the tokenizer'} took more than {limit} for {row or 'a row'}. "
                "Correct the template or the row, or give another data.chat_template"
            )


def _pool(
    works: Sequence[Tokenise], workers: int, memory: int | None, watch: _Watch
) -> ProcessPoolExecutor:
    torch_is_hidden = sys.modules.get("torch", works) is None
    begin = (os.getpid(), torch_is_hidden, memory, watch.queue, pickle.dumps(works))
    return ProcessPoolExecutor(workers, SPAWN, _begin, begin)


def _result(
    future: Future[EncodedChunk | tuple[str, str]], timeout_s: float | None = None
) -> EncodedChunk:
    try:
        found = future.result(timeout_s)
    except BrokenProcessPool:
        raise DataAccessError(
            "a process that tokenises rows was ended from outside; there may be too little memory. "
            f"Set data.workers below {min(usable_cores(), MOST_WORKERS)}"
        ) from None
    if isinstance(found, EncodedChunk):
        return found
    kind, message = found
    raise getattr(errors, kind, DataError)(message)


_WORKS: list[Tokenise] = []
"""In a worker: what it does with rows of each source."""


def _begin(parent: int, without_torch: bool, memory: int | None, queue: Any, works: bytes) -> None:
    """Make this process a worker."""
    tie_to_parent(signal.SIGKILL, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if without_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    _WORKS.extend(pickle.loads(works))
    for work in _WORKS:
        work.encoder.watch(lambda template, row: queue.put((os.getpid(), template, row)))
    queue.put((os.getpid(), "", ""))


def _work(source: int, rows: tuple[RawRow, ...]) -> EncodedChunk | tuple[str, str]:
    try:
        return _WORKS[source](rows)
    except AnygaugeError as error:  # some cannot be sent as they are
        return type(error).__name__, str(error)


class _Watch:
    """Passes on what workers render: of all, what has begun first, so that one that hangs shows.

    Attributes:
        oldest: what that is: template and row.
        seen: renderings that have begun or ended.
    """

    def __init__(self, rendering: Rendering) -> None:
        self.queue, self._rendering = SPAWN.SimpleQueue(), rendering
        self.oldest, self.seen = ("", ""), 0
        self._workers: set[int] = set()
        self._thread = threading.Thread(target=self._follow, name="renderings", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.queue.put(None)
        self._thread.join()

    def kill(self) -> None:
        """End the workers: one that hangs would keep this process from ending."""
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)

    def _follow(self) -> None:
        at_work: dict[int, tuple[str, str]] = {}
        while (message := self.queue.get()) is not None:
            worker, template, row = message
            self._workers.add(worker)
            at_work.pop(worker, None)
            if row:
                at_work[worker] = (template, row)
            self.seen += 1
            oldest = next(iter(at_work.values()), ("", ""))
            if oldest != self.oldest:
                self.oldest = oldest
                self._rendering(*oldest)
