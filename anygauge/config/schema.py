"""The sections of a run file: each field has its type, its default and what it means.

The longer ones are in `sections` (model, adapter, train, checkpoint) and `section_data`.
`resolve_precision` decides the precision that a run file leaves to the device.

Pydantic checks a run file against these classes; `anygauge.config.load` reads the YAML and turns
pydantic's complaints into messages with file, line and the nearest valid name. Unknown fields are
errors everywhere. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from anygauge.config.section_data import DataSection, SourceSection
from anygauge.config.sections import (
    AdapterGroup,
    AdapterSection,
    CheckpointingSection,
    CheckpointSection,
    ModelSection,
    NonNegative,
    OptimizerSection,
    Positive,
    ScheduleSection,
    Seconds,
    Section,
    TrainSection,
)
from anygauge.config.strategies import AnyStrategySection, ByName, StrategySection, default_section
from anygauge.interface import LaunchSettings, Level, Support, UnsupportedError
from anygauge.interface.strategy import Precision

__all__ = [
    "AdapterGroup",
    "AdapterSection",
    "CheckpointSection",
    "CheckpointingSection",
    "DataSection",
    "LaunchSection",
    "ModelSection",
    "OptimizerSection",
    "PrecisionSection",
    "RunFile",
    "ScheduleSection",
    "Section",
    "SourceSection",
    "StrategySection",
    "TrainSection",
]


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


_LAUNCH = LaunchSettings()


class LaunchSection(Section):
    """Where and how ranks are started."""

    launcher: str = Field("local", description="Name of the launcher.")
    nodes: Positive = Field(_LAUNCH.nodes, description="Machines.")
    devices: Positive = Field(_LAUNCH.devices, description="Ranks per machine, one per device.")
    collective_timeout_s: Seconds = Field(
        _LAUNCH.collective_timeout_s,
        description="Seconds after which the run is ended because a collective hangs, or because a "
        "rank neither works nor reports.",
    )
    join_timeout_s: Seconds = Field(
        _LAUNCH.join_timeout_s,
        description="Seconds for the agents of all machines to find each other.",
    )
    lost_after_s: Seconds = Field(
        _LAUNCH.lost_after_s,
        description="Seconds without a heartbeat after which a machine is considered lost; at most "
        "twice collective_timeout_s.",
    )
    fabric: str = Field(
        _LAUNCH.fabric,
        description="Network between machines: a name of the backend's "
        "(`anygauge env --explain` lists them), or auto.",
    )
    binding: Literal["auto", "cores", "none"] = Field(
        _LAUNCH.binding,
        description="cores: each rank of a machine gets an equal share of whole cores; none: ranks "
        "are not bound; auto: the backend decides.",
    )
    max_restarts: NonNegative = Field(
        _LAUNCH.max_restarts,
        description="How often ranks are started again from the newest checkpoint after a failure.",
    )
    port: Annotated[int, Field(ge=1, le=65535)] = Field(
        _LAUNCH.port, description="Where the first machine's agent listens for the others."
    )
    pass_environment: list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = Field(
        default_factory=list,
        description="Variables of the shell that starts the run, passed on to every machine.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options that only the launcher reads."
    )

    def settings(self) -> LaunchSettings:
        """What a job carries of it: all but what the launcher alone reads."""
        fields = self.model_dump(exclude={"launcher", "options"})
        fields["pass_environment"] = tuple(self.pass_environment)
        fields["lost_after_s"] = min(self.lost_after_s, 2 * self.collective_timeout_s)
        return LaunchSettings(**fields)


class RunFile(Section):
    """One run."""

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
    train: TrainSection = TrainSection()
    checkpoint: CheckpointSection = CheckpointSection()
    precision: PrecisionSection = PrecisionSection()
    strategy: Annotated[AnyStrategySection, ByName] = Field(default_factory=default_section)
    launch: LaunchSection = LaunchSection()
    kernels: dict[str, str] = Field(
        default_factory=dict,
        description="Operation -> kernel to use, which must be able to run here; report.json "
        "records it.",
    )
    backend_options: dict[str, Any] = Field(
        default_factory=dict, description="Options that only the backend reads."
    )
    environment: dict[str, str] = Field(
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
    def _options_of_trackers(self) -> RunFile:
        unused = sorted(set(self.tracker_options) - set(self.trackers))
        if unused:
            raise ValueError(
                f"'tracker_options' has options for {', '.join(unused)}, which 'trackers' does "
                "not list; add it to 'trackers', or remove its options"
            )
        return self


AUTO_ORDER = ("bfloat16", "float16", "float32")
"""What ``auto`` tries: bfloat16 needs no loss scaling, so it comes before float16."""


def resolve_precision(section: PrecisionSection, support: Callable[[str], Support]) -> Precision:
    """Settle ``auto``, and refuse a type that the device cannot compute in.

    Args:
        support: a backend's capability look-up. ``auto`` chooses among the types that are full, or
            may turn out to be once a device is open.

    Raises:
        UnsupportedError: the asked type is unsupported; quotes the capability's reason.
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
    reduced = section.reduce_dtype
    return Precision(
        param_dtype=param_dtype,
        reduce_dtype=param_dtype if reduced == "param_dtype" else reduced,
        why=why,
    )
