"""Brings the packages together for one rank: device, data, model, strategy, loop."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from anygauge.config.schema import RunFile, resolve_precision
from anygauge.data import (
    Layout,
    PreparedRows,
    advice,
    describe_rows,
    prepare,
    training_batches,
)
from anygauge.data.rows import share_of_memory
from anygauge.data.template import end_of_turn_ids, read_template, template_to_save
from anygauge.interface import (
    ACCEPTED,
    AnygaugeError,
    Backend,
    BuildContext,
    Engine,
    Job,
    Level,
    ModelFactory,
    Placement,
    Precision,
    Share,
    Strategy,
    StrategySpec,
    UnsupportedError,
)
from anygauge.kernels.choose import kernels_of_run
from anygauge.kernels.kernel_plan import plan_kernels
from anygauge.kernels.loss import model_loss
from anygauge.models.card import packed_in_words
from anygauge.models.export import save_adapter
from anygauge.models.factory import CausalModelFactory
from anygauge.models.flops import step_flops
from anygauge.models.inputs import PLAIN, answer_from_host, plan_masks
from anygauge.models.quantization import in_words, quantization
from anygauge.models.quantized import quantized_layers
from anygauge.models.result_files import ResultFiles
from anygauge.models.source import check_one_commit, check_positions
from anygauge.models.tokenizer import check_vocabulary, load_tokenizer
from anygauge.registry import Registry
from anygauge.strategies.shared.activations import offload_activations
from anygauge.strategies.shared.common import torch_dtype, trained_parameters
from anygauge.training.build_strategy import FUSED_ADAMW, check_strategy, share_of, workload_of
from anygauge.training.checkpoints.checkpoint_files import Checkpoint, ResumedFactory
from anygauge.training.checkpoints.identity import identity_of, settings_of
from anygauge.training.checkpoints.manager import (
    CheckpointManager,
    StopRequest,
    check_resumed,
    find_checkpoint,
    import_rank_state,
)
from anygauge.training.evaluation import EvaluationSources, evaluation_sources, probe_logits
from anygauge.training.loop import Loop
from anygauge.training.optimizer import optimizer_factory
from anygauge.training.profiled_steps import StepProfiler
from anygauge.training.progress import Progress
from anygauge.training.schedule import peak_advice, rates_differ
from anygauge.training.step_results import History, MetricsLogger, PendingSteps
from anygauge.training.system import SystemSampler
from anygauge.training.to_device import ToDevice, WarmUp, warm_up_widths
from anygauge.training.trackers.group import Trackers, check_trackers, open_trackers
from anygauge.util.events import EventWriter
from anygauge.util.files import write_text
from anygauge.util.run_lock import check_lock


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """A run ready to train, and what is needed to save it afterwards, or compare it (`probe`)."""

    run: RunFile
    loop: Loop
    spec: StrategySpec
    strategy: Strategy
    engine: Engine
    logger: MetricsLogger
    factory: CausalModelFactory
    result_files: ResultFiles
    precision: Precision
    data: PreparedRows
    probe: Callable[[], Tensor | None] | None
    choices: Mapping[str, Any]
    identity: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """Which process of the run this is, and how it speaks to the user and its supervisor.

    Attributes:
        listener: descriptor of the socket on which the ranks' store listens, where it is this
            rank's.
        lock: of rank 0: the run directory's lock, which must be there whenever it writes.
    """

    index: int
    local: int
    world_size: int
    events: EventWriter
    progress: Progress
    listener: int | None = None
    lock: str | None = None

    def log(self, text: str) -> None:
        """A line for the terminal, once per run."""
        if self.index == 0:
            self.events.message(text)

    def warn(self, text: str) -> None:
        """A warning, once per run."""
        if self.index == 0:
            self.events.message(text, "warning")


def open_device(job: Job, rank: Rank, run: RunFile, registry: Registry) -> Backend:
    """Create the job's backend, open this rank's device and join the process group.

    Raises:
        AnygaugeError: the strategy cannot run so, or needs what the device lacks.
    """
    backend = registry.create_backend(job.backend, job.backend_options)
    if run.train.deterministic and (why := backend.make_deterministic()):
        rank.warn(f"train.deterministic: {why}")
    check_strategy(run, registry, backend, rank.world_size)
    device = backend.open(rank.local)
    if not registry.find_strategy(run.strategy.name).spec.single_process:
        backend.collectives.open(
            rendezvous=job.rendezvous,
            rank=rank.index,
            world_size=rank.world_size,
            # Ranks come here as fast as each has imported what it needs.
            timeout_s=max(job.launch.collective_timeout_s, job.launch.join_timeout_s),
            device=device,
            secret=job.token,
            listener=rank.listener,
        )
    return backend


def prepare_run(
    job: Job, run: RunFile, rank: Rank, registry: Registry, backend: Backend, strategy: Strategy
) -> PreparedRun:
    """Build everything that the loop needs on this rank's opened device."""
    folder = Path(job.run_directory)
    if rank.index == 0:
        check_trackers(registry, run, os.environ)
    precision = resolve_precision(run.precision, backend.support)
    if (found := backend.support(precision.param_dtype)).level is Level.PARTIAL:
        rank.warn(f"precision.param_dtype: {precision.param_dtype} on this device: {found.reason}")
    kernels = kernels_of_run(run, backend, registry)
    backend.adapt_models(packing=run.data.isolates)
    tokenizer = load_tokenizer(run.model)
    check_one_commit(run.model, backend.collectives)
    factory = CausalModelFactory.of(run, torch_dtype(precision.param_dtype))
    check_vocabulary(factory.config, tokenizer)
    if factory.new_tokens is not None:
        rank.log(str(factory.new_tokens))
    check_positions(factory.config, run.data.max_length)
    registry.find_strategy(run.strategy.name).spec.check_model(run.strategy, factory.config)
    plan = plan_kernels(run, backend, kernels, factory)
    factory = factory.with_kernels(plan.attention.name, plan.model)
    packed = PLAIN
    share = share_of(run, registry, rank.index, rank.world_size)
    if share.sequence is not None or run.data.isolates:
        because = {} if share.sequence is None else {"field": "strategy.cp", "off": "1"}
        packed = plan_masks(factory.config, plan.attention.masks_of, run.data.max_length, **because)
    # Any rank may be the one that tokenizes, so each says for itself how far it has come.
    data = prepare(
        run.data,
        tokenizer,
        run.train.seed,
        log=rank.events.message,
        run=job.id,
        memory=share_of_memory(job.launch.devices),
        pairs=run.objective_spec.pairs,
    )
    mixed = packed_in_words(run.data) if not run.data.isolates else ""
    rank.log(f"data: {describe_rows(data.train)}{mixed}")
    if short := advice(data.train, run.data):
        rank.warn(short)
    template, kwargs = read_template(run.data.chat_template), run.data.chat_template_kwargs
    ends = end_of_turn_ids(tokenizer, template, kwargs=kwargs)
    template = template_to_save(tokenizer, template, kwargs)
    files = ResultFiles(run.model, tokenizer, chat_template=template, end_ids=ends)
    workload = workload_of(run, registry, backend, precision, rank.index, rank.world_size)
    pad_id, pin = tokenizer.pad_token_id, backend.placement.pin
    layout = Layout.of(run, share, pad_id, backend.graph.shapes, pin=pin)
    batches = training_batches(data.train, run.data, run.train, layout)
    if short := peak_advice(batches.steps, run.train.optimizer.lr, run.train.schedule):
        rank.warn(short)
    evaluations: EvaluationSources = {}
    if data.eval is not None:
        rank.log(f"evaluation: {data.eval.report}")
        evaluations = evaluation_sources(data.eval, run.data, layout)
    resumed = find_checkpoint(
        "auto" if job.resume else run.checkpoint.resume, folder, rank.index, backend.collectives
    )
    for text in resumed.skipped:
        rank.warn(text)
    start = resumed.checkpoint
    identity = identity_of(run, factory.config.to_dict(), batches.fingerprint())
    settings = settings_of(run)
    changes = check_resumed(resumed, identity, settings, batches.steps)
    if start is not None:
        batches.resume(start.record["data"])
        rank.log(f"resumed: {start.folder} ({start.step} steps done)")
        before = start.record["steps"]
        if rates_differ(start.step, before, batches.steps, run.train.schedule):
            rank.warn(
                f"train.schedule depends on the length of the run: steps 1 to {start.step} had the "
                f"learning rates of a run of {before} steps, so the losses differ "
                f"from those of a run that began with {batches.steps} steps"
            )
    for change in changes:
        rank.log(f"changed since: {change}")
    starting = factory if start is None else cast("ModelFactory", ResumedFactory(factory, start))
    profiler = StepProfiler(
        placement=backend.placement,
        progress=rank.progress,
        steps=range(*job.profile_steps),
        folder=folder,
        rank=rank.index,
        log=rank.events.message,
    )
    if not job.resume:  # another attempt may begin behind them
        profiler.check(0 if start is None else start.step, batches.steps)
    engine = strategy.build(
        BuildContext(
            factory=starting,
            optimizer=optimizer_factory(
                run.train.optimizer, plan.adamw, fused=bool(backend.support(FUSED_ADAMW))
            ),
            workload=workload,
            clip_grad_norm=plan.clip_grad_norm,
        )
    )
    causal = plan.attention.kernel is not None and plan.attention.kernel.causal
    if causal or plan.attention.masks_of == "sdpa":
        answer_from_host(engine.model, plan.attention.name, causal=causal)
    if run.train.activation_offloading:
        offload_activations(engine.model, backend.placement)
    seed_dropout(backend, run.train.seed, rank, share, start)
    wanted = run.checkpoint.every or run.checkpoint.num_best or start is not None
    if wanted and engine.refuses_checkpoints:
        raise UnsupportedError(f"checkpoints: {engine.refuses_checkpoints}")
    if start is not None:
        engine.import_state(start)
        import_rank_state(engine, start, changes, rank.index, rank.world_size, rank.log)
    total, trained = parameter_counts(engine)
    quantized = quantization(run.model)
    bits = backend.placement.float32_product_bits
    shortened = bits < Placement.float32_product_bits and precision.param_dtype == "float32"
    rank.log(
        f"model: {type(factory.config).__name__.removesuffix('Config')}, {total:,} parameters, "
        f"{trained:,} trained ({trained / total:.2%}); {precision.param_dtype} ({precision.why})"
        + ("" if quantized is None else f"; linear layers {in_words(quantized)}")
        + ("; linear layers multiply in FP8" if precision.fp8 else "")
        + (f"; products keep {bits} bits of each factor" if shortened else "")
    )
    rank.log(f"kernels: {plan.describe()}")
    if run.objective_spec.reference:
        rank.log(f"objective: {run.objective}; the reference is the base without the adapter")
    peak = backend.placement.peak_flops(precision.param_dtype)
    moving: dict[str, Any] = {
        "backend": backend,
        "compute": precision.param_dtype,
        "packed": packed,
        "progress": rank.progress,
        "share": share,
        "routed": run.train.router_aux_loss_coef > 0,
    }
    done = 0 if start is None else start.step
    first_steps, dummies = warm_up_widths(batches, done)
    # What is measured for products in FP8 must be of rows of the run.
    if len(dummies) < 2 or precision.fp8:
        to_device = ToDevice(**moving)
    else:
        to_device = WarmUp(**moving, steps=first_steps, dummies=dummies)
        rank.log(str(to_device))
    check = functools.partial(check_lock, folder, rank.lock)
    vocabulary = getattr(factory.config.get_text_config(), "vocab_size", None)
    probe = None
    if run.adapter is None or run.adapter.verify:
        probe = functools.partial(probe_logits, engine, vocabulary, layout, to_device)
    trackers, system = Trackers({}, rank.warn), None
    if rank.index == 0:
        check()
        accept_start(job)
        resumed_from = None if start is None else start.step
        trackers = open_trackers(registry, run, folder, rank.warn, resumed_from_step=resumed_from)
        every_s = run.train.system_every_s
        system = SystemSampler(backend.placement, folder, every_s, rank.warn)
    logger = MetricsLogger(
        path=folder / "metrics.jsonl",
        rank=rank.index,
        world_size=rank.world_size,
        settings=run.train,
        batches=batches,
        shapes=to_device.shapes,
        flops=step_flops(engine.model, factory.config, engine.parameter_shape),
        peak_flops=peak.value if peak else None,
        backend=backend,
        events=rank.events,
        trackers=trackers,
        system=system,
        history=History() if start is None else History.of_record(start.record["history"]),
    )
    manager = CheckpointManager(
        section=run.checkpoint,
        run_directory=folder,
        engine=engine,
        backend=backend,
        rank=rank.index,
        record=lambda done: {
            "steps": batches.steps,
            "world_size": rank.world_size,
            "identity": identity,
            "settings": settings,
            "history": dataclasses.asdict(logger.history),
            "data": batches.state(done),
        },
        export_adapter=None
        if run.adapter is None
        # Not checked by a forward, unlike a run's result.
        else lambda part, trained: save_adapter(
            engine.model,
            trained,
            part,
            shapes=trained_shapes(engine),
            base=run.model,
            files=files,
            dtype=precision.param_dtype,
            first=factory.first_factors,
        ),
        probe=probe if run.checkpoint.result == "best" else None,
        log=rank.log,
        check_folder=check,
        writing=lambda step: rank.progress.unlike_others(
            f"writing the checkpoint of step {step}",
            backend.collectives,
            then_limit_s=job.launch.collective_timeout_s,
        ),
        by_default=run.checkpoint.every is None
        and run.adapter is not None
        and not engine.refuses_checkpoints,
    )
    manager.scan()
    pending = PendingSteps(
        backend=backend,
        logger=logger,
        stop=StopRequest(),
        checkpoints=manager,
        progress=rank.progress,
        share=share,
    )
    loop = Loop(
        engine=engine,
        backend=backend,
        batches=batches,
        to_device=to_device,
        loss_function=model_loss,
        evaluations=evaluations,
        logger=logger,
        pending=pending,
        checkpoints=manager,
        settings=run.train,
        progress=rank.progress,
        profiler=profiler,
        start=done,
    )
    return PreparedRun(
        run=run,
        loop=loop,
        spec=registry.find_strategy(run.strategy.name).spec,
        strategy=strategy,
        engine=engine,
        logger=logger,
        factory=factory,
        result_files=files,
        precision=precision,
        data=data,
        probe=probe,
        identity=identity,
        choices={
            **plan.record(),
            "strategy": strategy.description
            + (f" ({job.strategy_why})" if job.strategy_why else ""),
            **({} if quantized is None else {"quantized_base": in_words(quantized)}),
            "precision": dataclasses.asdict(precision),
        },
    )


