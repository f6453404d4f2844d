"""What a rehearsal found: bytes by phase and by what they are for. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from anygauge.config.schema import RunFile
from anygauge.interface.strategy import Precision
from anygauge.planning.work import Work

WEIGHTS, ADAPTER, GATHERED = "weights", "adapter", "gathered weights"
GRADIENTS, OPTIMIZER = "gradients", "optimizer"
ACTIVATIONS, LOGITS, BUFFERS, SAVED = "activations", "logits and loss", "buffers", "saved"
KINDS = (WEIGHTS, ADAPTER, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, BUFFERS, SAVED)
"""What tensors are for: frozen or trained weights, the adapter's, those that are put together from
ranks for a while; gradients; masters, optimizer state and what an update takes; what forward keeps
and backward makes; logits, what the loss makes of them and their gradients; buffers of engines and
collectives; copies to be saved."""

LOAD, FORWARD, LOSS, BACKWARD = "load", "forward", "loss", "backward"
UPDATE, EVALUATION, SAVE = "update", "evaluation", "save"
PHASES = (LOAD, FORWARD, LOSS, BACKWARD, UPDATE, EVALUATION, SAVE)
STEP = (FORWARD, LOSS, BACKWARD)
"""Phases of all micro-batches of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The most that was live at once, in bytes.

    Attributes:
        total: of all kinds.
        kinds: what for -> bytes, at that time.
        parts: the most outside of backward, and in the first and the second half of backward's
            operations: each of the three grows evenly with a model's layers.
        kinds_of_parts: the kinds of each; (): those of all are `kinds`.
    """

    total: int
    kinds: Mapping[str, int]
    parts: tuple[int, int, int]
    kinds_of_parts: tuple[Mapping[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMemory:
    """What the first rank of a run holds.

    Attributes:
        device, host: phase -> the most that is live at once. A device whose memory is the host's
            has no second list.
        held: bytes of a rank's ``weights``, ``gradients`` (between two micro-batches), ``masters``
            and ``optimizer`` (its state), which it holds from step to step.
        work: of a step of the rank that computes most.
        model_flops: of a token, and of a token for each position of its row; see
            `anygauge.models.flops`.
        strategy: in words.
        numbers: parameters of the model, and those of them that are trained.
        how: whether all layers were rehearsed.
        per_layer: bytes that forward keeps of a layer for backward, for each micro-batch; None
            where all layers were rehearsed at once.
    """

    device: dict[str, Peak]
    host: dict[str, Peak]
    held: dict[str, int]
    work: Work
    model_flops: tuple[float, float]
    strategy: str
    precision: Precision
    numbers: tuple[int, int]
    how: str
    per_layer: int | None = None

    @property
    def worst(self) -> tuple[str, Peak]:
        """The phase that takes most of the device."""
        phase = max(self.device, key=lambda name: self.device[name].total)
        return phase, self.device[phase]

    def record(self) -> dict[str, Any]:
        """What JSON can hold, and `of_record` reads."""
        return asdict(self)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> RunMemory:
        """The same again."""
        peaks = {
            kind: {
                phase: Peak(**{**peak, "parts": tuple(peak["parts"]), "kinds_of_parts": ()})
                for phase, peak in record[kind].items()
            }
            for kind in ("device", "host")
        }
        precision = Precision(**record["precision"])
        work = Work.of_record(record["work"])
        pairs = {name: tuple(record[name]) for name in ("numbers", "model_flops")}
        return cls(**{**record, **peaks, **pairs, "precision": precision, "work": work})

    def with_other(self, other: RunMemory) -> RunMemory:
        """The most of two ranks of a run, by phase, and the work of the one that has more."""

        def most(one: Mapping[str, Peak], two: Mapping[str, Peak]) -> dict[str, Peak]:
            # The last stage of a pipeline alone has a loss.
            return {
                phase: max(
                    (peaks[phase] for peaks in (one, two) if phase in peaks),
                    key=lambda peak: peak.total,
                )
                for phase in PHASES
                if phase in one or phase in two
            }

        return replace(
            self,
            device=most(self.device, other.device),
            host=most(self.host, other.host),
            work=max(self.work, other.work, key=lambda work: sum(work.flops.values())),
        )


def stages_of(run: RunFile) -> int:
    """Stages of a run's pipeline; 1 where there is none."""
    return int(getattr(run.strategy, "pp", 1) or 1)


def ranks_that_differ(run: RunFile, world_size: int) -> tuple[int, ...]:
    """Ranks of which one holds most: all hold the same, but for the stages of a pipeline.

    The first stage has most micro-batches at once, the last has logits.
    """
    stages = stages_of(run)
    return (0,) if stages == 1 else (0, world_size - world_size // stages)
