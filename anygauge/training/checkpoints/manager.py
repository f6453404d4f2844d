"""The checkpoints of a run: when one is written, which are kept, which one a run resumes from."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import safetensors.torch
from torch import Tensor

from anygauge.config.schema import CheckpointSection
from anygauge.interface import AnygaugeError, Backend, Collectives, Engine, HasRankState
from anygauge.training.checkpoints.checkpoint_files import Checkpoint, gather_all, write_checkpoint
from anygauge.training.checkpoints.identity import (
    FinishedError,
    FinishedRun,
    changed_settings,
    check_length,
    check_same_run,
    finished_run,
)
from anygauge.training.checkpoints.sound import (
    FOLDER,
    checkpoints_in,
    find_defect,
    read_record,
    refusal_of,
)
from anygauge.util.files import part_of
from anygauge.util.text import describe, json_values

NEVER, AUTO = "never", "auto"
REQUEST = "checkpoint-now"
"""A file in the run directory that asks for a checkpoint; it is removed when there is one."""
USUAL_S = 15 * 60.0
"""Seconds between the checkpoints of an adapter, where the run file does not say."""


def checkpoint_folder(run_directory: Path, step: int) -> Path:
    """Return where a run keeps the checkpoint of a step."""
    return run_directory / FOLDER / f"step-{step:08}"


@dataclass(kw_only=True, slots=True)
class CheckpointManager:
    """Writes a run's checkpoints and removes those that need not be kept.

    Attributes:
        rank: of this process; rank 0 writes, all take part.
        record: steps done -> what else goes into ``checkpoint.json``; called on rank 0.
        export_adapter: writes trained parameters in peft's format; None where there is no adapter.
        log: a line for the terminal.
        check_folder: raises where `run_directory` is not this run's any more; for rank 0.
        writing: entered while a step's checkpoint is written: the other ranks wait for rank 0.
        losses: step -> evaluation loss of the checkpoints that exist.
        probe: gives what a result is compared with, for those that may become it; None: none may.
        by_default: the run file does not say when one is written, and it is small: see `USUAL_S`.
        asked: the ranks have agreed that one belongs after this step: see `overdue`.
    """

    section: CheckpointSection
    run_directory: Path
    engine: Engine
    backend: Backend
    rank: int
    record: Callable[[int], Mapping[str, Any]]
    export_adapter: Callable[[Path, Mapping[str, Tensor]], None] | None
    log: Callable[[str], None]
    check_folder: Callable[[], None] = lambda: None
    writing: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext()
    losses: dict[int, float | None] = field(default_factory=dict)
    probe: Callable[[], Tensor | None] | None = None
    by_default: bool = False
    asked: bool = False
    _requested: bool = False
    _since: float = field(default_factory=time.monotonic)

    def scan(self) -> None:
        """List the checkpoints that an earlier part of this run left in its folder, and tidy up
        after kills. Every rank calls it.
        """
        found: list[list[Any]] = []
        if self.rank == 0:
            remove_leftovers(self.run_directory)
            found = losses_in(self.run_directory)
        # Whether a loss is among the best decides whether all ranks write, so they must agree.
        everyone = self.backend.collectives.gather_objects(found)
        self.losses.update({step: loss for step, loss in everyone[0]})

    def overdue(self) -> bool:
        """Whether it is time for one, by the clock of rank 0, or the file `REQUEST` in its run
        directory asks for one; the ranks must agree on it."""
        if self.rank:
            return False
        self._requested = (self.run_directory / REQUEST).is_file()
        if self._requested and (why := self.engine.refuses_checkpoints):
            self.log(f"{REQUEST}: this run cannot write checkpoints: {why}")
            self._answer_request()
        late = self.by_default and time.monotonic() - self._since > USUAL_S
        return self._requested or late

    def _answer_request(self) -> None:
        if self._requested:
            (self.run_directory / REQUEST).unlink(missing_ok=True)
        self._requested = False

    def due(self, step: int) -> bool:
        """Whether one belongs after `step` steps, whatever their losses are."""
        every = self.section.every
        return every is not None and every > 0 and step % every == 0

    def maybe_save(self, step: int, *, last: bool, stop: bool, loss: float | None) -> None:
        """Write a checkpoint after `step` steps, if one is due. All ranks call it alike.

        Args:
            last: this was the last step.
            stop: the run was asked to stop.
            loss: of the evaluation after this step; None if there was none.
        """
        due = self.asked or self.due(step) or (last and bool(self.section.every or self.by_default))
        if due or (stop and not last) or self._among_best(loss):
            with self.writing(step):
                self.save(step, loss)
            self.asked, self._since = False, time.monotonic()
            self._answer_request()

    def save_before_error(self, step: int) -> None:
        """Keep what was trained where the step after `step` cannot be. All ranks call it alike."""
        if step not in self.losses and not self.engine.refuses_checkpoints:
            self.maybe_save(step, last=False, stop=True, loss=None)

    def save(self, step: int, loss: float | None) -> None:
        """Write the checkpoint of this step, and remove those that need not be kept any more."""
        loss = json_values(loss)
        exported = self.engine.export_state()
        counters = self.engine.counters()
        states = {n: s.contiguous() for n, s in self.backend.placement.rng_state().items()}
        rng = [
            safetensors.torch.load(each)
            for each in self.backend.collectives.gather_bytes(safetensors.torch.save(states))
        ]
        engine = self.engine
        own = engine.export_rank_state() if isinstance(engine, HasRankState) else {}
        logits = self.probe() if self.probe is not None and self._among_best(loss) else None
        contents = self.backend.collectives.gather_objects(
            [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in own.items()]
        )
        rank_states = gather_all(own, contents, self.rank, self.backend.collectives)
        if self.rank:
            for _ in itertools.chain(exported, rank_states):
                pass  # exporting is collective; rank 0 receives the tensors
        else:
            folder = checkpoint_folder(self.run_directory, step)
            record = {
                "step": step,
                "loss": loss,
                "counters": {name: getattr(counters, name) for name in counters.__slots__},
                "rank_state": sum(map(len, contents)),
                **self.record(step),
            }
            self.check_folder()
            size = write_checkpoint(
                folder,
                exported,
                record,
                rng,
                rank_states=rank_states,
                logits=logits,
                export_adapter=self.export_adapter,
            )
            self.log(f"checkpoint: {folder.name}, {size / 1e6:.1f} MB")
        self.losses[step] = loss
        self._prune()

    def _best_steps(self) -> list[int]:
        """Steps of the checkpoints with the lowest losses, best first."""
        scored = sorted((loss, step) for step, loss in self.losses.items() if loss is not None)
        return [step for _, step in scored[: self.section.num_best]]

    def best(self) -> int | None:
        """The step of the sound checkpoint with the lowest loss, if there is one; all ranks call it
        and get the same."""
        steps = self._best_steps() if self.rank == 0 else []
        folders = {step: checkpoint_folder(self.run_directory, step) for step in steps}
        sound = (step for step, folder in folders.items() if find_defect(folder) is None)
        first: int | None = self.backend.collectives.gather_objects(next(sound, None))[0]
        return first

    def _among_best(self, loss: float | None) -> bool:
        if json_values(loss) is None or not self.section.num_best:
            return False
        best = self._best_steps()
        if len(best) < self.section.num_best:
            return True
        worst = self.losses[best[-1]]
        assert worst is not None and loss is not None
        return loss < worst

    def _prune(self) -> None:
        newest = sorted(self.losses)[-self.section.keep_last :]
        keep = {*newest, *self._best_steps()}
        for step in set(self.losses) - keep:
            del self.losses[step]
            if self.rank == 0:
                # Hidden first: half a folder must never look like a checkpoint.
                folder = checkpoint_folder(self.run_directory, step)
                if folder.exists():
                    folder.rename(part_of(folder))
                shutil.rmtree(part_of(folder), ignore_errors=True)


def losses_in(run_directory: Path) -> list[list[Any]]:
    """[step, evaluation loss] of the checkpoints of a run; reads their records, not their tensors.

    An incomplete one is neither listed nor removed.
    """
    sound = (p for p in checkpoints_in(run_directory) if find_defect(p, contents=False) is None)
    records = map(read_record, sound)
    return [[record["step"], record["loss"]] for record in records]


def remove_leftovers(run_directory: Path) -> None:
    """Remove what a process left that was killed while it wrote or removed a checkpoint."""
    for path in (run_directory / FOLDER).glob(".step-*.part"):
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What a run resumes from.

    Attributes:
        checkpoint: None to start from the beginning.
        skipped: a sentence for each checkpoint that is truncated or altered.
        finished: the run, if it is finished already.
    """

    checkpoint: Checkpoint | None
    skipped: tuple[str, ...] = ()
    finished: FinishedRun | None = None


