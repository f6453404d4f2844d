"""In which order a rank of a pipeline computes, as torch's schedules have it; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FORWARD, BACKWARD = 1, -1
Action = tuple[int, int]
"""`FORWARD` or `BACKWARD` of a micro-batch, and the rank's how manyeth stage."""


def actions(schedule: str, place: int, ranks: int, count: int) -> list[Action]:
    """What the rank at a place of `ranks` does, with `count` micro-batches.

    A micro-batch's backward is that of its weights, where a schedule has two.
    """
    if schedule == "interleaved":
        return list(_interleaved(place, ranks, count))
    if schedule == "zero_bubble":
        return list(_zero_bubble(place, ranks, count))
    first = count if schedule == "gpipe" else min(count, ranks - place)
    turns = [action for _ in range(count - first) for action in ((BACKWARD, 0), (FORWARD, 0))]
    return [(FORWARD, 0)] * first + turns + [(BACKWARD, 0)] * first


def _interleaved(place: int, ranks: int, count: int) -> Iterator[Action]:
    """`ScheduleInterleaved1F1B` with two stages."""
    in_round = count // max(1, count // ranks)
    first = min(in_round + 2 * (ranks - 1 - place), 2 * count)
    for at in range(2 * count + first):
        if at < 2 * count:
            yield FORWARD, at // in_round % 2
        if at >= first:
            yield BACKWARD, 1 - (at - first) // in_round % 2


def _zero_bubble(place: int, ranks: int, count: int) -> Iterator[Action]:
    """`ScheduleZBVZeroBubble`; it is made for enough micro-batches, of which some are left out."""
    enough = max(2 * ranks - 1, count)
    done = {(kind, stage): 0 for kind in (FORWARD, BACKWARD) for stage in (0, 1)}

    def made(kind: int, stage: int) -> Iterator[Action]:
        done[kind, stage] += 1
        if done[kind, stage] <= count:
            yield kind, stage

    for _ in range(2 * (ranks - place) - 1):
        yield from made(FORWARD, 0)
    for _ in range(place):
        yield from made(FORWARD, 1)
        yield from made(FORWARD, 0)
    for _ in range(ranks - place):
        yield from made(FORWARD, 1)
        yield from made(BACKWARD, 1)
    while done[FORWARD, 1] < done[FORWARD, 0] or done[FORWARD, 0] < enough:
        if done[FORWARD, 0] < enough:
            yield from made(FORWARD, 0)
        yield from made(BACKWARD, 0)
        yield from made(FORWARD, 1)
        yield from made(BACKWARD, 1)
    # Some gradients of inputs come before all those of weights here.
    for stage, last in ((0, enough - place), (1, enough), (0, enough)):
        while done[BACKWARD, stage] < last:
            yield from made(BACKWARD, stage)


@dataclass(frozen=True, slots=True)
class Fullest:
    """The moment of a step at which most layers' activations are there.

    Attributes:
        in_flight: of each of the rank's stages, the micro-batches whose activations these are.
        done: of each, the micro-batches whose backward is done.
    """

    in_flight: tuple[int, ...]
    done: tuple[int, ...]


def fullest(order: Sequence[Action], layers: Sequence[int]) -> Fullest:
    """Of an order, the last such moment.

    Args:
        layers: of each of the rank's stages.
    """
    counts, done = [0] * len(layers), [0] * len(layers)
    most, found = 0, Fullest(tuple(counts), tuple(done))
    for kind, stage in order:
        counts[stage] += kind
        done[stage] += kind == BACKWARD
        held = sum(count * size for count, size in zip(counts, layers, strict=True))
        if held >= most:
            most, found = held, Fullest(tuple(counts), tuple(done))
    return found
