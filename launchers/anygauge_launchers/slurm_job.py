"""A job in Slurm's queue, followed by its file of events and by what Slurm reports of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from anygauge.interface import LOST, AnygaugeError, JobState, Plan
from anygauge.util.clients import last_line, run_client
from anygauge.util.events import ended_event, message_event, read_event

Event = Mapping[str, Any]

_POLL_S = 2.0
"""Seconds between two questions to Slurm about the job."""
_READ_S = 0.2
"""Seconds between two looks at the file of events."""
_LOG_DELAY_S = 5.0
"""Seconds that the agents' last events may take through the file system once the job has ended."""
_UNREACHABLE = "UNREACHABLE"
_UNKNOWN = "UNKNOWN"
_REPORTED = ("PENDING", "RUNNING", "SUSPENDED", _UNREACHABLE)
_LIVE = {
    _UNREACHABLE,
    *("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD"),
    *("SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING", "REQUEUE_FED", "SPECIAL_EXIT"),
}
_ENDINGS = {
    "NODE_FAIL": ("lost", LOST, "a node of the job failed"),
    "BOOT_FAIL": ("lost", LOST, "a node of the job did not start"),
    "PREEMPTED": ("lost", LOST, "Slurm preempted the job"),
    "TIMEOUT": ("lost", LOST, "the job's time limit was reached"),
    "CANCELLED": ("cancelled", 143, "the job was cancelled"),
    "OUT_OF_MEMORY": ("failed", 1, "a process of the job was killed, out of memory"),
    "DEADLINE": ("failed", 1, "the job's deadline passed"),
}


class SlurmJob:
    """A submitted job. It outlives this process."""

    def __init__(self, number: str, folder: Path, offset: int) -> None:
        self.number = number
        self.record: Mapping[str, Any] = {"job": number, "offset": offset}
        self._folder = folder
        self._events = folder / "events.jsonl"
        self._offset = offset
        self._pending = b""
        self._cancellations = 0

    @classmethod
    def start(cls, plan: Plan) -> SlurmJob:
        """Write the files and submit.

        Raises:
            AnygaugeError: Slurm refuses the job, or a file cannot be written.
        """
        script = next(file.path for file in plan.files if file.path.endswith(".sh"))
        folder = Path(script).parent
        events = folder / "events.jsonl"
        try:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            (folder / "cancelled").unlink(missing_ok=True)
            plan.write_files()
            offset = events.stat().st_size if events.exists() else 0
        except OSError as error:
            raise AnygaugeError(f"cannot start the run in {folder}: {error}") from error
        done = run_client(plan.processes[0].argv)
        if done.returncode:
            raise AnygaugeError(
                f"sbatch refused the job: {last_line(done.stderr) or last_line(done.stdout)}\n"
                f"its arguments: {' '.join(plan.processes[0].argv[1:12])} ..."
            )
        number = done.stdout.strip().split(";")[0]
        return cls(number, folder, offset)

    def events(self) -> Iterator[Event]:
        """What the agents report and the job's state in Slurm, until it is over."""
        yield message_event(f"slurm: job {self.number}; logs: {self._folder / 'logs'}")
        reported, asked_at, ended, gone_at = "", 0.0, None, None
        while True:
            for event in self._new_events():
                if event["event"] == "ended":
                    # Of this attempt; the job may be put back into the queue.
                    ended = event
                else:
                    ended = None
                    yield event
            now = time.monotonic()
            if now - asked_at >= (_POLL_S if ended is None else _READ_S):
                asked_at = now
                state, reason = self._state()
                if state in _LIVE:
                    gone_at = None
                    why = state in ("PENDING", _UNREACHABLE)
                    word = state.lower() + (f" ({reason})" if why else "")
                    if state in _REPORTED and word != reported:
                        reported = word
                        yield message_event(f"slurm: job {self.number} is {word}")
                else:
                    gone_at = gone_at or now
                    if ended is not None or now - gone_at > _LOG_DELAY_S:
                        yield ended or self._ended_without_report(state, reason)
                        return
            time.sleep(_READ_S)

    def state(self) -> JobState:
        """The job's state in Slurm; where Slurm has forgotten it, the end that agents reported."""
        state, reason = self._state()
        name = f"slurm job {self.number}"
        if state != _UNKNOWN:
            why = f" ({reason})" if reason not in ("", "None") else ""
            text = f"{name}: {state.lower()}{why}"
            if state == _UNREACHABLE:
                return JobState(phase="silent", text=text)
            if state in _LIVE:
                return JobState(phase="running", text=text)
            return JobState(phase="done" if state == "COMPLETED" else "failed", text=text)
        ended = self._end_event()
        if ended is not None:
            word = ended.get("state")
            return JobState(phase="done", text=f"{name}: ended ({word}); Slurm has forgotten it")
        return JobState(phase="gone", text=f"{name}: Slurm does not know it (any more)")

    def cancel(self) -> None:
        """Ask the ranks to write a checkpoint and end; a second time, end the job."""
        self._cancellations += 1
        (self._folder / "cancelled").touch()
        state, _ = self._state()
        if self._cancellations == 1 and state == "RUNNING":
            run_client(("scancel", "--signal=INT", self.number))
        else:
            run_client(("scancel", self.number))

    def _end_event(self) -> Event | None:
        """The last event in the file, if it is the job's end."""
        reader = SlurmJob(self.number, self._folder, int(self.record["offset"]))
        events = list(iter(lambda: list(reader._new_events()), []))
        last = events[-1][-1] if events else {}
        return last if last.get("event") == "ended" else None

    def _new_events(self) -> Iterator[Event]:
        try:
            with self._events.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(1 << 20)
        except FileNotFoundError:
            return
        self._offset += len(chunk)
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            event = read_event(line)
            if event is not None:
                yield event

    def _state(self) -> tuple[str, str]:
        """State and reason as Slurm has them; UNKNOWN where it has forgotten the job."""
        try:
            done = run_client(("scontrol", "show", "job", "--oneliner", self.number))
        except AnygaugeError as error:
            return _UNREACHABLE, str(error)
        if done.returncode and "Invalid job id" in done.stderr:
            return _UNKNOWN, ""
        if done.returncode:  # the controller is away for a while; the job is still there
            return _UNREACHABLE, last_line(done.stderr)
        words = dict(w.split("=", 1) for w in done.stdout.split() if "=" in w)
        return words.get("JobState", _UNKNOWN), words.get("Reason", "")

    def _ended_without_report(self, state: str, reason: str) -> Event:
        kind, status, text = _ENDINGS.get(
            state, ("failed", 1, f"the job ended ({state.lower()}) before its agents could report")
        )
        if self._cancellations:
            kind, status = "cancelled", 143
        log = self._folder / "logs" / "slurm.log"
        text_of = log.read_text(errors="replace") if log.exists() else ""
        lines = [line for line in text_of.splitlines() if line.strip()]
        tail = "\n".join(f"  | {line}" for line in lines[-10:])
        cause = f"slurm job {self.number}: {text}"
        cause += f" ({reason})" if reason not in ("", "None") else ""
        return ended_event(kind, status, cause + (f"\nits log: {log}\n{tail}" if tail else ""))
