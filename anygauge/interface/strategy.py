"""The contract of a strategy: how a model is spread over ranks, built and stepped.

A `Strategy` builds an `Engine`; the loop talks to the engine alone. The engine schedules forward
and backward itself, so that one that runs them in another order (a pipeline) fits as well as one
that runs them batch by batch. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from anygauge.interface.backend import FULL, Backend, Level, Support
from anygauge.interface.environment import Setting

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = [
    "PARAMETER",
    "Activations",
    "AutoForm",
    "BuildContext",
    "ClipFunction",
    "Counters",
    "DeviceBatch",
    "Engine",
    "HeldLayers",
    "LossFunction",
    "MemoryEstimate",
    "ModelFactory",
    "OptimizerFactory",
    "PartFunction",
    "PlannerHints",
    "Precision",
    "SequencePart",
    "Share",
    "Strategy",
    "StrategyPlanner",
    "StrategyRun",
    "StrategySpec",
    "Traffic",
    "TrainedState",
    "UpdateResult",
    "Workload",
]

PARAMETER = "parameter"
"""The key of a trained tensor itself; other keys are the optimizer's, such as ``exp_avg``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Names of torch types: one policy for every strategy, so that two of them can be compared.

    The optimizer's copy of trained weights, and its state, are float32.

    Attributes:
        param_dtype: weights and adapter in memory, and arithmetic.
        reduce_dtype: accumulation and reduction of gradients.
        why: how `param_dtype` was settled, in words.
        fp8: linear layers multiply in FP8 while they train; see `Backend.fp8_products`.
    """

    param_dtype: str
    reduce_dtype: str
    why: str = "asked for"
    fp8: bool = False

    @property
    def scales_loss(self) -> bool:
        """float16 underflows without loss scaling."""
        return self.param_dtype == "float16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """What decoder layers keep between forward and backward, and where.

    Attributes:
        every: one of so many layers, the first of each, recomputes its activations in backward;
            0: none does.
        selective: such a layer keeps the results of matrix products and attention.
        offload: what layers keep lies in the host's memory meanwhile.
    """

    every: int = 0
    selective: bool = False
    offload: bool = False

    def recomputes(self, layer: int) -> bool:
        """Whether a layer, counted from 0, does."""
        return bool(self.every) and layer % self.every == 0

    def recomputed(self, layers: int) -> int:
        """How many of so many layers do."""
        return sum(map(self.recomputes, range(layers)))


# -- the model -------------------------------------------------------------------------------------


class ModelFactory(Protocol):
    """Makes the model in the pieces that a strategy needs, in the order it decides.

    `fill_buffers` and `values` take a model of `skeleton` that was not adapted yet.
    """

    @property
    def activations(self) -> Activations:
        """What `checkpoint_activations` does of it: what the run asks for, without `offload`."""

    def skeleton(self) -> nn.Module:
        """The architecture: parameters on the meta device, buffers real and in their own types."""

    def fill_buffers(self, model: nn.Module) -> None:
        """Give the buffers that are stored with the weights their stored values, on every rank."""

    def values(
        self, model: nn.Module, unit: str, part: PartFunction | None = None
    ) -> Mapping[str, Tensor]:
        """Values of every parameter below the submodule `unit`, on the host.

        Read from files, or drawn from a generator that depends on seed and `unit` alone. Keys are
        names within the unit; a value may be read when it is looked up, each time anew. May put
        host parameters in place of the model's meta ones. Every rank may read, and all get the
        same.

        Args:
            part: what this rank keeps of each parameter; no more is read from files that allow it.
                Its names are those within the whole model. None: everything.
        """

    def adapt(self, model: nn.Module) -> nn.Module:
        """Freeze the base and add the adapter, if there is one, with the same values on every rank.

        Given ``shift_labels``, the model returns ``loss``, summed over tokens, in place of logits.
        """

    def adapted_on_meta(self) -> tuple[nn.Module, Mapping[str, str]]:
        """The adapted model before it has the base's values, for strategies that shard it then.

        Returns:
            The model: what is `skeleton`'s is on the meta device, the adapter's values are real,
            float32 or the run's type, and on the host. And the skeleton's parameters: name in the
            adapted model -> name in the skeleton, which `values` knows.

        Raises:
            UnsupportedError: the adapter's first values depend on the base's.
        """

    def external_parameters(self, model: nn.Module) -> Sequence[tuple[nn.Module, nn.Parameter]]:
        """Of an adapted model: parameters that a module reads though another one owns them."""

    def checkpoint_activations(self, model: nn.Module, *, reentrant: bool = False) -> None:
        """Have layers recompute their activations in backward, as the run asks for it.

        Args:
            reentrant: by torch's older form, for engines that need it.

        Raises:
            UnsupportedError: the architecture, or the older form, has no such way.
        """


PartFunction: TypeAlias = "Callable[[str, Sequence[int]], tuple[slice, ...] | None]"
"""(parameter name, whole shape) -> the slice of each dimension that is wanted; None: nothing."""


class OptimizerFactory(Protocol):
    """Makes the run's optimizer over named trained parameters."""

    def __call__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        shapes: Mapping[str, Sequence[int]] | None = None,
        /,
    ) -> Optimizer:
        """Args: shapes: by name, the whole shape of a parameter that holds a part of itself."""


