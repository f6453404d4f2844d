"""A run of this machine: this process supervises its ranks, and nothing stands between."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from anygauge.interface import AnygaugeError, Job, JobState
from anygauge.launch.attempt import Requests
from anygauge.launch.foreign import without_launcher
from anygauge.launch.nodes import Nodes
from anygauge.launch.outbox import Outbox
from anygauge.launch.rank_environment import NodeEnvironment, write_provenance
from anygauge.launch.rank_start import RankArgv, rank_argv
from anygauge.launch.supervisor import GRACE_S, Supervisor
from anygauge.util.events import read_event
from anygauge.util.files import write_text
from anygauge.util.run_lock import identity_of

LOG = "supervisor.log"
"""Among the run's logs: when and how each rank began and ended."""


class LocalRun:
    """The ranks of this machine, as the one who follows a job sees them; see `RunningJob`.

    A thread supervises them. It lives as long as they do: the kernel kills each rank with the
    thread that has started it, and so with this process, however that ends.
    """

    record = None

    def __init__(
        self,
        job: Job,
        *,
        lock: int,
        grace_s: float = GRACE_S,
        argv_of_rank: RankArgv | None = None,
        environment: NodeEnvironment | None = None,
    ) -> None:
        """Write what ranks read, and start them.

        Args:
            lock: descriptor that holds the claim of the run directory; the ranks inherit it, so the
                folder is free when the last of them is gone.
            grace_s: seconds from the end of a rank's peers to SIGKILL.
            argv_of_rank: None for that of `rank_argv`.
            environment: of the ranks; None: as backend, site, run file and user decide.

        Raises:
            AnygaugeError: the backend cannot be found, this machine lacks what the run demands, or
                a file cannot be written.
        """
        own = environment or NodeEnvironment(job, 0, without_launcher(os.environ))
        path = Path(job.run_file).with_name("job.json")
        log = path.parent / "logs" / LOG
        try:
            write_text(path, job.dump(), 0o600)
            write_provenance(job, 0, own.record())
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log = log.open("a", encoding="utf-8")
        except OSError as error:
            raise AnygaugeError(
                f"cannot start the run in {job.run_directory}: {error}. Check that the folder can "
                "be written and that the disk is not full."
            ) from error
        self._requests = Requests()
        self._events = Outbox()
        self._status = 1
        self._supervisor = Supervisor(
            job,
            Nodes(job, self._events),
            rank_argv=argv_of_rank or partial(rank_argv, str(path), identity_of(lock), None),
            rank_environment=own.of_rank,
            requests=self._requests,
            grace_s=grace_s,
            cores=own.cores,
            lock=identity_of(lock),
            held=(lock,),
            resume=job.resume,
            log=self._log,
        )
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def events(self) -> Iterator[Mapping[str, Any]]:
        """What the ranks report, until all have ended; how the run ended comes last."""
        yield from filter(None, map(read_event, self._events))
        self._thread.join()

    def state(self) -> JobState:
        """Whether ranks run."""
        if self._thread.is_alive():
            return JobState(phase="running", text="running")
        return JobState(phase="failed" if self._status else "done", text="ended")

    def cancel(self) -> None:
        """End the ranks in order; the second call ends them at once."""
        self._requests.add(signal.SIGTERM)

    def wait(self, timeout_s: float | None = None) -> int:
        """Exit status of the run, once all ranks have ended."""
        self._thread.join(timeout_s)
        return self._status

    def _run(self) -> None:
        try:
            self._status = self._supervisor.run()
        except Exception as error:
            text, kind = str(error), ""
            if isinstance(error, AnygaugeError):
                self._status, kind = error.exit_status, error.kind
            elif not isinstance(error, OSError):
                self._supervisor.write_log(traceback.format_exc())
                text = f"supervising the ranks failed: {type(error).__name__}: {error}"
            fields = {"exit_status": self._status, "cause": text, "kind": kind, "node_rank": 0}
            self._events.send("ended", state="failed", **fields)
        finally:
            self._events.close()
            self._log.close()
