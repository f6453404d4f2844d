"""The contract of a device; a `BackendSpec` announces it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from anygauge.interface.collectives import Collectives
from anygauge.interface.environment import EnvironmentRule, RuleContext, Scope, Setting, Skip
from anygauge.interface.fabric import ETHERNET, ONE_NODE, Fabric, choose_fabric, named_fabric
from anygauge.interface.graph import Graph
from anygauge.interface.job import Job
from anygauge.interface.launch import LaunchProfile
from anygauge.interface.node import Node
from anygauge.interface.options import Options
from anygauge.interface.placement import Placement
from anygauge.interface.probe import Check
from anygauge.interface.support import Level, Support
from anygauge.util.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Backend"]


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

    engine_names: Mapping[str, str] = {}
    """Engine -> what it calls this device, where it knows it; it is then not left to choose."""

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
        found: list[tuple[EnvironmentRule, Setting | Skip]] = []
        for rule in self.environment_rules:
            if local_rank is None and rule.scope is Scope.RANK:
                continue
            if rule.between_machines and job.launch.nodes == 1:
                found.append((rule, Skip(ONE_NODE)))
                continue
            context = RuleContext(
                rule=rule,
                job=job,
                node=node,
                options=self.options,
                local_rank=local_rank,
                fabric=fabric,
            )
            found.append((rule, rule.decide(context)))
        return found

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

    def make_deterministic(self) -> str:
        """Have the same operations on the same values give the same bits each time, on the same
        devices and software, where ``train.deterministic`` asks for it. Called once, before `open`;
        variables for it are for `environment_rules`, which read `Job.deterministic`.

        Returns:
            What may differ all the same, in words; empty where nothing does.
        """
        import torch

        torch.use_deterministic_algorithms(True)
        return self.sums_vary

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
        """Fields of an engine's own configuration that this device needs; by default, its name.

        docs/backends.md lists what each engine takes.
        """
        if engine not in self.engine_names:
            return ()
        return (
            Setting(
                name="accelerator",
                value=self.engine_names[engine],
                reason=f"the run asked for {self.name}, whatever else is installed",
                source=f"the accelerators that {engine} chooses from",
            ),
        )

    def diagnostics(self) -> Sequence[Check]:
        """The checks that ``doctor`` runs for this device."""
        return ()