def find_checkpoint(
    resume: str, run_directory: Path, rank: int, collectives: Collectives
) -> ResumePoint:
    """The checkpoint that ``checkpoint.resume`` asks for; every rank calls it and gets the same.

    Only rank 0 looks for it and checks the sums of its files.

    Args:
        resume: ``never``, ``auto`` (the newest sound one in `run_directory`) or a folder.

    Raises:
        AnygaugeError: the folder that was named is not a sound checkpoint.
    """
    if resume == NEVER:
        return ResumePoint(None)
    mine = _find_resumable(resume, run_directory) if rank == 0 else None
    folder, skipped, failure, report = collectives.gather_objects(mine)[0]
    if failure is not None:
        raise AnygaugeError(failure)
    return ResumePoint(
        None if folder is None else Checkpoint(Path(folder)),
        tuple(skipped),
        None if report is None else FinishedRun(folder=run_directory, report=report),
    )


def _find_resumable(resume: str, run_directory: Path) -> list[Any]:
    """[folder, what was skipped, why nothing can be resumed, report of a finished run]."""
    skipped: list[str] = []
    if resume != AUTO:
        refusal = refusal_of(Path(resume))
        return [resume if refusal is None else None, [], refusal, None]
    done = finished_run(run_directory)
    report = None if done is None else dict(done.report)
    for folder in checkpoints_in(run_directory):
        complaint = find_defect(folder)
        if complaint is None:
            return [str(folder), skipped, None, report]
        skipped.append(f"{FOLDER}/{folder.name} is skipped: {complaint}")
    return [None, skipped, None, report]


