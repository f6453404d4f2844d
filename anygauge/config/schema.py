"""The sections of a run file: each field has its type, its default and what it means.

`sections` has those of the training itself: model, adapter, train and checkpoint.
`resolve_precision` decides the precision that a run file leaves to the device.

Pydantic checks a run file against these classes; `anygauge.config.load` reads the YAML and turns
pydantic's complaints into messages with file, line and the nearest valid name. Unknown fields are
errors everywhere. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, field_validator, model_validator

from anygauge.config.paths import is_remote
from anygauge.config.sections import AdapterSection, CheckpointSection, ModelSection, TrainSection
from anygauge.config.strategies import AnyStrategySection, StrategySection
from anygauge.config.tree import Origin, Problem, run_file_error
from anygauge.interface import (
    LaunchSettings,
    Level,
    ObjectiveSpec,
    PluginError,
    Precision,
    RunFileError,
    Support,
    UnsupportedError,
)
from anygauge.registry import installed_plugins
from anygauge.util.section import (
    LARGEST,
    NULLS_REMOVED,
    Positive,
    PositiveNumber,
    Section,
)


class SourceSection(Section):
    """One set of rows and how to read them."""

    path: str = Field(
        description="A .json, .jsonl, .csv, .parquet or .txt file, the address of one (https://, "
        "hf://, s3://), or a dataset's name on the hub."
    )
    subset: str | None = Field(None, description="Hub: the dataset's configuration.")
    split: str = Field("train", description="Hub: the dataset's split.")
    revision: str | None = Field(None, description="Hub: branch, tag or commit.")
    format: Literal[
        "auto",
        "prompt_completion",
        "alpaca",
        "alpaca_chat",
        "messages",
        "sharegpt",
        "text",
        "tokens",
        "preference",
    ] = Field("auto", description="How a row is laid out; auto: detected from path and columns.")
    prompt: str = Field(
        "prompt", description="Column of the prompt (prompt_completion, preference)."
    )
    completion: str = Field("completion", description="Column of the answer (prompt_completion).")
    chosen: str = Field("chosen", description="Column of the better answer (preference).")
    rejected: str = Field("rejected", description="Column of the worse answer (preference).")
    text: str = Field("text", description="Column of the text (format text).")
    messages: str = Field("messages", description="Column of the turns (messages).")
    conversations: str = Field("conversations", description="Column of the turns (sharegpt).")
    tools: str = Field("tools", description="Column of the tools, if a row has any (chats).")
    system: str = Field("system", description="Column of the system turn, if any (chats).")
    template: str = Field(
        "{prompt}\n",
        description="prompt_completion, preference: what the model reads before the answer; "
        "{prompt} is replaced.",
    )
    limit: Positive | None = Field(None, description="Use only this many rows, from the beginning.")
    weight: PositiveNumber = Field(
        1.0,
        description="Times that each row is read in an epoch: 2 is twice, 0.5 every second epoch.",
    )


_ARGUMENTS = {
    *("messages", "conversation", "conversations", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "tokenize", "sanitize_control_tokens"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}
"""What a chat is rendered with, by `apply_chat_template` of the transformers library."""


class DataSection(Section):
    """Rows to train and evaluate on, and how they become tokens."""

    train: SourceSection | list[SourceSection] = Field(
        description="Rows to train on: one source, or a list of them.",
        json_schema_extra={"minItems": 1},
    )
    eval: SourceSection | list[SourceSection] | None = Field(
        None, description="Rows to evaluate on.", json_schema_extra={"minItems": 1}
    )
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Share of the training rows to hold out for evaluation, in place of eval."
    )
    chat_template: str | None = Field(
        None,
        description="For chats: chatml, llama3, gemma, mistral, qwen3 or phi; a Jinja file; or the "
        "template itself. null: the tokenizer's.",
    )
    chat_template_kwargs: Annotated[dict[str, Any], NULLS_REMOVED] = Field(
        default_factory=dict,
        description="Variables for the chat template, such as enable_thinking: false.",
    )
    max_length: Annotated[int, Field(ge=2, le=LARGEST)] = Field(
        512, description="Most tokens in a row or pack."
    )
    too_long: Literal["truncate", "drop"] = Field(
        "truncate", description="What becomes of rows beyond max_length."
    )
    loss_on: Literal["answer", "last_turn", "all"] = Field(
        "answer",
        description="Tokens that enter the loss: answers (in a chat, every turn of the assistant), "
        "only the last turn of the assistant, or every token.",
    )
    packing: bool | Literal["isolate", "concatenate"] = Field(
        False,
        description="Put several rows in one sequence: true or isolate, and none attends to "
        "another; concatenate, and each attends to those before it.",
    )
    group_by_length: bool = Field(
        False, description="Put rows of like length in one step, so that less is padding."
    )
    shuffle: bool = Field(
        True,
        description="Read the rows in a new order in each epoch; false: in the order of the files, "
        "source after source.",
    )
    on_bad_row: Literal["raise", "skip"] = Field(
        "raise",
        description="What a row that cannot be used does: end the run with its place, or be left "
        "out and counted.",
    )
    workers: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None,
        description="Processes that tokenize rows before the run; null: the usable cores, at most "
        "16, and one for fewer than 10,000 rows.",
    )
    streaming: bool = Field(
        False,
        description="Tokenize rows during training instead of before it, without a copy on disk.",
    )
    shuffle_buffer: Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        10_000,
        description="With streaming: rows are shuffled within blocks of this many rows.",
    )
    cache: str | None = Field(
        None,
        description="Folder for tokenized rows; null: $ANYGAUGE_CACHE, or ~/.cache/anygauge; off: "
        "tokenize anew in each run.",
        json_schema_extra={"anyOf": [{"type": "string"}, {"const": False}, {"type": "null"}]},
    )

    @field_validator("cache", mode="before")
    @classmethod
    def _read_off(cls, value: Any) -> Any:
        # YAML reads a bare `off` as false.
        return "off" if value is False else value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_kwargs(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_ARGUMENTS & value.keys()):
            raise ValueError(
                f"{', '.join(map(repr, taken))}: anygauge sets this itself, row by row; give "
                "variables that the template alone reads, such as 'enable_thinking'"
            )
        if odd := [name for name in value if not name.isidentifier()]:
            raise ValueError(f"{odd[0]!r} is not a name that a template can read")
        return value

    @property
    def packs(self) -> bool:
        """Whether a sequence holds several rows."""
        return bool(self.packing)

    @property
    def isolates(self) -> bool:
        """Whether rows share a sequence and none attends to another."""
        return self.packing in (True, "isolate")

    @property
    def train_sources(self) -> tuple[SourceSection, ...]:
        """The training sources, also where there is but one."""
        return _as_tuple(self.train)

    @property
    def eval_sources(self) -> tuple[SourceSection, ...]:
        """The evaluation sources; empty where there are none."""
        return _as_tuple(self.eval)

    @model_validator(mode="after")
    def _check_combination(self) -> DataSection:
        if self.train == [] or self.eval == []:
            raise ValueError("an empty list has no rows; give at least one source")
        if self.eval is not None and self.eval_fraction:
            raise ValueError("give 'eval' or 'eval_fraction', not both")
        if any(source.weight != 1 for source in self.eval_sources):
            raise ValueError("'weight' is of no use in 'eval', where each row is read once")
        if self.streaming:
            self._check_streamed()
        if self.streaming and self.group_by_length:
            raise ValueError(
                "give 'streaming' or 'group_by_length', not both: lengths are known only once rows "
                "are tokenized"
            )
        if not self.shuffle and (self.packs or self.group_by_length):
            field = "packing" if self.packs else "group_by_length"
            raise ValueError(
                f"give 'shuffle: false' or '{field}', not both: {field} has an order of its own"
            )
        if self.packs and self.group_by_length:
            raise ValueError(
                "give 'packing' or 'group_by_length', not both: packs have no padding to save"
            )
        return self

    def _check_streamed(self) -> None:
        """Refuse what rows that are read in their own order cannot do."""
        way_out = "; leave 'streaming' out (rows are then tokenized before the run)"
        weighted = [source for source in self.train_sources if source.weight != 1]
        if weighted:
            raise ValueError(
                f"{weighted[0].path} is streamed, once in an epoch, so it cannot have a 'weight'"
                f"{way_out}, or change train.epochs instead"
            )
        if self.eval_fraction:
            raise ValueError(
                "rows of 'eval_fraction' cannot be drawn from a stream, whose end is not known"
                f"{way_out}, or give 'eval' a source of its own, with a 'limit'"
            )
        for source in self.eval_sources:
            if is_remote(source.path) and source.limit is None:
                raise ValueError(
                    f"{source.path} in 'eval' needs a 'limit' when 'streaming' is on, because "
                    "rows of 'eval' are always tokenized before the run"
                )


def _as_tuple(
    sources: SourceSection | list[SourceSection] | None,
) -> tuple[SourceSection, ...]:
    if sources is None:
        return ()
    return (sources,) if isinstance(sources, SourceSection) else tuple(sources)


class PrecisionSection(Section):
    """Data types of weights and gradients: the same for all strategies, so you can compare them."""

    param_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of weights in memory and of arithmetic; auto: the first of bfloat16, "
        "float16 and float32 that is fast on the device.",
    )
    reduce_dtype: Literal["param_dtype", "float32"] = Field(
        "float32", description="Type in which gradients are accumulated and reduced."
    )
    fp8: bool = Field(
        False,
        description="Linear layers multiply in FP8 while they train, on backends that can; needs "
        "param_dtype: bfloat16, or auto where that is bfloat16.",
    )


def _check_variable(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        what = f"{name[:60]!r} cannot be the name of a variable"
        raise ValueError(f"{what}: a name has at least one character, and no '=' or NUL")
    return name


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("the value holds a NUL, which no variable can have")
    return value


def _check_objective(name: str) -> str:
    try:
        installed_plugins().find_objective(name)
    except PluginError as error:
        raise ValueError("; ".join(str(error).splitlines())) from None
    return name


_Variable = Annotated[str, AfterValidator(_check_variable)]
_VariableValue = Annotated[str, AfterValidator(_without_nul)]


_COMPLAINT = re.compile(r"(?P<path>[a-z_]+(\.[^\s:]+)?): (?P<text>.+)")


@dataclass(frozen=True, slots=True)
class Origins:
    """Where a run's values were written, which is no part of what it is: any two are equal.

    Attributes:
        places: dotted path -> where; "" is the run file, and a default has no entry.
    """

    places: Mapping[str, Origin] = field(compare=False)


class RunFile(Section):
    """One run."""

    _origins = PrivateAttr(default=Origins({"": Origin("run file", None, Path())}))

    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128, description="Short name."
    )
    output: str = Field(
        "runs", description="Folder for run directories; each run makes <output>/<name>."
    )
    backend: str = Field(
        "auto", description="A backend's name (`anygauge backends` lists them), or auto."
    )
    model: ModelSection
    adapter: AdapterSection | None = None
    data: DataSection
    objective: Annotated[str, AfterValidator(_check_objective)] = Field(
        "sft",
        description="What training makes small: sft, the loss of tokens; dpo or orpo, of "
        "preferences; or a plugin's.",
    )
    objective_options: Annotated[dict[str, Any], NULLS_REMOVED] = Field(
        default_factory=dict, description="Options that only the objective reads, such as beta."
    )
    train: TrainSection = Field(default_factory=TrainSection)
    checkpoint: CheckpointSection = CheckpointSection()
    precision: PrecisionSection = PrecisionSection()
    strategy: AnyStrategySection = Field(default_factory=StrategySection.of_default)
    launch: LaunchSettings = LaunchSettings()
    kernels: Annotated[dict[str, str], NULLS_REMOVED] = Field(
        default_factory=dict,
        description="Operation -> kernel to use, which must be able to run here; report.json "
        "records it.",
    )
    backend_options: Annotated[dict[str, Any], NULLS_REMOVED] = Field(
        default_factory=dict, description="Options that only the backend reads."
    )
    environment: Annotated[dict[_Variable, _VariableValue], NULLS_REMOVED] = Field(
        default_factory=dict, description="Variables for every rank; win over the backend's."
    )
    trackers: list[str] = Field(
        default_factory=list,
        description="Trackers that receive the metrics in addition to metrics.jsonl, by name.",
    )
    tracker_options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Tracker -> options that it alone reads, such as project."
    )

    @model_validator(mode="after")
    def _trained_in_part(self) -> RunFile:
        if self.adapter is not None and (self.train.trainable or self.train.frozen):
            raise ValueError(
                "'train.trainable' and 'train.frozen' choose among the model's own weights, all of "
                "which an adapter freezes; remove them, or the 'adapter' section"
            )
        return self

    @model_validator(mode="after")
    def _chosen_by_evaluations(self) -> RunFile:
        early, best = self.train.early_stopping is not None, self.checkpoint.result == "best"
        rows = self.data.eval_sources or self.data.eval_fraction
        if (early or best) and not (rows and self.train.eval_every):
            raise ValueError(
                f"'{'train.early_stopping' if early else 'checkpoint.result: best'}' needs "
                "evaluations during the run; set 'train.eval_every', and 'data.eval' or "
                "'data.eval_fraction'"
            )
        return self

    @model_validator(mode="after")
    def _options_of_trackers(self) -> RunFile:
        unused = sorted(set(self.tracker_options) - set(self.trackers))
        if unused:
            raise ValueError(
                f"'tracker_options' has options for {', '.join(unused)}, which 'trackers' does "
                "not list; add it to 'trackers', or remove its options"
            )
        return self

    @functools.cached_property
    def objective_spec(self) -> ObjectiveSpec:
        """What the objective's plugin announces."""
        return installed_plugins().find_objective(self.objective).spec

    def written_at(self, places: Mapping[str, Origin]) -> RunFile:
        """Return the same run with these places of its values; see `Origins`."""
        run = self.model_copy()
        run._origins = Origins(places)
        return run

    def has_value(self, path: str) -> bool:
        """Whether the run file or the command line has a value for a dotted path."""
        return path in self._origins.places

    def origin(self, path: str) -> Origin:
        """Return where `path` was written, or else the section that it belongs to, or the file."""
        while path and not self.has_value(path):
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self._origins.places[path]

    def error(self, path: str, text: str) -> RunFileError:
        """An error to raise about one field: "FILE:LINE: path: text"."""
        return self.errors([(path, text)])

    def errors(self, said: Iterable[tuple[str, str]]) -> RunFileError:
        """Return one error about several fields, each with its path and text."""
        problems = [Problem(self.origin(path), path, text) for path, text in said]
        return run_file_error(self._origins.places[""].label, problems)

    @contextlib.contextmanager
    def locate_errors(self) -> Iterator[None]:
        """Add file and line to a plugin's complaints about options: "path: text", a line each."""
        try:
            yield
        except RunFileError as error:
            said = [_COMPLAINT.match(line) for line in str(error).splitlines()]
            if None in said:
                raise
            raise self.errors((each["path"], each["text"]) for each in said if each) from None

    @property
    def may_use_bitsandbytes(self) -> bool:
        """Whether weights are quantized, or an optimizer is not torch's own AdamW."""
        return self.model.quantize is not None or bool(self.why_no_adamw_kernel)

    @property
    def why_no_adamw_kernel(self) -> str:
        """Why a device's own AdamW cannot update this run's weights; empty if it can."""
        optimizer = self.train.optimizer
        if optimizer.name != "adamw":
            return f"train.optimizer.name is {optimizer.name}"
        return "train.optimizer.paged is set" if getattr(optimizer, "paged", False) else ""


