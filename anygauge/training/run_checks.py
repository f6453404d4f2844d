"""Checks of a run what needs no device: model, tokenizer, targets and rows.

What ranks check, they check with the same functions. This reads model and rows, in the process of
`anygauge.launch.prepare_process`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.config.schema import RunFile, resolve_precision
from anygauge.interface import ModelError, PluginError, ShapePolicy
from anygauge.models.adaptable_layers import surely_match
from anygauge.models.hub import CONFIG, copy_of, missing_files, names_hub
from anygauge.models.model_files import check_weights, read_header, surely_fit
from anygauge.models.quantization import refuse_format
from anygauge.models.source import check_positions, load_config, local_folder, quiet_libraries
from anygauge.models.tokenizer import check_vocabulary, load_tokenizer
from anygauge.models.vocabulary import new_tokens
from anygauge.models.warm_start import WEIGHTS_FILE, refuse_no_adapter
from anygauge.registry import installed_plugins
from anygauge.training.build_strategy import create_strategy, share_of, workload_of
from anygauge.training.checks import Findings
from anygauge.training.schedule import peak_advice

if TYPE_CHECKING:
    from anygauge.data.template import Rendering


def ignore(*_: str) -> None:
    """Do nothing, where nobody listens."""


@dataclass(kw_only=True, slots=True)
class RunChecks:
    """Checks model, tokenizer, targets and rows; rows are then in the cache for the ranks.

    Attributes:
        run: without its variables, which this process has.
        backend: name of the chosen one.
        id: of the job.
        has_files: this machine has the files that the run file names.
        copied: addresses of rows that are in the cache.
        engine: also tell the engine's settings and the run's steps, for a dry run.
        log: takes progress.
        enter: gets the part that begins: ``model`` or ``data``.
        hide: called where torch is of no use.
        rendering: see `anygauge.data.template.Rendering`.
        folder: of an existing model that is on this machine.
        shapes: name -> shape of its weights, where all are here.
    """

    run: RunFile
    backend: str
    id: str = ""
    has_files: bool = True
    copied: Sequence[str] = ()
    engine: bool = False
    log: Callable[[str], None] = ignore
    enter: Callable[[str], None] = ignore
    hide: Callable[[], None] = ignore
    rendering: Rendering = ignore
    found: Findings = field(default_factory=Findings)
    folder: Path | None = None
    shapes: dict[str, tuple[int, ...]] | None = None

    def check(self) -> Findings:
        """Check all.

        Raises:
            AnygaugeError: what ranks would refuse.
        """
        run, found = self.run, self.found
        self.enter("model")
        self.folder = self._model_folder()
        self.shapes = self._weights()
        here = run.model.config is not None or self.folder is not None
        built = here and self._must_be_built()
        if not built and not self.engine:
            self.hide()
        quiet_libraries()
        config = None
        if here:
            config = load_config(run.model)
            refuse_format(config, quantize=run.model.quantize is not None)
            check_positions(config, run.data.max_length)
            spec = installed_plugins().find_strategy(run.strategy.name).spec
            spec.check_model(run.strategy, config)
        tokenizer = self._tokenizer()
        if config is not None and tokenizer is not None:
            if (added := new_tokens(run.model, config, tokenizer, run.train.seed)) is not None:
                found.notes.append(str(added))
                added.enlarge_config(config)
            check_vocabulary(config, tokenizer)
        if run.adapter is not None and run.adapter.start_from is not None and self.has_files:
            refuse_no_adapter(Path(run.adapter.start_from))
            read_header(Path(run.adapter.start_from) / WEIGHTS_FILE)
        skeleton = self._build() if built else None
        if self.engine:
            self._settings(skeleton)
        if tokenizer is not None:
            self.enter("data")
            self._rows(tokenizer)
        steps, train = found.steps or run.train.steps, run.train
        if self.engine and steps:  # in a run, the ranks say it
            short = peak_advice(steps, train.optimizer.lr, train.schedule)
            found.advice = "\n".join(filter(None, [found.advice, short]))
        return found

    def _model_folder(self) -> Path | None:
        """The folder of an existing model, if it is on this machine."""
        section, found = self.run.model, self.found
        if section.name is None:
            return None
        folder = Path(section.name)
        if folder.is_dir():
            return local_folder(section)
        if folder.is_absolute():
            if self.has_files:
                raise ModelError(f"model.name: no such folder: {folder}")
            found.notes.append(f"the ranks will check the model: {folder} is not on this machine")
            return None
        copy = copy_of(section.name, section.revision)
        if copy is None or not (copy / CONFIG).is_file():
            found.notes.append(
                f"the ranks' machines will fetch and check the model: {section.name} is neither a "
                "folder on this machine nor among its copies from the hub"
            )
            return None
        return copy

    def _weights(self) -> dict[str, tuple[int, ...]] | None:
        section, folder = self.run.model, self.folder
        if folder is None:
            return None
        if folder != Path(section.name or "") and missing_files(folder, weights=True):
            return None  # of the hub's model only a part was fetched so far
        try:
            return check_weights(folder)
        except ModelError as error:
            if folder == Path(section.name or ""):
                raise
            raise ModelError(
                f"{error}. It is this machine's copy of {section.name}: remove "
                f"{folder.parents[1]}, and repeat the command"
            ) from None

    def _must_be_built(self) -> bool:
        """Whether only the model itself, without its weights, has the answer."""
        run, folder, shapes = self.run, self.folder, self.shapes
        asked = (
            self.engine
            or run.model.attention != "auto"
            or run.model.trust_remote_code
            or run.train.router_aux_loss_coef > 0
            or bool(run.model.new_tokens or run.model.new_special_tokens)
            or bool(run.train.trainable or run.train.frozen)
            or (run.adapter is not None and not surely_match(run.adapter, shapes))
            or (run.adapter is not None and run.adapter.init is not True)
            or (folder is not None and shapes is not None and not surely_fit(folder, shapes))
        )
        if asked and importlib.util.find_spec("torch") is None:
            self.found.notes.append(
                "only the ranks can build the model: torch is not installed here"
            )
            return False
        return asked

    def _tokenizer(self) -> Any:
        section = self.run.model
        origin = section.tokenizer or section.name
        assert origin is not None
        path = Path(origin)
        there = path.exists()
        if names_hub(origin):
            there = (
                copy_of(origin, section.revision if section.tokenizer is None else None) is not None
            )
        elif not there and self.has_files:
            raise ModelError(f"model.tokenizer: no such file or folder: {origin}")
        if not there:
            self.found.notes.append(
                f"the ranks will check tokenizer and rows: {origin} is not on this machine"
            )
            return None
        return load_tokenizer(section)

    def _rows(self, tokenizer: Any) -> None:
        from anygauge.config.paths import CHAT_TEMPLATE, holds_template, is_remote
        from anygauge.data import Layout, advice, describe_rows, prepare, training_batches
        from anygauge.data.template import end_of_turn_ids, read_template

        run, found = self.run, self.found
        sources = (*run.data.train_sources, *run.data.eval_sources)
        given = run.data.chat_template
        if self.has_files or given is None or holds_template(CHAT_TEMPLATE, given):
            # Ranks render this too, for the result.
            kwargs = run.data.chat_template_kwargs
            end_of_turn_ids(tokenizer, read_template(given), self.rendering, kwargs=kwargs)
        if not self.has_files:
            found.notes.append("the ranks will read the rows, on the job's machines")
            return
        if {source.path for source in sources if is_remote(source.path)} - {*self.copied}:
            found.notes.append("the ranks will read the rows of the hub and of other machines")
            return
        data = prepare(
            run.data,
            tokenizer,
            run.train.seed,
            log=self.log,
            run=self.id,
            rendering=self.rendering,
            pairs=run.objective_spec.pairs,
        )
        found.data = describe_rows(data.train)
        found.advice = advice(data.train, run.data) or ""
        if self.engine and not run.data.streaming:
            registry = installed_plugins()
            share = share_of(run, registry, 0, _ranks(run))
            layout = Layout.of(run, share, tokenizer.pad_token_id, ShapePolicy())
            batches = training_batches(data.train, run.data, run.train, layout)
            found.steps = batches.steps
            found.epochs = batches.epoch(batches.steps - 1)

    def _build(self) -> Any:
        """The model without weights, with its adapter, held against what its files have."""
        from anygauge.models.factory import CausalModelFactory
        from anygauge.strategies.shared.common import torch_dtype

        run = self.run
        compute = run.precision.param_dtype
        factory = CausalModelFactory.of(
            run,
            torch_dtype("float32" if compute == "auto" else compute),
            attention=run.model.attention if run.model.attention != "auto" else "eager",
        )
        skeleton = factory.skeleton()
        if self.folder is not None and self.shapes is not None:
            factory.weights().check_shapes()
        return factory.adapt(skeleton)

    def _settings(self, skeleton: Any) -> None:
        """Find the engine's settings, and what is not known of them.

        Args:
            skeleton: the adapted model without weights; None leaves out what depends on its sizes.
        """
        run, found, registry = self.run, self.found, installed_plugins()
        backend = registry.create_backend(self.backend, run.backend_options)
        precision = resolve_precision(run.precision, backend.support)
        notes = []
        if run.precision.param_dtype == "auto":
            notes.append(
                f"precision.param_dtype is auto: {precision.param_dtype} unless the opened device "
                "says otherwise"
            )
        if skeleton is None:
            notes.append("this list leaves out settings that depend on the model's sizes")
        try:
            workload = workload_of(run, registry, backend, precision, 0, _ranks(run), skeleton)
            found.settings = list(create_strategy(registry, run).settings(workload))
            found.engine_note = "\n  ".join(notes)
        except PluginError as error:  # torch is missing, as on a login node
            if not isinstance(error.__cause__, ImportError):
                raise
            found.engine_note = f"not shown: {error.__cause__.name} is not installed here"


def _ranks(run: RunFile) -> int:
    return run.launch.nodes * run.launch.devices