def check_resumed(
    resumed: ResumePoint,
    identity: Mapping[str, Any],
    settings: Mapping[str, Any],
    steps: int,
) -> list[str]:
    """Check that what was found belongs to this run; returns which settings have changed since.

    Args:
        identity: see `identity_of`.
        settings: see `settings_of`.
        steps: of the whole run, now.

    Raises:
        RunFileError: it belongs to another run, or is finished and cannot be made longer.
        FinishedError: the run is finished.
    """
    start, finished = resumed.checkpoint, resumed.finished
    if finished is not None:
        if finished.identity:
            check_same_run(finished.folder, finished.identity, identity)
        newest = None if start is None else start.step
        if check_length(finished, steps, newest, settings):
            raise FinishedError(finished)
    if start is None:
        return []
    check_same_run(start.folder, start.record["identity"], identity)
    return changed_settings(start.record["settings"], settings)


def import_rank_state(
    engine: Engine,
    start: Checkpoint,
    changes: Sequence[str],
    rank: int,
    world_size: int,
    log: Callable[[str], None],
) -> None:
    """Give this rank back what it had of its own, where strategy and ranks are as they were.

    Args:
        changes: see `check_resumed`.

    Raises:
        AnygaugeError: the engine cannot take it.
    """
    if not start.record.get("rank_state"):
        return
    before = start.record["world_size"]
    why = [change for change in changes if change.startswith("strategy.")]
    if before != world_size:
        why.append(f"ranks: {before} -> {world_size}")
    if why or not isinstance(engine, HasRankState):
        reason = ", ".join(why) or "this engine has no such state"
        log(f"left out: what each rank had of its own, since {reason}; the rest resumes")
        return
    try:
        engine.import_rank_state(start.rank_state(rank))
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise AnygaugeError(
            f"{start.folder}: what rank {rank} had of its own does not fit this run: "
            f"{describe(error)}. Resume with what the checkpoint was made with, or with another "
            "strategy, which leaves it out"
        ) from error


class StopRequest:
    """Whether this process received SIGTERM; the run stops at the end of the current step.

    While it listens, SIGTERM is noted and does not end the process. A rank that waits for others
    inside a collective notes it when the collective is done; to end such a rank at once, send
    another signal.
    """

    def __init__(self) -> None:
        self.asked = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note SIGTERM inside this context; without effect outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signum: int, frame: FrameType | None) -> None:
            self.asked = True

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