AUTO_ORDER = ("bfloat16", "float16", "float32")
"""What ``auto`` tries: bfloat16 needs no loss scaling, so it comes before float16."""


def resolve_precision(section: PrecisionSection, support: Callable[[str], Support]) -> Precision:
    """Settle ``auto``, and refuse a type that the device cannot compute in.

    Args:
        support: a backend's capability look-up. ``auto`` chooses among the types that are full, or
            may turn out to be once a device is open.

    Raises:
        UnsupportedError: the asked type is unsupported; quotes the capability's reason. Or products
            in FP8 are asked of weights that are not in bfloat16.
    """
    param_dtype: str = section.param_dtype
    why = "asked for"
    good = (Level.FULL, Level.DEPENDS)
    fast = [name for name in AUTO_ORDER if name == "float32" or support(name).level in good]
    if param_dtype == "auto":
        param_dtype = fast[0]
        why = "auto: the best of " + ", ".join(sorted(fast))
    elif param_dtype != "float32" and not support(param_dtype):
        raise UnsupportedError(
            f"precision.param_dtype: {param_dtype!r} on this device: {support(param_dtype)}; "
            f"fast here: {', '.join(sorted(fast))}. Use one of these, or auto."
        )
    if section.fp8 and param_dtype != "bfloat16":
        raise UnsupportedError(
            f"precision.fp8: weights would be in {param_dtype} ({why}), but products in FP8 were "
            "tried with weights in bfloat16 alone. Set precision.param_dtype: bfloat16, or leave "
            "precision.fp8 out"
        )
    reduced = section.reduce_dtype
    return Precision(
        param_dtype=param_dtype,
        reduce_dtype=param_dtype if reduced == "param_dtype" else reduced,
        why=why,
        fp8=section.fp8,
    )
