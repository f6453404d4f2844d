"""What steps computed, read where the device does not wait for it.

A step's losses and its gradient norm are one small tensor on its way to the host. It is read when
a device that works ahead has been given the next step; of another device, at once. With it come the
sums over ranks, the request to stop, the time for a checkpoint and the check for numbers that are
not finite: all ranks learn of them in the same place.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anygauge.interface import HOST_DEVICE, Backend, Share, UpdateResult
from anygauge.training.checkpoints.manager import CheckpointManager, StopRequest
from anygauge.training.guard import check_finite
from anygauge.training.meter import MetricsLogger
from anygauge.training.moving import HostBatch
from anygauge.training.progress import Progress


class Numbers:
    """Some numbers on their way to the host, in one copy.

    Args:
        values: of one element each, of a floating type, on the device; those that an engine has on
            the host already stay what they are.
        copies_ahead: begin to copy now, into pinned memory, which the host does not wait for.
    """

    def __init__(self, values: Sequence[Tensor], *, copies_ahead: bool) -> None:
        self._host = {at: value for at, value in enumerate(values) if _on_host(value)}
        self._count = len(values)
        away = [value.detach() for value in values if not _on_host(value)]
        # None is rounded: a norm may be float64.
        dtype = functools.reduce(torch.promote_types, (v.dtype for v in away), torch.float32)
        self._away = (
            torch.stack([v.reshape(()).to(dtype) for v in away]) if away else torch.empty(0)
        )
        if away and copies_ahead:
            memory = torch.empty(len(away), dtype=dtype, device=HOST_DEVICE, pin_memory=True)
            self._away = memory.copy_(self._away, non_blocking=True)

    def read(self) -> list[float]:
        """The numbers, in their order; where they are copied ahead, once the copy is made."""
        rest = iter(self._away.tolist())
        return [
            float(self._host[at]) if at in self._host else next(rest) for at in range(self._count)
        ]


def _on_host(value: Tensor) -> bool:
    return value.device.type == HOST_DEVICE


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """A step that the device was given.

    Attributes:
        tokens: loss tokens, over all ranks.
        numbers: a loss for each micro-batch, and the norm of the gradient.
        counted: by the meter, when the device was given the step; None: when it is read.
        began, ended: moments of the device's; or of the host's clock, which gives the end later.
    """

    index: int
    batches: Sequence[HostBatch]
    tokens: int
    lr: float
    skipped: bool
    numbers: Numbers
    counted: Mapping[str, float] | None
    began: Any
    ended: Any


@dataclass
class PendingSteps:
    """Steps that the device was given and that were not read yet.

    Attributes:
        meter: gets each step when it is read.
        checkpoints: learns whether the ranks agree that it is time for one.
        share: the part of each step's rows that this rank reads.
        most: how many steps may be unread when the next one begins, the same on all ranks.
    """

    backend: Backend
    meter: MetricsLogger
    stop: StopRequest
    checkpoints: CheckpointManager
    progress: Progress
    share: Share

    def __post_init__(self) -> None:
        self._placement, self._collectives = self.backend.placement, self.backend.collectives
        self._ahead = self._placement.works_ahead
        self.most = 1 if self._ahead else 0
        self._steps: deque[Launched] = deque()
        self._began: Any = None
        self._asked = False

    def begin(self) -> None:
        """The next step begins."""
        self._began = self._moment()

    def add(
        self,
        index: int,
        batches: Sequence[HostBatch],
        tokens: int,
        lr: float,
        loss_sums: Sequence[Tensor],
        update: UpdateResult,
    ) -> None:
        """Take what the device will have computed of the step that began last."""
        numbers = Numbers(
            [*loss_sums, update.grad_norm],
            copies_ahead=self._ahead and self._placement.pinned_memory,
        )
        ended = self._moment() if self._ahead else None
        self._steps.append(
            Launched(
                index=index,
                batches=batches,
                tokens=tokens,
                lr=lr,
                skipped=update.skipped,
                numbers=numbers,
                # What is read later would have the next step's counts.
                counted=self.meter.counted() if self._ahead else None,
                began=self._began,
                ended=ended,
            )
        )

    def settle(self, through: int) -> bool:
        """Read the steps up to one; returns whether any rank was asked to stop.

        Every rank calls it for the same step.

        Raises:
            NonFiniteLossError: the loss or the gradient of one is not finite; names the rows.
        """
        while self._steps and self._steps[0].index <= through:
            self._read(self._steps.popleft())
        return self._asked

    def _read(self, step: Launched) -> None:
        self.progress.at(f"step {step.index + 1}, sums over ranks")
        if self._ahead:
            step.ended.synchronize()
        *losses, norm = step.numbers.read()
        batches = [each.batch for each in step.batches]
        slots = sum(batch.input_ids.numel() for batch in batches) * self.share.leads
        overdue = self.checkpoints.overdue()
        total, stop, places, votes = self._collectives.sum_on_host(
            [sum(losses), self.stop.asked, slots, overdue]
        )
        self._asked = self._asked or bool(stop)
        self.checkpoints.asked = bool(votes)
        check_finite(
            step.index,
            total,
            losses,
            norm,
            batches,
            self._collectives,
            skipped=step.skipped,
        )
        self.meter.step(
            step.index,
            loss=total / step.tokens if step.tokens else None,
            lr=step.lr,
            grad_norm=norm,
            skipped=step.skipped,
            slots=int(places),
            seconds=self._seconds(step),
            counted=self.meter.counted() if step.counted is None else step.counted,
        )

    def _moment(self) -> Any:
        if not self._ahead:
            return time.perf_counter()
        event = self._placement.event()
        event.record()
        return event

    def _seconds(self, step: Launched) -> float:
        if self._ahead:
            return float(step.began.elapsed_time(step.ended)) / 1e3
        return time.perf_counter() - float(step.began)
