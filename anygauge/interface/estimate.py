"""What a rank holds at each moment of a run, and what it sends: for plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["HeldLayers", "MemoryEstimate", "Traffic"]

WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER = "weights", "gathered weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS, BUFFERS, SAVED = "activations", "logits and loss", "buffers", "saved"
KINDS = (WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, BUFFERS, SAVED)
"""What memory is for: a rank's part of the weights, an adapter's among them; weights put together
from ranks for a while; gradients and their sums; masters, the optimizer's state and what an update
takes; what forward keeps and backward makes; logits and the loss; buffers of engines and
collectives; copies to be saved."""

LOAD, BEGIN, GATHER, FORWARD, LOSS = "load", "begin", "gather", "forward", "loss"
REDUCE, BACKWARD, END, EMBEDDING = "reduce", "backward", "end", "embedding"
COLLECT, UPDATE, EVALUATION, SAVE = "collect", "update", "evaluation", "save"
MOMENTS = (
    *(LOAD, BEGIN, GATHER, FORWARD, LOSS, REDUCE),
    *(BACKWARD, END, EMBEDDING, COLLECT, UPDATE, EVALUATION, SAVE),
)
"""Of a run: the model is made; the embedding of a micro-batch; a layer's weights come together,
before it computes; its decoder layers; the output layer and the loss; what is done with weights and
gradients between two layers of backward; backward of the last layer, when the least gradients are
there; backward of the first layers, when most are; backward of the embedding; what is done with
gradients once there are no activations; the update; an evaluation; what is gathered to be saved. An
estimate may leave out what it says nothing else of: `GATHER`, `REDUCE`, `EMBEDDING` (as `END`) and
`COLLECT`."""

Bytes: TypeAlias = "Mapping[str, Mapping[str, int]]"
"""Moment -> kind -> bytes, at the most that is there at once in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What a rank gives to collectives of one kind over one group, in one step.

    Attributes:
        operation: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``,
            ``broadcast``, ``reduce`` or ``send``.
        group: ranks of the job that take part.
        waited: whether a rank waits for each call before it continues, as for parts of a divided
            layer; else others are under way meanwhile.
        times: how often.
        bytes: what goes in of a reduction, what comes out of a gather, all calls together.
    """

    operation: str
    group: tuple[int, ...]
    waited: bool
    times: float
    bytes: float

    @property
    def wire_bytes(self) -> float:
        """Bytes that leave each rank where a ring carries them."""
        share = (len(self.group) - 1) / len(self.group)
        if self.operation == "all_reduce":
            return 2 * share * self.bytes
        return self.bytes if self.operation == "send" else share * self.bytes

    def crosses_machines(self, per_machine: int) -> bool:
        """Whether it leaves a machine of so many ranks."""
        return len({rank // per_machine for rank in self.group}) > 1


@dataclass(frozen=True, slots=True)
class HeldLayers:
    """Neighbouring decoder layers that a rank computes without leaving the device.

    Attributes:
        first, end: from which to before which, counted from 0. The embedding belongs to the first
            layer, the output layer and the loss to the last.
        in_flight: micro-batches whose activations are there at once.
        apart: backward makes the gradients of hidden states of all the layers first, and then that
            of one weight after the other. Until the last one the activations are there, and what a
            layer recomputes: each time anew.
    """

    first: int
    end: int
    in_flight: int = 1
    apart: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """What a rank holds at each moment but for activations and logits, and what it sends.

    Attributes:
        device, host: in bytes, by moment and kind. Weights are a rank's own part; what an engine
            has meanwhile stands with its kind: gathered layers, buckets, copies of gradients.
        traffic: of one optimizer step.
        stages: the decoder layers that the rank computes; empty: all of them, and one micro-batch
            after the other.
        host_bytes: what operations on the host read and write in a step, where it is not the
            device.
        copied_bytes: what is copied to the host and from it in a step.
        other_bytes: what the device reads and writes in a step beside the model's own operations:
            the update, gradients that are added up, gathered weights that are copied.
    """

    device: Bytes
    host: Bytes = field(default_factory=dict)
    traffic: Sequence[Traffic] = ()
    stages: Sequence[HeldLayers] = ()
    host_bytes: float = 0.0
    copied_bytes: float = 0.0
    other_bytes: float = 0.0

    def bytes_at(self, moment: str, *kinds: str) -> int:
        """Bytes of these kinds at a moment, on the device and the host."""
        parts = (self.device.get(moment, {}), self.host.get(moment, {}))
        return sum(part.get(kind, 0) for part in parts for kind in kinds)

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Collective -> bytes that it is given in a step, over all groups."""
        found = dict.fromkeys((one.operation for one in self.traffic), 0)
        for one in self.traffic:
            found[one.operation] += int(one.bytes)
        return found
