"""Finds the checkpoint that a run goes on from, and checks that it is of the same run."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.interface import Activations, AnygaugeError, Collectives, ModelError
from anygauge.interface.strategy import PARAMETER, ModelFactory, PartFunction, TrainedState
from anygauge.models.on_demand import OnDemand
from anygauge.training.checkpoints.files import Checkpoint
from anygauge.training.checkpoints.finished import (
    Finished,
    FinishedError,
    check_length,
    finished_run,
)
from anygauge.training.checkpoints.identity import changed_settings, check_same_run
from anygauge.training.checkpoints.sound import (
    FOLDER,
    checkpoints_in,
    complaint_about,
    refusal_of,
    set_aside,
    shown,
    step_of,
)

NEVER, AUTO = "never", "auto"


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run goes on from.

    Attributes:
        checkpoint: None to begin from the start.
        passed_over: checkpoints that are torn or altered, each with what is wrong with it.
        finished: the run, if it is done already.
    """

    checkpoint: Checkpoint | None
    passed_over: tuple[str, ...] = ()
    finished: Finished | None = None


def find_checkpoint(
    resume: str, run_directory: Path, rank: int, collectives: Collectives
) -> Resumed:
    """The checkpoint that ``checkpoint.resume`` asks for; every rank calls it and gets the same.

    Rank 0 alone looks for it, and sums the files.

    Args:
        resume: ``never``, ``auto`` (the newest sound one in `run_directory`) or a folder.

    Raises:
        AnygaugeError: a folder was named, and is not a sound checkpoint.
    """
    if resume == NEVER:
        return Resumed(None)
    mine = _search(resume, run_directory) if rank == 0 else None
    folder, passed_over, failure, report = collectives.gather_objects(mine)[0]
    if failure is not None:
        raise AnygaugeError(failure)
    return Resumed(
        None if folder is None else Checkpoint(Path(folder)),
        tuple(passed_over),
        None if report is None else Finished(folder=run_directory, report=report),
    )


def _search(resume: str, run_directory: Path) -> list[Any]:
    """[folder, what was passed over, why nothing can be resumed, report of a finished run]."""
    passed_over: list[str] = []
    if resume != AUTO:
        refusal = refusal_of(Path(resume))
        return [resume if refusal is None else None, [], refusal, None]
    done = finished_run(run_directory)
    report = None if done is None else dict(done.report)
    found = [*checkpoints_in(run_directory), *set_aside(run_directory)]
    for folder in sorted(found, key=lambda path: step_of(shown(path)) or 0, reverse=True):
        complaint = complaint_about(folder)
        if complaint is None:
            return [str(folder), passed_over, None, report]
        passed_over.append(f"{FOLDER}/{folder.name} is passed over: {complaint}")
    return [None, passed_over, None, report]


def check_resumed(
    resumed: Resumed,
    identity: Mapping[str, Any],
    settings: Mapping[str, Any],
    usual: Mapping[str, Any],
    steps: int,
) -> list[str]:
    """Accept what was found as a part of this run; returns which settings have changed since.

    Args:
        identity: see `identity_of`.
        settings, usual: see `settings_of` and `usual_settings`.
        steps: of the whole run, now.

    Raises:
        RunFileError: it is part of another run, or what it was left as cannot be gone on with.
        FinishedError: the run is done.
    """
    start, finished = resumed.checkpoint, resumed.finished
    if finished is not None:
        if finished.identity:
            check_same_run(finished.folder, finished.identity, identity)
        if check_length(finished, steps, None if start is None else start.step):
            raise FinishedError(finished)
    if start is None:
        return []
    check_same_run(start.folder, start.record["identity"], identity)
    return changed_settings(start.record["settings"], settings, usual)


class ResumedFactory:
    """A model factory whose trained parameters begin with the values of a state.

    The engine's float32 masters are made from what is built here, in the compute type, and get
    their digits back in `Engine.import_state`.
    """

    def __init__(self, factory: ModelFactory, state: TrainedState) -> None:
        self._factory = factory
        self._state = state
        self._names = frozenset(state.names())

    def skeleton(self) -> nn.Module:
        """See `ModelFactory.skeleton`."""
        return self._factory.skeleton()

    def fill_buffers(self, model: nn.Module) -> None:
        """See `ModelFactory.fill_buffers`."""
        self._factory.fill_buffers(model)

    def values(
        self, model: nn.Module, unit: str, part: PartFunction | None = None
    ) -> Mapping[str, Tensor]:
        """See `ModelFactory.values`."""
        shapes = {n: tuple(p.shape) for n, p in model.get_submodule(unit).named_parameters()}
        values = self._factory.values(model, unit, part)
        prefix = f"{unit}." if unit else ""

        def value(name: str) -> Tensor:
            if prefix + name not in self._names:
                return values[name]
            kept = self._value(prefix + name, shapes[name])
            piece = (...,) if part is None else part(prefix + name, shapes[name])
            return kept if piece is None else kept[piece]

        return OnDemand({name: functools.partial(value, name) for name in values})

    def adapt(self, model: nn.Module) -> nn.Module:
        """See `ModelFactory.adapt`."""
        adapted = self._factory.adapt(model)
        if adapted is model:
            return model
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if name in self._names and not parameter.is_meta:
                    parameter.copy_(self._value(name, parameter.shape))
        return adapted

    def adapted_on_meta(self) -> tuple[nn.Module, Mapping[str, str]]:
        """See `ModelFactory.adapted_on_meta`."""
        adapted, names = self._factory.adapted_on_meta()
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if name in self._names and not parameter.is_meta:
                    parameter.copy_(self._value(name, parameter.shape))
        return adapted, names

    def _value(self, name: str, shape: Sequence[int]) -> Tensor:
        kept = self._state.tensor(name, PARAMETER)
        if tuple(kept.shape) != tuple(shape):
            raise ModelError(
                f"the checkpoint's {name} has shape {tuple(kept.shape)}, this run's "
                f"{tuple(shape)}; resume with the adapter that the checkpoint was made with"
            )
        return kept

    def external_parameters(self, model: nn.Module) -> Sequence[tuple[nn.Module, nn.Parameter]]:
        """See `ModelFactory.external_parameters`."""
        return self._factory.external_parameters(model)

    @property
    def activations(self) -> Activations:
        """See `ModelFactory.activations`."""
        return self._factory.activations

    def checkpoint_activations(self, model: nn.Module, *, reentrant: bool = False) -> None:
        """See `ModelFactory.checkpoint_activations`."""
        self._factory.checkpoint_activations(model, reentrant=reentrant)
