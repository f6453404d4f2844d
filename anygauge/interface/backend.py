"""The contract of a device: `BackendSpec` to be found, `Backend` to be used.

What a backend finds on a machine is a `Probe`, as three separate questions. A probe is cheap and
pure: it looks at device files, version files and `importlib.util.find_spec`, imports nothing heavy
and changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from anygauge.interface.collectives import Collectives
from anygauge.interface.environment import (
    ETHERNET,
    EnvironmentRule,
    Fabric,
    RuleContext,
    Scope,
    Setting,
    Skip,
    choose_fabric,
    named_fabric,
)
from anygauge.interface.job import Job, Node
from anygauge.interface.launch import LaunchProfile
from anygauge.interface.options import Options
from anygauge.interface.placement import Graph, Placement
from anygauge.util.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "API_VERSION",
    "CAPABILITIES",
    "FULL",
    "Backend",
    "BackendSpec",
    "Check",
    "Finding",
    "Level",
    "Outcome",
    "Probe",
    "Support",
]


class Level(enum.Enum):
    """How far a capability reaches. The last four are refusals for different causes.

    ``PARTIAL`` works at a price, so that ``auto`` leaves it alone. ``DEPENDS`` is for a device that
    is not open yet, where opening settles it.
    """

    FULL = "full"
    PARTIAL = "partial"
    DEPENDS = "depends on the device that is opened"
    UNSUPPORTED_BY_HARDWARE = "unsupported by the hardware"
    UNSUPPORTED_BY_VERSION = "unsupported by this version"
    NOT_WRITTEN_YET = "not written yet"
    SWITCHED_OFF = "switched off"

    def __bool__(self) -> bool:
        return self in (Level.FULL, Level.PARTIAL, Level.DEPENDS)


@dataclass(frozen=True, slots=True)
class Support:
    """One capability's level and its reason; anything short of full must give one."""

    level: Level
    reason: str = ""

    def __post_init__(self) -> None:
        if self.level is not Level.FULL and not self.reason:
            raise ValueError(f"Support({self.level.name}) needs a reason")

    def __bool__(self) -> bool:
        return bool(self.level)

    def __str__(self) -> str:
        return self.level.value + (f" ({self.reason})" if self.reason else "")


FULL = Support(Level.FULL)


@dataclass(frozen=True, slots=True)
class Finding:
    """One question's answer; true unless it is "no".

    Attributes:
        detail: what was seen or missed, in words.
        looked_at: the paths, modules or files that were examined.
    """

    presence: Literal["yes", "no", "not needed"]
    detail: str
    looked_at: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.presence != "no"

    @classmethod
    def yes(cls, detail: str, *looked_at: str) -> Finding:
        """It is there."""
        return cls("yes", detail, looked_at)

    @classmethod
    def no(cls, detail: str, *looked_at: str) -> Finding:
        """It is not there."""
        return cls("no", detail, looked_at)

    @classmethod
    def not_needed(cls, detail: str = "nothing to look for") -> Finding:
        """The backend has no use for it."""
        return cls("not needed", detail)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What one backend found.

    Attributes:
        devices: are there devices of this vendor (not merely a device file of that name)?
        driver: is the kernel driver loaded?
        software: is the software that drives it installed?
        device_count: how many devices, or None where that cannot be known without opening them.
        cards: their names as the driver has them, by which descriptions of hardware are found; a
            name stands once. Empty where it does not tell.
    """

    devices: Finding
    driver: Finding
    software: Finding
    device_count: int | None = None
    notes: tuple[str, ...] = field(default=())
    cards: tuple[str, ...] = ()

    @property
    def questions(self) -> tuple[tuple[str, Finding], ...]:
        """The three questions by name, in the order in which they are asked."""
        return (("device", self.devices), ("driver", self.driver), ("software", self.software))

    @property
    def available(self) -> bool:
        """True if all three questions are answered yes, or need no answer."""
        return all(finding for _, finding in self.questions)

    @property
    def has_hardware(self) -> bool:
        """True if the vendor's devices were really seen (whatever the driver and software say)."""
        return self.devices.presence == "yes"

    @property
    def reason(self) -> str:
        """One line: why it is available, or everything that is missing."""
        missing = [f"{title}: {f.detail}" for title, f in self.questions if not f]
        if missing:
            return "; ".join(missing)
        found = [f.detail for _, f in self.questions if f.presence == "yes"]
        return "; ".join(found) or "always there"


