"""The contract of a strategy: how a model is spread over ranks. It builds an `Engine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from anygauge.interface.backend import Backend
from anygauge.interface.engine import Engine
from anygauge.interface.environment import Setting
from anygauge.interface.estimate import MemoryEstimate
from anygauge.interface.model import (
    Activations,
    ClipFunction,
    ModelFactory,
    OptimizerFactory,
    Precision,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "AutoForm",
    "BuildContext",
    "PlannerHints",
    "SequencePart",
    "Share",
    "Strategy",
    "StrategyPlanner",
    "StrategyRun",
    "StrategySpec",
    "Workload",
]


@dataclass(frozen=True, slots=True)
class SequencePart:
    """Which positions of each of its sequences a rank computes: those of part `index` of `count`.

    Parts are of equal length: see `Share.multiple`.

    Attributes:
        all_queries: attention sees the queries of all positions, and needs masks for them.
    """

    index: int
    count: int
    all_queries: bool = False

    def positions(self, length: int) -> slice:
        """Those of this part, of sequences of a length."""
        each = length // self.count
        return slice(self.index * each, (self.index + 1) * each)


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of each step's rows a rank reads.

    Attributes:
        index, count: it reads part `index` of `count`.
        leads: of the ranks that read the same part, whether this one speaks for them: counts of
            rows and tokens are summed over those that lead.
        stream: ranks of the same number draw the same random numbers, for dropout; None: those of
            the same part do.
        sequence: the positions of its rows that it computes; None: all. With a part, masks say for
            each pair of positions who sees whom.
        multiple: lengths of sequences are padded to a multiple of it.
        one_width: above 0, all micro-batches of a step are padded to the width of its longest one,
            rounded up to a multiple of this where the longest sequence allows it. For an engine
            that begins a micro-batch before it is done with the one before; it gets no warm-up.
    """

    index: int
    count: int
    leads: bool = True
    stream: int | None = None
    sequence: SequencePart | None = None
    multiple: int = 1
    one_width: int = 0

    def positions(self, length: int) -> slice:
        """Those that this rank computes of sequences of a length."""
        return slice(None) if self.sequence is None else self.sequence.positions(length)

    @property
    def random_stream(self) -> int:
        """`stream`, or what stands in its place."""
        return self.index if self.stream is None else self.stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a strategy knows of a rank's work before anything is built.

    Attributes:
        skeleton: the adapted model on the meta device; None leaves out what depends on it.
        rank: that is asked about, and whose `share` it is.
        micro_batch: sequences per forward of a rank.
        accumulation: micro-batches of a rank in one step.
        length: places for tokens in each sequence, padding among them.
        adapter: as `StrategyRun.adapter`.
        state_bytes: what the optimizer keeps for each trained number, in bytes.
        update_bytes: what its update makes meanwhile for each trained number, in bytes.
    """

    backend: Backend
    precision: Precision
    skeleton: nn.Module | None
    world_size: int
    rank: int = 0
    share: Share
    micro_batch: int
    accumulation: int
    length: int
    max_norm: float
    activations: Activations
    adapter: str = ""
    state_bytes: float = 8.0
    update_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """What a strategy is given to build with.

    Attributes:
        workload: of this rank, with the opened backend and without a skeleton.
        clip_grad_norm: for strategies that clip whole gradients on the device.
    """

    factory: ModelFactory
    optimizer: OptimizerFactory
    workload: Workload
    clip_grad_norm: ClipFunction


class StrategyPlanner(Protocol):
    """The questions of a plan to a strategy."""

    def memory(self, workload: Workload) -> MemoryEstimate:
        """What the workload's rank holds and sends; the skeleton is there, whole."""

    def part_of(self, model: nn.Module, workload: Workload) -> None:
        """Change an adapted model on the meta device to what the workload's rank computes of it.

        It has the first few layers alone. What ranks send each other is given out without values.
        """


