"""A job: everything that a launcher must know to start a run, and nothing that needs a device."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from anygauge.util.errors import AnygaugeError
from anygauge.util.section import (
    NULLS_REMOVED,
    NonNegative,
    Positive,
    Seconds,
    Section,
    first_complaint,
)

__all__ = ["ACCEPTED", "ATTEMPTS", "PROFILE", "Job", "LaunchSettings"]

ATTEMPTS = "attempts"
"""In a run directory: a folder for each start that resumed the run, with its resolved run, job
file, environment and logs. Nothing in it is moved. A start that its ranks refuse leaves nothing
else behind."""

PROFILE = "profile"
"""In a run directory: what ``--profile`` recorded, in ``FROM-TO/rankN``."""

ACCEPTED = "accepted"
"""In the folder of such a start, once its ranks have accepted to go on with the run."""


class LaunchSettings(Section):
    """Where and how ranks are started."""

    launcher: str = Field("local", description="Name of the launcher.")
    nodes: Positive = Field(1, description="Machines.")
    devices: Positive = Field(1, description="Ranks per machine, one per device.")
    collective_timeout_s: Seconds = Field(
        600.0,
        description="Seconds after which the run is ended because a collective hangs, or because a "
        "rank neither works nor reports.",
    )
    join_timeout_s: Seconds = Field(
        300.0,
        description="Seconds for the agents of all machines to find each other.",
    )
    lost_after_s: Seconds = Field(
        60.0,
        description="Seconds without a heartbeat after which a machine is considered lost; at most "
        "twice collective_timeout_s.",
    )
    fabric: str = Field(
        "auto",
        description="Network between machines: a name of the backend's "
        "(`anygauge env --explain` lists them), or auto.",
    )
    binding: Literal["auto", "cores", "none"] = Field(
        "auto",
        description="cores: each rank of a machine gets an equal share of whole cores; none: ranks "
        "are not bound; auto: the backend decides.",
    )
    max_restarts: NonNegative = Field(
        0,
        description="How often ranks are started again from the newest checkpoint after a failure.",
    )
    port: Annotated[int, Field(ge=1, le=65535)] = Field(
        29400, description="Where the first machine's agent listens for the others."
    )
    pass_environment: list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = Field(
        default_factory=list,
        description="Variables of the shell that starts the run, passed on to every machine.",
    )
    options: Annotated[dict[str, Any], NULLS_REMOVED] = Field(
        default_factory=dict, description="Options that only the launcher reads."
    )

    @property
    def silence_s(self) -> float:
        """Seconds of silence after which a machine is lost: no later than two collectives hang."""
        return min(self.lost_after_s, 2 * self.collective_timeout_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run, as launchers, agents and backends see it.

    Attributes:
        run_directory: absolute path that every node sees; holds the resolved run and logs.
        run_file: absolute path of the resolved run, JSON that ranks read: in the run directory, or
            for a start that resumes a run in a folder of its own below `ATTEMPTS`. Beside it lies
            ``run.yaml``, the same for people.
        strategy: empty where nothing is trained.
        rendezvous: where the ranks of one machine meet: ``file:///path``, the path as it is, or
            ``tcp://host:port``; those that another launcher started meet at ``served://host:port``.
            Those of several machines meet where the agents agree.
        working_directory: absolute path that relative ones in the run file start from; every node
            sees it. Empty: that of the agent.
        id: tells this start of the run from others, in what they share: the cache of rows, and the
            run directory (`as_attempt`). It begins with the time, so names are in that order.
        token: by which the agents and the ranks of a job know each other; a secret.
        stop_grace_s: seconds that ranks get to end a step and write a checkpoint when the job is
            asked to end.
        resume: continue from the newest checkpoint, whatever the run file says: another attempt.
        takes_over: it may continue in a run directory that another job has left.
        run_text: the resolved run, for machines that do not see this one's files: the agents
            write it to `run_file`, and check model and rows. Empty where it is there already.
        prepare: the agents prepare the run before ranks start: each fetches its model of the hub,
            and the first plans it; where ranks run on the machine of the command, that has had it
            done.
        plan: True: memory is planned also where that is not needed; False: never.
        force: nothing is refused because of a plan.
        deterministic: the run asks for equal bits: see `Backend.make_deterministic`.
        evaluates: ranks evaluate instead of training: see `anygauge.cli.evaluate`.
        expected_memory: phase -> the most bytes that the first rank's tensors take of its device,
            by the plan of the run; empty where there is none.
        expected_step_s: seconds of a step, by the same; None: not known.
        auto_form: which form of strategy ``auto`` the run is, where that is decided and the
            resolved run does not say it: see `anygauge.training.auto.forms_of`.
        strategy_why: why it is this strategy, where the run file did not name it: what ``auto``
            found, or which default is not installed. Empty where it is the named one, the first
            default, or ``auto`` that decides when the devices are open.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    run_directory: str
    run_file: str
    backend: str
    strategy: str = ""
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    rendezvous: str
    stop_grace_s: float = 60.0
    working_directory: str = ""
    resume: bool = False
    id: str = ""
    token: str = ""
    takes_over: bool = False
    run_text: str = ""
    prepare: bool = False
    plan: bool | None = None
    force: bool = False
    deterministic: bool = False
    evaluates: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    expected_memory: Mapping[str, int] = field(default_factory=dict)
    expected_step_s: float | None = None
    auto_form: int | None = None
    strategy_why: str = ""
    profile_steps: tuple[int, int] = (0, 0)

    @property
    def collectives_record(self) -> str:
        """Beginning of a path, which a rank's number follows: where a device's collectives may
        write what they were doing when they failed; the message of the failure names the file."""
        return f"{self.run_directory}/logs/flight_rank_"

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        return self.launch.nodes * self.launch.devices

    @property
    def start_directory(self) -> Path:
        """Where the files of this start are: in a folder of its own below `ATTEMPTS` where it
        resumes a run, else in the run directory."""
        own = Path(self.run_file).parent
        return own if own.is_dir() else Path(self.run_directory)

    @property
    def resolved_run(self) -> Path:
        """`run_file`, where this start has it."""
        return self.start_directory / Path(self.run_file).name

    def as_attempt(self) -> Job:
        """The job with the files of this start in a folder of their own."""
        own = Path(self.run_directory) / ATTEMPTS / self.id
        return replace(self, run_file=str(own / Path(self.run_file).name))

    def dump(self) -> str:
        """The job as JSON text; `load` reads it back."""
        return json.dumps(_job_file().dump_python(self, mode="json"), indent=2, sort_keys=True)

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Read a job file written by `dump`.

        Raises:
            AnygaugeError: the file is missing or is not a job file of this version.
        """
        path = Path(path)
        try:
            return _job_file().validate_json(path.read_bytes(), strict=True)
        except (OSError, ValidationError) as error:
            what = first_complaint(error) if isinstance(error, ValidationError) else error
            raise AnygaugeError(f"{path} is not a job file of this anygauge: {what}") from error


@functools.cache
def _job_file() -> TypeAdapter[Job]:
    return TypeAdapter(Job)