API_VERSION = 1
"""Version of this contract: one more with each change that a plugin has to follow. A plugin
written for another is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    """How a backend announces itself; making one imports nothing heavy.

    Attributes:
        name: what users write after ``--backend``.
        factory: ``"package.module:Class"``, imported only when the backend is selected.
        probe: cheap and pure; imports no torch.
        api_version: the contract's version that it was written for.
        priority: orders ``--backend auto``; higher is tried first, 0 and below are never
            chosen while another vendor's devices are present.
        drives: the devices in a few words, for lists: ``processors of this machine``.
        hardware: descriptions of its cards, ``"package:file.toml"``; "" where it brings none. The
            package is that of the plugin or lies within it.
        this_machine: figure of its cards -> number, where a description leaves it to the machine
            at hand. Called when such a card is looked up; cheap and pure; imports no torch.
        options: ``"package.module:Class"``: derives from `Options`; what the run file may say in
            ``backend_options``. Empty: nothing.
    """

    name: str
    factory: str
    probe: Callable[[], Probe]
    api_version: int
    priority: int = 0
    drives: str = ""
    hardware: str = ""
    this_machine: Callable[[], Mapping[str, float]] = dict
    options: str = ""


class Outcome:
    """Results of a diagnostic check; ``SKIP``: it could not be made, which is not a result."""

    PASS = "pass"
    SKIP = "skip"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of ``doctor``: what was seen, and what to do about it."""

    name: str
    outcome: str
    seen: str
    remedy: str = ""

    @classmethod
    def of(cls, name: str, passed: bool, seen: str, remedy: str) -> Check:
        """One that passed, or else failed and has a remedy."""
        return cls(name, Outcome.PASS, seen) if passed else cls(name, Outcome.FAIL, seen, remedy)


CAPABILITIES: Mapping[str, str] = {
    "bfloat16": "compute in bfloat16; `auto` chooses it where it is full",
    "float16": "compute in float16, with loss scaling; `auto` chooses it where it alone is full",
    "collectives": "more than one process",
    "quantised_base": "products with weights of 4 bits (nf4) by bitsandbytes",
    "quantised_base_int8": "products with weights of 8 bits by bitsandbytes",
    "paged_memory": "bitsandbytes' memory that moves between the device and the host by itself",
    "fused_adamw": "torch's fused AdamW by a kernel of the device's own; without it, torch's plain "
    "one updates",
    "adamw_8bit": "bitsandbytes' AdamW with 8-bit state, by a kernel of the device's own",
    "fp8_products": "linear layers that multiply in FP8 while they train: `Backend.fp8_products`",
}
"""Names of the capabilities that the core asks about, and what each means.

A backend answers, not a trial: where a device hands to the host what it has no kernel for, a trial
passes, and every update copies its tensors there and back. All else is read off the facets: what
`Graph.limit`, `Graph.compiler` or `Placement.peak_flops` has not got is None.
"""


