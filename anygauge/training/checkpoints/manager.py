"""When checkpoints are written, and which of them are kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from anygauge.config.schema import CheckpointSection
from anygauge.interface import Backend
from anygauge.interface.strategy import Engine
from anygauge.training.checkpoints.files import finite, write_checkpoint
from anygauge.training.checkpoints.sound import (
    FOLDER,
    checkpoints_in,
    complaint_about,
    hidden_in,
    read_record,
    set_aside,
    shown,
)


def checkpoint_folder(run_directory: Path, step: int) -> Path:
    """Where a run keeps the checkpoint of a step."""
    return run_directory / FOLDER / f"step-{step:08}"


@dataclass(kw_only=True, slots=True)
class CheckpointManager:
    """Writes a run's checkpoints and removes those that are not to be kept.

    Attributes:
        rank: of this process; rank 0 writes, all take part.
        record: what else goes into ``checkpoint.json``; called on rank 0.
        export_adapter: writes trained parameters in peft's format; None where there is no adapter.
        log: a line for the terminal.
        writing: around the writing of a step's checkpoint: rank 0 writes while the others wait.
        losses: step -> evaluation loss of the checkpoints that are there.
    """

    section: CheckpointSection
    run_directory: Path
    engine: Engine
    backend: Backend
    rank: int
    record: Callable[[], Mapping[str, Any]]
    export_adapter: Callable[[Path, Mapping[str, Tensor]], None] | None
    log: Callable[[str], None]
    writing: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext()
    losses: dict[int, float | None] = field(default_factory=dict)

    def scan(self) -> None:
        """List the checkpoints that an earlier part of this run left in its folder, and tidy up
        after kills. Every rank calls it, once all have read what they go on from.
        """
        gather = self.backend.collectives.gather_objects
        gather(None)  # who still reads a checkpoint that was set aside reads it by that name
        found: list[list[Any]] = []
        if self.rank == 0:
            tidy(self.run_directory)
            found = losses_in(self.run_directory)
        # What is among the best decides whether all ranks write: they must agree on it.
        self.losses.update({step: loss for step, loss in gather(found)[0]})

    def maybe_save(self, step: int, *, last: bool, stop: bool, losses: Mapping[str, float]) -> None:
        """Write a checkpoint after `step` steps, if one is due. Every rank calls it alike.

        Args:
            last: the run is done.
            stop: the run was asked to end.
            losses: of the evaluation that was made after this step; empty where there was none.
        """
        loss = sum(losses.values()) / len(losses) if losses else None
        every = self.section.every
        due = bool(every) and (step % every == 0 or last)
        if due or (stop and not last) or self._among_best(loss):
            with self.writing(step):
                self.save(step, loss)

    def save(self, step: int, loss: float | None) -> None:
        """Write the checkpoint of this step, and remove what need not be kept any more."""
        loss = finite(loss)
        exported = self.engine.export_state()
        counters = self.engine.counters()
        states = {n: s.contiguous() for n, s in self.backend.placement.rng_state().items()}
        rng = [
            safetensors.torch.load(each)
            for each in self.backend.collectives.gather_bytes(safetensors.torch.save(states))
        ]
        if self.rank:
            for _ in exported:
                pass  # rank 0 gets what the ranks put together
        else:
            folder = checkpoint_folder(self.run_directory, step)
            record = {
                "step": step,
                "loss": loss,
                "counters": {name: getattr(counters, name) for name in counters.__slots__},
                **self.record(),
            }
            size = write_checkpoint(
                folder, exported, record, rng, export_adapter=self.export_adapter
            )
            self.log(f"checkpoint: {folder.name}, {size / 1e6:.1f} MB")
        self.losses[step] = loss
        self._prune()

    def _best(self) -> list[int]:
        """Steps of the checkpoints with the lowest losses, best first."""
        scored = sorted((loss, step) for step, loss in self.losses.items() if loss is not None)
        return [step for _, step in scored[: self.section.keep_best]]

    def _among_best(self, loss: float | None) -> bool:
        if finite(loss) is None or not self.section.keep_best:
            return False
        best = self._best()
        if len(best) < self.section.keep_best:
            return True
        worst = self.losses[best[-1]]
        assert worst is not None and loss is not None
        return loss < worst

    def _prune(self) -> None:
        newest = sorted(self.losses)[-self.section.keep_last :]
        keep = {*newest, *self._best()}
        for step in set(self.losses) - keep:
            del self.losses[step]
            if self.rank == 0:
                # First out of sight: half a folder must never look like a checkpoint.
                folder = checkpoint_folder(self.run_directory, step)
                hidden = folder.with_name(f".{folder.name}.old")
                if folder.exists():
                    folder.rename(hidden)
                shutil.rmtree(hidden, ignore_errors=True)


def losses_in(run_directory: Path) -> list[list[Any]]:
    """[step, evaluation loss] of the checkpoints of a run; reads their records, and no tensors.

    One that is incomplete is left as it is, neither kept nor removed.
    """
    sound = (p for p in checkpoints_in(run_directory) if complaint_about(p, contents=False) is None)
    records = map(read_record, sound)
    return [[record["step"], record["loss"]] for record in records]


def tidy(run_directory: Path) -> None:
    """Put back a sound checkpoint that a kill kept from being replaced; remove all else that is
    hidden beside the checkpoints. Only while nobody writes one.
    """
    for path in set_aside(run_directory):
        if complaint_about(path) is None:
            path.rename(shown(path))
    for path in hidden_in(run_directory):
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
