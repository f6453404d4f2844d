"""Wrong backends as a table: each a name, the check that finds it, and a few lines that make it.

    @mutant("means are sums", part="ranks", check="all_reduce_means")
    def _(on: Wrong) -> None:
        @on.method("collectives.all_reduce")
        def all_reduce(self, usual, tensor, op="sum", group=None):
            return usual(tensor, "sum", group)

What the plugin announces is changed before torch is imported (`Wrong.spec`, `Wrong.probe`). A
mutant of an operation of torch is a simulated card (``base="sim"``): its tensors can be told from
the host's, with which the kit compares.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from anygauge.interface import Backend, Collectives, Graph, Placement, Probe


class _Torch:
    """Torch, imported once it is used: backends of the part `basic` must not import it."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


torch: Any = _Torch()
NAME = "mutant"
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong backend.

    Attributes:
        name: what is wrong, in words.
        part, check: the part of the kit and the check that must fail; of the part ``loop`` a test.
        base: the sound backend that it is otherwise: ``cpu`` or ``sim``.
        change: makes it.
        ranks: how many, where the part is ``ranks``.
        limit_s: of the check, where it is to hang.
    """

    name: str
    part: str
    check: str
    base: str
    change: Callable[[Wrong], None]
    ranks: int = 2
    limit_s: float | None = None


MUTANTS: dict[str, Mutant] = {}
SOUND: dict[str, Mutant] = {}
ODD: dict[str, Mutant] = {}
"""Those of `tests.testing.unusual`: of the sound ones no check may fail, odd ones are for tests."""


def mutant(
    name: str,
    *,
    part: str,
    check: str,
    base: str = "cpu",
    ranks: int = 2,
    limit_s: float | None = None,
) -> Callable[[Callable[[Wrong], None]], Callable[[Wrong], None]]:
    """Decorator: a line of the table."""

    def register(change: Callable[[Wrong], None]) -> Callable[[Wrong], None]:
        if name in MUTANTS:
            raise ValueError(f"two mutants are named {name!r}")
        MUTANTS[name] = Mutant(name, part, check, base, change, ranks, limit_s)
        return change

    return register


class Wrong:
    """A backend that a mutant's function changes.

    Attributes:
        backend, placement, collectives, graph: classes of its own, to be changed at will.
        probed: the probe, which gets the usual one; None where it is the usual one.
        usual_probe: of the sound backend; None where that is the host's processors.
        announcing: what is called when the plugin is asked what it announces.
    """

    def __init__(self, base: type[Backend], usual_probe: Callable[[], Probe] | None = None) -> None:
        self.usual_probe = usual_probe
        self.placement: type[Placement] = type("WrongPlacement", (base.placement_class,), {})
        self.collectives: type[Collectives] = type("Wrong", (base.collectives_class,), {})
        self.graph: type[Graph] = type("WrongGraph", (base.graph_class,), {})
        own = {
            "name": NAME,
            "placement_class": self.placement,
            "collectives_class": self.collectives,
            "graph_class": self.graph,
            "diagnostics": lambda self: (),  # the processors' own take seconds
        }
        self.backend: type[Backend] = type("WrongBackend", (base,), own)
        self.probed: Callable[[Callable[[], Probe]], Any] | None = None
        self.announcing: list[Callable[[], Any]] = []
        self._announced: dict[str, Any] = {}
        self._operations: dict[str, Callable[..., Any]] = {}
        self._opened: list[Callable[[], Any]] = []

        @self.method("placement.open")
        def open_wrongly(placement: Placement, usual: Any, local_rank: int) -> Any:
            device = usual(local_rank)
            self._install()
            return device

    def spec(self, **fields: Any) -> None:
        """Announce other fields of the `BackendSpec`."""
        self._announced |= fields

    def probe(self, function: FunctionT) -> FunctionT:
        """Decorator: a probe in place of the usual one, which it gets."""
        self.probed = function
        return function

    def announce(self) -> Mapping[str, Any]:
        """The fields of `spec`, once the functions of `announcing` were called."""
        for function in self.announcing:
            function()
        return self._announced

    def method(self, path: str) -> Callable[[FunctionT], FunctionT]:
        """Decorator: a method (such as ``placement.memory``) in place of another, which it gets."""
        owner, name = path.split(".")
        kind = getattr(self, owner)
        usual = getattr(kind, name)

        def replace(function: FunctionT) -> FunctionT:
            @functools.wraps(usual)
            def method(this: Any, *args: Any, **kwargs: Any) -> Any:
                return function(this, functools.partial(usual, this), *args, **kwargs)

            setattr(kind, name, method)
            return function

        return replace

    def made(self, function: FunctionT) -> FunctionT:
        """Decorator: call it with each backend that was made."""

        @self.method("backend.__init__")
        def make(this: Backend, usual: Any, options: Mapping[str, Any] | None = None) -> None:
            usual(options)
            function(this)

        return function

    def operation(self, *names: str) -> Callable[[FunctionT], FunctionT]:
        """Decorator: an operation of torch on this device's tensors, which it gets first.

        Args:
            names: of torch's schemas, such as ``mm`` or ``index_add_``; or `ANY`.
        """

        def replace(function: FunctionT) -> FunctionT:
            self._operations |= dict.fromkeys(names, function)
            return function

        return replace

    def distributed(self, *names: str) -> Callable[[FunctionT], FunctionT]:
        """Decorator: a function of `torch.distributed`, which it gets first."""

        def replace(function: FunctionT) -> FunctionT:
            @self.when_opened
            def install() -> None:
                import torch.distributed as dist

                for name in names:
                    usual = getattr(dist, name)
                    setattr(dist, name, functools.wraps(usual)(functools.partial(function, usual)))

            return function

        return replace

    def when_opened(self, function: FunctionT) -> FunctionT:
        """Decorator: call it once the device is open; torch has been imported."""
        self._opened.append(function)
        return function

    def _install(self) -> None:
        opened, self._opened = self._opened, []
        for function in opened:
            function()
        operations, self._operations = self._operations, {}
        if operations:
            _mode(operations, self.backend.device_type).__enter__()


ANY = "any"
"""Name of every operation that has no function of its own."""


def _mode(operations: Mapping[str, Callable[..., Any]], device_type: str) -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            wrong = operations.get(func.overloadpacket.__name__, operations.get(ANY))
            if wrong is None or func.namespace != "aten":
                return func(*args, **kwargs)
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            on_device = any(t.device.type == device_type for t in tensors)
            made = torch.device(kwargs.get("device") or "cpu").type == device_type
            if not on_device and not made:
                return func(*args, **kwargs)
            return wrong(func, *args, **kwargs)

    return Mode()


def replaced(
    target: str, change: Callable[..., Any], environment: Mapping[str, str] | None = None
) -> Callable[[Wrong], None]:
    """What makes a backend of which one thing is replaced.

    Args:
        target: ``probe``, which gets the usual one; ``settings``, further ones, which get job, node
            and local rank; ``spec.FIELD``, whose value `change` gives; ``at import`` or ``at
            make``, when it is called; ``class OWNER.ATTRIBUTE``, which it gets; or
            ``OWNER.METHOD``, which it gets, bound, before the arguments.
    """

    def make(on: Wrong) -> None:
        os.environ.update(environment or {})
        first, _, rest = target.partition(" ")
        owner, _, attribute = (rest or first).partition(".")
        if target == "probe":
            on.probe(change)
        elif target == "settings":
            on.method("backend.environment")(
                lambda self, usual, job, node, local_rank=None: [
                    *usual(job, node, local_rank),
                    *change(job, node, local_rank),
                ]
            )
        elif owner == "spec":
            on.spec(**{attribute: change()})
        elif target == "at import":
            on.announcing.append(change)
        elif target == "at make":
            on.made(change)
        elif first == "class":
            kind = getattr(on, owner)
            setattr(kind, attribute, change(getattr(kind, attribute)))
        else:
            on.method(target)(lambda self, usual, *args, **kwargs: change(usual, *args, **kwargs))

    return make


@functools.cache
def changed(found: Mutant) -> Wrong:
    """The mutant's backend as it is changed, once in a process."""
    if found.base == "sim":
        from anygauge_sim.backend import SimBackend
        from anygauge_sim.probe import probe

        on = Wrong(SimBackend, probe)
        on.spec(options="")
    else:
        from anygauge_cpu.backend import CpuBackend

        on = Wrong(CpuBackend)
    found.change(on)
    return on


def mutant_named(name: str) -> Mutant | None:
    """One of the table, or of `tests.testing.unusual`; None if it is in neither."""
    table()
    return {**MUTANTS, **SOUND, **ODD}.get(name)


def table() -> Sequence[Mutant]:
    """All of them; importing them imports no torch, which backends of the part `basic` must not."""
    from tests.testing import table, unusual, wrong_loop, wrong_operators  # noqa: F401

    return tuple(MUTANTS.values())
