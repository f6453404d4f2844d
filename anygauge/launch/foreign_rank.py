"""A rank of somebody else's launch, from its fresh interpreter on (`anygauge.launch.join`).

The ranks meet at the launcher's address. Rank 0 says which run this is; the others read its job
file, which only their user can. From there on a rank is what an agent would have started, but that
it shows its own events, and that its launcher watches it.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from anygauge.interface import ATTEMPTS, AnygaugeError, Job
from anygauge.launch.decision import Decision
from anygauge.launch.join import Handover, digest
from anygauge.launch.run_directory import remove_unaccepted
from anygauge.launch.supervisor import SIGNALS
from anygauge.launch.view import View, fail, show_stopped, show_where_logs_are
from anygauge.util.console import Console
from anygauge.util.events import EventWriter
from anygauge.util.processes import tie_to_parent
from anygauge.util.text import escaped

if TYPE_CHECKING:
    import torch.distributed as dist

    from anygauge.launch.foreign import ForeignLaunch

_SEEN_S = 30.0
"""Until a file that rank 0 has written is seen on other machines."""
_TURN_S = 0.05
_HEARD_S = 30.0
_NOTICED_S = 0.5
"""In which a launcher notices that another rank has ended, before this one that missed it ends,
too. torchrun looks ten times a second."""
_SHOWN = 8


def take_part(descriptor: int) -> int:
    """Read from a descriptor what came before, and be the rank; returns the exit status."""
    with os.fdopen(descriptor, "rb") as file:
        handover = Handover.read(file.read().decode())
    if handover.launch.tied:
        # torchrun's ranks, for one, would outlive a torchrun that is killed.
        tie_to_parent(signal.SIGKILL)

    def ask(signum: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGTERM)

    # What an agent would take for a request reaches ranks directly here.
    for number in SIGNALS:
        left_alone = number == signal.SIGTERM or signal.getsignal(number) == signal.SIG_IGN  # nohup
        if not left_alone:
            signal.signal(number, ask)
    try:
        return take_over(handover)
    except AnygaugeError as error:
        print(escaped(f"error: {error}\n(rank {handover.launch.rank})"), file=sys.stderr)
        handover.launch.report(str(error))
        return error.exit_status


def take_over(handover: Handover) -> int:
    """Meet the other ranks and train; returns the exit status.

    Raises:
        AnygaugeError: the ranks do not find each other, or do not belong together.
    """
    from anygauge.training.worker import reported

    launch = handover.launch
    timeout = datetime.timedelta(seconds=handover.join_timeout_s)
    store = _store(launch, timeout)
    if handover.answer is not None and "refused" in handover.answer:
        _refuse(handover.answer["refused"])
    answer = _agreed(store, launch, handover.answer, handover.join_timeout_s)
    if "refused" in answer:
        launch.report(answer["refused"])
        return int(answer["exit_status"])
    if "done" in answer:
        if launch.rank == 0:
            print(escaped(answer["done"]))
        return 0
    job = _job(handover, answer)
    if handover.provenance is not None:
        from anygauge.launch.environment import write_provenance

        write_provenance(job, launch.node_rank, handover.provenance)
    os.chdir(job.working_directory)
    decided = _prepare_with_others(store, launch, job, quiet=handover.quiet)
    if not isinstance(decided, Decision):
        status, text = decided
        launch.report(text)
        return status
    job = decided.applied_to(job)
    with _terminal(handover, job) as terminal:
        status = reported(job, launch.rank, terminal.events, answer["lock"])
    terminal.conclude(handover, job)
    if launch.rank == 0 and status == 0:
        remove_unaccepted(Path(job.run_directory))  # the run was done before
    return status


def _store(launch: ForeignLaunch, timeout: datetime.timedelta) -> dist.Store:
    """Where the ranks meet; rank 0 serves it, unless the launcher does."""
    from anygauge.util.rendezvous import listen_at, own_addresses, reach, serve

    if launch.served or launch.rank != 0:
        return reach(launch.host, launch.port, timeout)
    # Every address where this machine does not know the one by which the others reach it.
    for address in (*own_addresses(launch.host), ""):
        try:
            listener = listen_at(address, launch.port).detach()
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            raise AnygaugeError(
                f"rank 0 cannot listen at {launch.host}, port {launch.port}, where the ranks of "
                f"{launch.launcher} meet: {error.strerror or error}. Another job may use the port: "
                "set MASTER_PORT to a free one for all ranks. If your launcher already serves "
                "torch's store there, set TORCHELASTIC_USE_AGENT_STORE=True"
            ) from error
        return serve(address or launch.host, launch.port, listener, timeout)
    raise AnygaugeError(
        f"rank 0 cannot listen at {launch.host}: it is not an address of this machine. Set "
        "MASTER_ADDR to the address of rank 0's machine"
    )


def _refuse(why: str) -> None:
    """Say it on rank 0, before the others hear of it: a launcher ends all ranks with the first."""
    print(escaped(f"error: {why}"), file=sys.stderr, flush=True)


def _agreed(
    store: dist.Store, launch: ForeignLaunch, own: Mapping[str, Any] | None, patience_s: float
) -> Mapping[str, Any]:
    """Rank 0's answer. Each rank asks with a number that it draws: a launcher's store may hold what
    an earlier attempt has left.

    Raises:
        AnygaugeError: some ranks did not come.
    """
    if launch.rank == 0:
        assert own is not None
        _answer_all(store, launch, own, patience_s)
        return own
    number = secrets.token_hex(16)
    store.set(f"anygauge/ask/{launch.rank}", number)
    try:
        answer: dict[str, Any] = json.loads(store.get(f"anygauge/answer/{number}"))
    except RuntimeError as error:
        raise AnygaugeError(
            f"rank 0 did not announce the run within {patience_s:g} s (launch.join_timeout_s): "
            f"{str(error).splitlines()[0]}"
        ) from error
    store.set(f"anygauge/heard/{answer['id']}/{launch.rank}", "")
    return answer


def _answer_all(
    store: dist.Store, launch: ForeignLaunch, own: Mapping[str, Any], patience_s: float
) -> None:
    text = json.dumps(own)
    answered: set[bytes] = set()
    missing = set(range(1, launch.world_size))
    deadline = time.monotonic() + patience_s
    while missing:
        for rank in sorted(missing):
            if store.check([f"anygauge/heard/{own['id']}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"anygauge/ask/{rank}"]):
                number = store.get(f"anygauge/ask/{rank}")
                if number not in answered:
                    answered.add(number)
                    store.set(f"anygauge/answer/{number.decode()}", text)
        if missing and time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(missing)[:_SHOWN]))
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise AnygaugeError(
                f"of {launch.world_size} ranks, {names}{more} did not connect to {launch.host}, "
                f"port {launch.port}, within {patience_s:g} s (launch.join_timeout_s)"
            )
        time.sleep(_TURN_S)


def _job(handover: Handover, answer: Mapping[str, Any]) -> Job:
    """The job that rank 0 has written.

    Raises:
        AnygaugeError: it is not seen here, belongs to another run, or this machine does not fit.
    """
    from anygauge.launch.hello import HELLO, Hello, check_hello
    from anygauge.launch.outcome import read_record

    path, wanted = Path(answer["job"]), Path(handover.run_directory)
    home = path.parent
    if home.parent.name == ATTEMPTS:
        home = home.parent.parent
    # The store knows no authentication: what it names must be a run of one's own.
    same = re.fullmatch(re.escape(wanted.name) + r"(-\d+)?", home.name)
    if home.parent != wanted.parent or not same:
        raise AnygaugeError(
            f"rank 0 writes to {home}, but this rank's arguments name {wanted}. Start all ranks "
            "from the same folder, with the same arguments, and give the shared storage the same "
            "path on every machine"
        )
    deadline = time.monotonic() + _SEEN_S
    while True:
        with contextlib.suppress(OSError):
            if digest(path.read_text()) == answer["digest"]:
                break
        if time.monotonic() > deadline:
            raise AnygaugeError(
                f"{path}, which rank 0 has written, is not seen on {socket.gethostname()}. The "
                "folder of a run must be on storage that all its machines share (--output)"
            )
        time.sleep(_TURN_S)
    if handover.launch.node_rank:
        first = read_record(HELLO, answer["hello"])
        check_hello(first, Hello(**handover.hello), {})
    return Job.load(path)


def _prepare_with_others(
    store: dist.Store, launch: ForeignLaunch, job: Job, *, quiet: bool
) -> Decision | tuple[int, str]:
    """Prepare the run, as the first rank of a machine, or wait for those who do: each machine has
    the model, and on the first, model and rows are checked, and memory is planned.

    Nobody watches who prepares but its launcher, which ends all ranks with one.

    Returns:
        What rank 0 has decided; or exit status and why the run cannot start, alike on all ranks.
    """
    found: dict[int, str] = {}
    mine = f"anygauge/prepared/{job.id}/"
    if launch.local_rank == 0:
        store.set(f"{mine}{launch.node_rank}", _prepare(launch, job, quiet))
    while len(found) < launch.nodes:
        for node in set(range(launch.nodes)) - set(found):
            if store.check([f"{mine}{node}"]):
                found[node] = store.get(f"{mine}{node}").decode()
        refusal = next((text for text in found.values() if not text.startswith("{")), None)
        if refusal is not None:
            break
        time.sleep(_TURN_S)
    else:
        return Decision.load(found[0])
    status, _, why = refusal.partition(" ")
    if launch.rank == 0:
        _refuse(why)
    # Who serves the store leaves last.
    store.set(f"{mine}heard/{launch.rank}", "")
    heard = [f"{mine}heard/{rank}" for rank in range(launch.world_size)]
    deadline = time.monotonic() + _HEARD_S
    while launch.rank == 0 and not store.check(heard) and time.monotonic() < deadline:
        time.sleep(_TURN_S)
    return int(status), why


def _prepare(launch: ForeignLaunch, job: Job, quiet: bool) -> str:
    """What this machine, the first for all, has decided; or exit status and why it refuses."""
    from anygauge.launch.prepare_call import prepare_here

    def log(text: str) -> None:
        if not quiet:
            print(escaped(text), file=sys.stderr)

    where = f"{socket.gethostname()}: " if launch.nodes > 1 else ""
    first = launch.rank == 0
    try:
        return prepare_here(job, os.environ, where, log, check=first, plan=first).dump()
    except AnygaugeError as error:
        return f"{error.exit_status} {error}"


class _EventDisplay(EventWriter):
    """Shows a rank's events instead of writing them.

    Attributes:
        ending: its last event: ``finished``, ``stopped`` or ``failed``.
    """

    def __init__(self, rank: int, view: View) -> None:
        super().__init__(None, rank)
        self._number = rank
        self._view = view
        self.ending: Mapping[str, Any] = {}

    def send(self, event: str, **fields: Any) -> None:
        """Show one event. A reader that has gone away is ignored: the run's files tell all."""
        record = {"event": event, "time": time.time(), "rank": self._number, **fields}
        with self._lock, contextlib.suppress(OSError):
            if event in ("finished", "stopped", "failed"):
                self.ending = record
            self._view.show(record)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Terminal:
    """Where a rank is shown.

    Attributes:
        log: of what it prints.
        log_offset: where this start begins in it, in bytes.
    """

    events: _EventDisplay
    view: View
    errors: Console
    log: Path
    log_offset: int

    def conclude(self, handover: Handover, job: Job) -> None:
        """How it ended: by rank 0 for all, or why this rank failed."""
        from anygauge.launch.outcome import Failure, stopped_text

        launch, ending = handover.launch, self.events.ending
        kind = ending.get("event")
        if kind == "failed":
            failure = Failure.from_event(launch.rank, ending, time.time())
            text = failure.cause(
                host=socket.gethostname(),
                world_size=job.world_size,
                log=self.log,
                log_offset=self.log_offset,
            )
            if failure.for_user:
                # Not a connection that broke because another rank was killed: there the launcher
                # goes by who ended first.
                launch.report(text, failure.time)
            if not failure.for_user and job.world_size > 1:
                time.sleep(_NOTICED_S)
                text += (
                    "\nIf another rank ended earlier, that may be the cause: see the output of "
                    f"{launch.launcher}, or that rank's log"
                )
            fail(self.errors, text)
            show_where_logs_are(self.errors, job.run_directory)
        elif launch.rank == 0 and kind == "stopped":
            show_stopped(self.errors, stopped_text(ending))
        elif launch.rank == 0:
            self.view.summary()


@contextlib.contextmanager
def _terminal(handover: Handover, job: Job) -> Iterator[_Terminal]:
    """Show the rank meanwhile; what libraries print goes to its log, as in any run."""
    rank = handover.launch.rank
    out, err = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    log = job.start_directory / "logs" / f"rank{rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        offset = file.seek(0, 2)
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    # Lines, and no bar: the terminal is shared with other ranks and with the launcher.
    view = View(Console(file=out, force_terminal=False), handover.quiet)
    yield _Terminal(
        events=_EventDisplay(rank, view),
        view=view,
        errors=Console(file=err, force_terminal=False),
        log=log,
        log_offset=offset,
    )