class Backend:
    """One device family. Subclass it, set the class attributes, override what differs.

    Constructing a backend has no side effect; `open` is where the device is touched.
    A device that PyTorch knows needs `name`, `device_type` and little else.
    """

    name: str
    device_type: str
    placement_class: type[Placement] = Placement
    graph_class: type[Graph] = Graph
    collectives_class: type[Collectives] = Collectives

    kernels: Mapping[str, str] = {}
    """Operation -> preferred kernel name; operations left out use the reference."""

    packed_kernels: Mapping[str, str] = {}
    """As `kernels`, and coming before them, for runs whose rows are packed."""

    attention: str = "eager"
    """The attention implementation of the model library that is preferred here."""

    attention_why: str = "products and a softmax, which every device can compute"
    """Why that one."""

    launch: LaunchProfile = LaunchProfile()

    capabilities: Mapping[str, Support] = {}
    """How far each of `CAPABILITIES` reaches; `open` settles what depends on the device."""

    unsupported_engines: Mapping[str, str] = {}
    """Engines that this device cannot run, by the names that strategies give them
    (`StrategySpec.engine`), and why. Those that are not named are taken to run."""

    sums_vary: str = ""
    """Why the same operations on the same values may differ in their last bits from one time to the
    next, such as sums in the order in which threads finish. Empty where they do not. A resumed run
    then has losses that are close to those of an undisturbed one, not equal to them."""

    fabrics: Sequence[Fabric] = (ETHERNET,)
    """Networks between machines that its collectives can use, best first."""

    environment_rules: Sequence[EnvironmentRule] = ()
    """The variables that `environment` may set, as a table."""

    libraries: tuple[str, ...] = ()
    """Distributions other than torch whose installed versions the rules read (`Node.libraries`)."""

    variables: tuple[str, ...] = ()
    """The user's variables that the rules read (`Node.variables`)."""

    files: tuple[str, ...] = ()
    """Files whose presence the rules read (`Node.files`): absolute paths, or bare names of shared
    libraries, which are looked for where the dynamic linker would find them."""

    readings: tuple[str, ...] = ()
    """Files whose text the rules read (`Node.texts`): absolute paths, in which ``*`` is any part of
    a name. No device is opened: the text of a file that is not a regular one is empty."""

    def __init__(self, options: Options | None = None) -> None:
        """Args: options: what the run file says, of the class that `BackendSpec.options` names."""
        self.options = Options() if options is None else options
        self.placement = self.placement_class(self.device_type)
        self.graph = self.graph_class()
        self.collectives = self.collectives_class(self.device_type)

    def open(self, local_rank: int = 0) -> torch.device:
        """Take this local rank's device; compiled extensions load here."""
        return self.placement.open(local_rank)

    def close(self) -> None:
        """Leave the process group and give the device back."""
        self.collectives.close()
        self.placement.close()

    def __enter__(self) -> Self:
        """For ``with anygauge.open_backend(...) as backend:``; the device must already be open."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def support(self, capability: str) -> Support:
        """The level of a capability; one that the backend does not mention is not written yet."""
        return self.capabilities.get(
            capability,
            Support(Level.NOT_WRITTEN_YET, f"the {self.name} backend does not mention it"),
        )

    def environment(self, job: Job, node: Node, local_rank: int | None = None) -> Sequence[Setting]:
        """Variables to set before torch is imported. Pure: a function of its arguments alone.

        Args:
            local_rank: None asks for job and node scope only.
        """
        decided = (decision for _, decision in self.explain_environment(job, node, local_rank))
        return [decision for decision in decided if not isinstance(decision, Skip)]

    def explain_environment(
        self, job: Job, node: Node, local_rank: int | None = None
    ) -> Sequence[tuple[EnvironmentRule, Setting | Skip]]:
        """What each of `environment_rules` decides here, also those that skip their variable."""
        fabric = choose_fabric(self.fabrics, job, node)
        return [
            (
                rule,
                rule.decide(
                    RuleContext(
                        rule=rule,
                        job=job,
                        node=node,
                        options=self.options,
                        local_rank=local_rank,
                        fabric=fabric,
                    )
                ),
            )
            for rule in self.environment_rules
            if local_rank is not None or rule.scope is not Scope.RANK
        ]

    def launch_profile(self, fabric: str) -> LaunchProfile:
        """`launch`, and what the network adds to it that ``launch.fabric`` names.

        Raises:
            RunFileError: it names none of `fabrics`.
        """
        network = named_fabric(self.fabrics, fabric)
        if network is None:
            return self.launch
        capabilities = (*self.launch.capabilities, *network.capabilities)
        return replace(self.launch, capabilities=capabilities, network_resource=network.resource)

    def check_environment(self, environ: Mapping[str, str]) -> None:
        """Look at what a rank would start with, whoever set it.

        Raises:
            RunFileError: variables contradict the run or each other. Say which, and the way out.
        """

    def adapt_models(self, *, packing: bool) -> None:
        """Change the model library for this device, before a model is built. Called once.

        Args:
            packing: whether several documents share a row, which must not see each other.

        Raises:
            UnsupportedError: the change does not go with the run.
        """

    def fp8_products(
        self, model: nn.Module, kept: Collection[nn.Module], *, reentrant: bool | None
    ) -> Callable[[], AbstractContextManager[Any]]:
        """Have linear layers of a model multiply in FP8 while it trains; ``precision.fp8`` asks.

        Called once, before an engine takes the model, and where the capability ``fp8_products`` is
        there. Layers may be replaced; their parameters stay the same objects under the same names,
        as an engine may hold a part of each. Outside of the context, layers compute as before.

        Args:
            model: on the device, with its adapter; layers already recompute as the run asks for.
            kept: modules to leave as they are, with all in them: the loss reads their weights.
            reentrant: whether layers recompute by torch's reentrant form; None: they do not.

        Returns:
            Makes a context: one for each forward that trains, and for its backward where layers
            are computed again.

        Raises:
            UnsupportedError: the device or its library cannot.
        """
        raise UnsupportedError(f"precision.fp8: backend {self.name!r} has no products in FP8")

    def engine_settings(self, engine: str) -> Sequence[Setting]:
        """Fields of an engine's own configuration that this device needs.

        docs/backends.md lists what each engine takes.
        """
        return ()

    def diagnostics(self) -> Sequence[Check]:
        """The checks that ``doctor`` runs for this device."""
        return ()