class Strategy(Protocol):
    """How a model is spread, with the options of a run.

    Attributes:
        description: its name and options in a few words, for the card of what was trained.
        planner: for plans and ``strategy: auto``; a strategy that has none is planned as one whose
            ranks hold the whole model and send nothing.
    """

    description: str
    planner: StrategyPlanner | None = None

    def settings(self, workload: Workload) -> Sequence[Setting]:
        """The engine's configuration, each field with its reason; also for dry runs."""

    def build(self, context: BuildContext) -> Engine:
        """Build the model on the backend's opened device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyRun:
    """What a strategy may look at before ranks start; nothing of it needs torch.

    Attributes:
        options: of the class that `StrategySpec.options` names.
        micro_batches: of a rank in one step; 0 where the global batch cannot be divided so, which
            is refused before.
        precision: None while the opened device decides it.
        optimizer: ``train.optimizer.name``.
        adapter: ``lora``; ``dora`` or ``taken`` where it begins with what is computed from the
            base's weights; empty where all weights are trained.
        pairs: the loss is a function of whole sequences, two by two, not a sum over tokens.
        router_aux_loss: a mixture's routers have a loss of their own, made of a whole micro-batch.
        ranks_run_here: the packages of this machine are those that ranks will have.
        quantized: frozen linear layers hold codes, which cannot be cut like weights.
        paged: the optimizer's state is in memory that moves to the host by itself, which torch
            takes for the host's.
        optimizer_sees_full_parameters, optimizer_changes_weights: see `OptimizerSpec`.
        reentrant_only: see `Graph.reentrant_only`.
    """

    options: Any
    world_size: int
    optimizer: str
    adapter: str = ""
    micro_batches: int = 1
    activations: Activations = field(default_factory=Activations)
    precision: Precision | None = None
    pairs: bool = False
    router_aux_loss: bool = False
    ranks_run_here: bool = True
    quantized: bool = False
    paged: bool = False
    optimizer_sees_full_parameters: bool = False
    optimizer_changes_weights: bool = False
    reentrant_only: str = ""


NO_FP8 = "nobody has tried products in FP8 with its engine, which does not ask"


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoForm:
    """A form of a strategy that ``strategy: auto`` may take.

    Attributes:
        place: in the order in which forms are tried until one fits, the fastest first: those of
            the strategies that come along have 10 (whole models) to 60 (all in the host's memory).
        options: fields of `StrategySpec.options`.
        alone: of use on one rank as well.
    """

    place: int
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    alone: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerHints:
    """Other forms of a strategy than the one that a run file describes.

    Attributes:
        lighter: what a plan proposes for less memory: fields of `StrategySpec.options`, and what
            they cost in words. The first is for several ranks; each further one takes less than
            that before.
        auto: what ``strategy: auto`` may take of it; empty: nothing.
    """

    lighter: tuple[tuple[Mapping[str, Any], str], ...] = field(default=(), hash=False)
    auto: tuple[AutoForm, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategySpec:
    """How a strategy announces itself; making one imports nothing heavy.

    Attributes:
        factory: ``"package.module:Class"``; called with the run file's section, an object of
            `options` that has `name`, too; returns a `Strategy`.
        summary: a line for the list of strategies.
        options: as `BackendSpec.options`: the section's fields other than ``name``.
        reference: the conformance kit compares a strategy that shards with it, on one rank.
        tolerance: largest relative difference of a loss from the reference's that it makes by
            design, such as by compressing what ranks exchange; 0 where rounding explains all.
        single_process: it runs on one rank, which joins no process group. Of all others each rank
            has joined one before `Strategy.build`, also one that is alone.
        needs: capability that it asks of a device, on one rank as well -> because.
        engine: a name by which `Backend.unsupported_engines` may refuse it; empty: none may.
        distributions: packages that it needs beside those of anygauge, by the names that pip has;
            their versions are recorded.
        install: the command that installs them; empty: ``pip install`` and their names.
        share: (options, rank, world size) -> which rows that rank reads, of its own unless it says
            otherwise; pure. Called for other ranks, too.
        unused_kernels: options -> operation -> why its engine calls no kernel of it:
            ``clip_grad_norm``, which takes whole gradients on the device; ``adamw``, which takes
            plain tensors on the device, whole or parts.
        refuses_fp8: options -> why its engine does not train in the contexts that
            `Backend.fp8_products` makes; empty: it does.
        shorthands: word -> (nodes, devices of each) -> fields of `options`: what a run file may
            write in place of the whole section, for layouts that have a name of their own.
        check: refuses what the options cannot do, by raising an `AnygaugeError`; cheap and pure.
        check_model: likewise, given the options and the model's configuration.
        hints: what plans propose of it, and ``strategy: auto`` takes.
    """

    name: str
    factory: str
    api_version: int
    summary: str = ""
    options: str = ""
    reference: bool = False
    tolerance: float = 0.0
    single_process: bool = False
    needs: Mapping[str, str] = field(default_factory=dict, hash=False)
    engine: str = ""
    distributions: tuple[str, ...] = ()
    install: str = ""
    share: Callable[[Any, int, int], Share] = lambda options, rank, ranks: Share(rank, ranks)
    unused_kernels: Callable[[Any], Mapping[str, str]] = lambda options: {}
    refuses_fp8: Callable[[Any], str] = lambda options: NO_FP8
    shorthands: Mapping[str, Callable[[int, int], Mapping[str, Any]]] = field(
        default_factory=dict, hash=False
    )
    check: Callable[[StrategyRun], None] = lambda run: None
    check_model: Callable[[Any, Any], None] = lambda options, config: None
    hints: PlannerHints = PlannerHints()