ClipFunction: TypeAlias = "Callable[[Sequence[nn.Parameter], float], Tensor]"
"""(parameters, largest norm) -> norm of all gradients before, (); gradients are scaled in place."""

LossFunction: TypeAlias = "Callable[[Any], Tensor]"
"""Outputs of the model -> loss summed over tokens, (); made of its input ``shift_labels``."""


# -- a step ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One micro-batch on the device.

    Attributes:
        inputs: keyword arguments of the model's forward, ``shift_labels`` among them where it is
            to return its loss: (B, T) int64, the token that each position is to predict; -100
            where there is none. They are shifted already, so that a sequence can be cut anywhere.
    """

    inputs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update did.

    Attributes:
        grad_norm: of all ranks' gradients before clipping, (); may still be on the device.
        skipped: whether loss scaling skipped it.
    """

    grad_norm: Tensor
    skipped: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """Numbers of the optimizer and the loss scaler.

    Attributes:
        updates: steps that the optimizer has made; those that loss scaling skipped do not count.
        loss_scale: None where the loss is not scaled.
        good_steps: since the scale last changed.
    """

    updates: int
    loss_scale: float | None = None
    good_steps: int = 0


class TrainedState(Protocol):
    """Where a run resumes from; tensors may be read as late as they are needed.

    It belongs to no strategy: tensors are whole, float32 and on the host, and names are those of
    the model's parameters. One strategy writes it, another reads it, in another sharding.
    """

    counters: Counters

    def names(self) -> Sequence[str]:
        """Trained parameters."""

    def tensor(self, name: str, key: str) -> Tensor:
        """One whole tensor, float32, on the host."""