def seed_dropout(
    backend: Backend, seed: int, rank: Rank, share: Share, start: Checkpoint | None
) -> None:
    """Set this rank's generators; initial weights came from their own ones.

    A resumed run has the states of the ranks it had; on another number of ranks, no state
    would be right, and it begins with new ones.
    """
    step = 0 if start is None else start.step
    backend.placement.seed(((seed * 100_003 + share.random_stream) + step * 1_000_003) % 2**63)
    if start is not None and start.record["world_size"] == rank.world_size:
        backend.placement.set_rng_state(start.rng(rank.index))


def trained_shapes(engine: Engine) -> dict[str, tuple[int, ...]]:
    """The whole shape of every trained parameter."""
    return {name: engine.parameter_shape(p) for name, p in trained_parameters(engine.model)}


def parameter_counts(engine: Engine) -> tuple[int, int]:
    """(Total, trained) parameters, unsharded."""
    total: int = sum(math.prod(engine.parameter_shape(p)) for p in engine.model.parameters())
    for layer in quantized_layers(engine.model).values():
        # A byte of codes may stand for several numbers.
        codes: Any = layer.weight
        total += math.prod(layer.plain_shape) - math.prod(engine.parameter_shape(codes))
    return total, sum(map(math.prod, trained_shapes(engine).values()))


def accept_start(job: Job) -> None:
    """Have the run directory name the resolved run of a start that resumes it; for rank 0.

    Raises:
        AnygaugeError: a file cannot be written.
    """
    own, home = job.start_directory, Path(job.run_directory)
    if own == home:
        return
    try:
        for path in own.glob("run.*"):
            write_text(home / path.name, path.read_text(), 0o600)
        (own / ACCEPTED).touch()
    except OSError as error:
        raise AnygaugeError(
            f"the run file of this start cannot be copied from {own} to {home}: {error}. Check "
            "that the folder can be written, and give the same command again"
        ) from error
