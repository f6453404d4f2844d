"""Whether what a rank holds fits: the memory of its card, and what ranks share of their machine.

Also whether a run is so small that no plan is needed: `most_bytes` is more than it can take, by
arithmetic alone. Imports no torch, and reads at most one configuration file.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from anygauge.config.schema import RunFile
from anygauge.interface import Card
from anygauge.interface.estimate import SAVED
from anygauge.models.hub import CONFIG, copy_of
from anygauge.planning.forecast import Peak, RunMemory
from anygauge.planning.machines import Machine
from anygauge.registry import installed_plugins
from anygauge.training.build_strategy import state_bytes
from anygauge.util.files import read_json

GIB = 2**30
SLACK = 0.05
"""Of the tensors: what an allocator holds on top of them (published runs: 3 to 10%)."""
RESERVED = GIB
"""Of a card whose description does not say what its context takes."""
BUFFERS = 2 * GIB
"""More for the buffers of collectives, where ranks have any (published: 1 to 2 GiB)."""
PROCESS = 2 * GIB
"""Of the host, for each rank: Python, torch and the libraries of a device, before any tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The memory of one card against what a rank needs, in bytes; reserved memory, not allocated.

    Attributes:
        memory: of the card that a rank can have.
        phase: that takes most; `tensors` are the most that is live at once in it.
        fixed: what comes on top, whatever the tensors are; see `with_margins`.
        phases: phase -> what it needs, with what comes on top.
        shared: resource of a machine -> what its ranks need of it together, and what it has; None
            where that is not known.
    """

    memory: int
    phase: str
    tensors: int
    fixed: int
    phases: Mapping[str, int] = field(default_factory=dict)
    shared: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)

    def with_margins(self, tensors: int) -> int:
        """Return what so many bytes of tensors need."""
        return tensors + round(SLACK * tensors) + self.fixed

    @property
    def needs(self) -> int:
        """All together."""
        return self.with_margins(self.tensors)

    @property
    def free(self) -> int:
        """What stays free; below zero: what is missing."""
        return self.memory - self.needs

    @property
    def margin(self) -> int:
        """The least that is left of anything; below zero: the run does not fit."""
        shared = (has - needed for needed, has in self.shared.values() if has is not None)
        return min((self.free, *shared))

    @property
    def shortages(self) -> Mapping[str, int]:
        """What there is too little of, the card's memory first -> bytes that are missing."""
        found = {"memory": (self.needs, self.memory), **self.shared}
        return {k: need - has for k, (need, has) in found.items() if has is not None and need > has}

    @property
    def fits(self) -> bool:
        """Whether all is there that is known to be needed."""
        return not self.shortages

    def record(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {**asdict(self), "needed": self.needs, "left": self.free, "fits": self.fits}


def fit(
    found: RunMemory,
    card: Card,
    ranks: int,
    per_machine: int,
    machine: Machine | None = None,
    disk: int = 0,
) -> Fit | None:
    """Hold what a run takes against a card; None where the card's memory is not known.

    Args:
        ranks: of the run.
        per_machine: ranks on one machine, which share what is not their card's.
        machine: that they run on; None where it is not known.
        disk: what each rank keeps on a disk in place of its host's memory, in bytes.
    """
    if card.memory is None:
        return None
    fixed = RESERVED if card.reserved is None else card.reserved
    fixed += BUFFERS if ranks > 1 and not card.shared_memory else 0
    phase, peak = found.worst_phase
    shared: dict[str, tuple[int, int | None]] = {}
    if found.host:
        # Planned as if it were in the host's memory.
        host = max(_of_machine(peak, disk, per_machine) for peak in found.host.values())
        shared["host memory"] = host, None if machine is None else machine.host_memory
    if disk:
        shared["disk"] = per_machine * disk, None if machine is None else machine.disk
    memory = card.memory // per_machine if card.shared_memory else card.memory
    held = Fit(memory=memory, phase=phase, tensors=peak.total, fixed=fixed, shared=shared)
    phases = {name: held.with_margins(one.total) for name, one in found.device.items()}
    return replace(held, phases=phases)


def _of_machine(peak: Peak, disk: int, ranks: int) -> int:
    """Host memory of a machine's ranks, of which one makes copies to save."""
    saved = peak.kinds.get(SAVED, 0)
    tensors = ranks * max(0, peak.total - saved - disk) + saved
    return ranks * PROCESS + round((1 + SLACK) * tensors)


def on_disk(run: RunFile, found: RunMemory, ranks: int) -> int:
    """Bytes that each rank keeps on a disk: masters, gradients and optimizer state of its part."""
    if getattr(run.strategy, "nvme", None) is None:
        return 0
    each = 4 + 4 + state_bytes(run, installed_plugins())
    return round(found.numbers[1] * each / ranks)


_NUMBER, _TRAINED = 4, 24
"""Bytes of a number in the longest type; and for each trained one: weight, gradient, its sum,
master and two moments, all float32."""
_KEPT_OF_HIDDEN, _KEPT_OF_INNER, _KEPT_OF_SCORES, _KEPT_OF_LOGITS = 24, 6, 4, 4
"""Tensors of these widths that a layer, or the loss, keeps for a token; recomputing keeps less."""
_MORE_IS_TRAINED = frozenset({"groups", "target_parameters", "modules_to_save", "dora"})
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")


def most_bytes(run: RunFile, parts: int) -> int | None:
    """Bound what a rank of this run can take of its device; None: arithmetic does not tell.

    It does for decoders that state all of their sizes, held whole on each rank.

    Args:
        parts: of the global batch, as `Share.count`.
    """
    fields, model, adapter = _configuration(run), run.model, run.adapter
    if model.new_tokens or model.new_special_tokens:
        return None
    if any(name.endswith("_config") for name in fields):
        return None  # a model of several, such as one that sees
    sizes = [_largest_size(fields.get(name)) for name in _SIZES]
    if not all(sizes):
        return None
    hidden, inner, layers, words = sizes
    inner = max(inner, *(_largest_size(v) for k, v in fields.items() if "intermediate" in k))
    heads = max(1, _largest_size(fields.get("num_attention_heads")))
    wide = max(hidden, heads * _largest_size(fields.get("head_dim")))
    experts = max([1, *(_largest_size(v) for k, v in fields.items() if "expert" in k)])
    whole = layers * 4 * hidden * (wide + inner * (experts + 1)) + 2 * words * hidden
    trained = whole
    if adapter is not None and not (adapter.own_fields & _MORE_IS_TRAINED or adapter.start_from):
        ends = 4 * (hidden + wide) + 4 * (hidden + inner) * (experts + 1)
        trained = min(whole, adapter.r * (layers * ends + 2 * (hidden + words)))
    length = run.data.max_length
    kept = _KEPT_OF_HIDDEN * wide + _KEPT_OF_INNER * inner * (experts + 1)
    kept += _KEPT_OF_SCORES * heads * length
    tokens = run.train.sequences_at_once(parts) * length * (1 + run.objective_spec.pairs)
    return (
        _NUMBER * (whole + tokens * (layers * kept + _KEPT_OF_LOGITS * words)) + _TRAINED * trained
    )


def _configuration(run: RunFile) -> Mapping[str, Any]:
    """The model's; empty where it is not on this machine, or cannot be read."""
    name, fields = run.model.name, run.model.config
    if name is not None:
        folder = Path(name) if Path(name).is_dir() else copy_of(name, run.model.revision)
        with suppress(OSError, ValueError):  # the checks say what is wrong
            fields = None if folder is None else read_json(folder / CONFIG)
    return fields if isinstance(fields, dict) else {}


def _largest_size(value: Any) -> int:
    """A size, or the largest of a list of them; 0 for what is none."""
    if isinstance(value, list | tuple):
        return max(map(_largest_size, value), default=0)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