class Engine(Protocol):
    """A built model with its optimizer."""

    model: nn.Module

    def run_step(
        self, batches: Sequence[DeviceBatch], loss_function: LossFunction, normalizer: int
    ) -> Sequence[Tensor]:
        """Forward and backward of one step's micro-batches; gradients add up.

        Args:
            batches: this rank's; each is moved to the device when it is taken.
            normalizer: the gradient is that of the loss, summed over all ranks, divided by this
                number, the same on every rank: use it as it is given. It is the loss tokens
                of the whole global batch. Where the loss is not finite, the gradient is not.

        Returns:
            Losses of this rank's batches, in their order: summed over tokens, () float32. They may
            be on the device, where the loop leaves them until the next step was begun. Summed over
            all ranks they are the loss of the global batch, so they are zero where another rank of
            the same rows gives them.
        """

    def update(self, lr: float, max_norm: float) -> UpdateResult:
        """Clip to `max_norm` (0: do not), step the optimizer at rate `lr`, clear gradients.

        Gradients are summed over ranks before, here or in `run_step`; a trained parameter that got
        none counts as zero. The result is the same on every rank.

        From the first norm on that is not finite, weights stay as they are, here and in all later
        calls; not so where loss scaling skips an update. The loop reads the norm later, when the
        next step was begun, and ends the run.
        """

    def evaluate(
        self, batches: Iterable[DeviceBatch], loss_function: LossFunction
    ) -> Sequence[Tensor]:
        """Losses of this rank's batches, as `run_step` has them, without gradients or dropout."""

    def logits(self, batch: DeviceBatch) -> Tensor | None:
        """The model's whole logits, (B, T, V) float32 on the host; ``shift_labels`` are not read.

        Every rank must call it, with the same rows; rank 0 gets them, others may get None.
        """

    def parameter_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The whole shape of one of the model's parameters, of which this rank may hold a part."""

    def export_trained(self) -> Mapping[str, Tensor]:
        """Trained parameters, whole and in the master type, on the host.

        Every rank must call it; only rank 0 gets values, others an empty mapping.
        """

    def checkpoint_support(self) -> Support:
        """Whether the next three can be called; the reason if not."""

    def export_state(self) -> Iterator[tuple[str, str, Tensor | None]]:
        """(parameter name, key, whole float32 tensor on the host), one after another.

        Keys are `PARAMETER` and those of the optimizer's state. Every rank must go through it to
        the end; only rank 0 gets tensors, others None.
        """

    def counters(self) -> Counters:
        """The optimizer's step count and the loss scale."""

    def import_state(self, state: TrainedState) -> None:
        """Resume from a state: masters, optimizer state, step count, loss scale.

        The model was built with the state's values already, in the type that weights have.
        """

    def close(self) -> None:
        """Let go of what the engine holds."""


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

    @property
    def random_stream(self) -> int:
        """`stream`, or what stands in its place."""
        return self.index if self.stream is None else self.stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is asked of a strategy, as far as it is known before anything is built.

    Attributes:
        skeleton: the adapted model on the meta device; None leaves out what depends on it.
        rank: that is asked about, and whose `share` it is.
        micro_batch: sequences per forward of a rank.
        accumulation: micro-batches of a rank in one step.
        length: places for tokens in each sequence, padding among them.
        state_bytes: what the optimizer keeps for each trained number, in bytes.
        update_bytes: what its update makes meanwhile for each trained number, in bytes.
        updated_at_once: for how many numbers at once, or for one tensor that has more; 0: for all.
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
    state_bytes: float = 8.0
    update_bytes: float = 0.0
    updated_at_once: int = 0


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


# -- what a plan asks ------------------------------------------------------------------------------

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
    def wire(self) -> float:
        """Bytes that leave each rank where a ring carries them."""
        share = (len(self.group) - 1) / len(self.group)
        if self.operation == "all_reduce":
            return 2 * share * self.bytes
        return self.bytes if self.operation == "send" else share * self.bytes

    def spans(self, per_machine: int) -> bool:
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


class StrategyPlanner(Protocol):
    """What plans ask of a strategy."""

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
        router_aux_loss: a mixture's routers have a loss of their own, made of a whole micro-batch.
        ranks_run_here: the packages of this machine are those that ranks will have.
        quantised: frozen linear layers hold codes, which cannot be cut like weights.
        paged: the optimizer's state is in memory that moves to the host by itself, which torch
            takes for the host's.
        reentrant_only: see `Graph.reentrant_only`.
    """

    options: Any
    world_size: int
    optimizer: str
    adapter: str = ""
    micro_batches: int = 1
    activations: Activations = Activations()
    precision: Precision | None = None
    router_aux_loss: bool = False
    ranks_run_here: bool = True
    quantised: bool = False
    paged: bool = False
    reentrant_only: str = ""


NO_FP8 = Support(
    Level.NOT_WRITTEN_YET, "nobody has tried products in FP8 with its engine, which does not ask"
)


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
        takes_clip_kernel: options -> whether gradients are whole and on the device when they are
            clipped, so that a device's own kernel can do it; the reason if not.
        takes_update_kernel: options -> whether what the optimizer updates are plain tensors on the
            device, whole or parts, so that a device's own kernel of an elementwise update can.
        takes_fp8: options -> whether its engine trains in the contexts that `Backend.fp8_products`
            makes; the reason if not.
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
    takes_clip_kernel: Callable[[Any], Support] = lambda options: FULL
    takes_update_kernel: Callable[[Any], Support] = lambda options: FULL
    takes_fp8: Callable[[Any], Support] = lambda options: NO_FP8
    shorthands: Mapping[str, Callable[[int, int], Mapping[str, Any]]] = field(
        default_factory=dict, hash=False
    )
    check: Callable[[StrategyRun], None] = lambda run: None
    check_model: Callable[[Any, Any], None] = lambda options, config: None
    hints: PlannerHints = PlannerHints()
