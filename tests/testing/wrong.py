"""Wrong backends as a table: of each a name, the check that finds it, and what is replaced.

    mutant("means are sums", "ranks", "contract_mean", {
        "collectives.all_reduce": lambda usual, tensor, op="sum", group=None: usual(tensor),
    })

What the plugin announces is changed before torch is imported. A mutant of an operation of torch is
a simulated card (``base="sim"``): its tensors can be told from the host's, with which the kit
compares. Each has a process of its own.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from anygauge.interface import Backend, Finding, Probe
from anygauge.testing import process
from anygauge.testing.check import CHECKS


class _Torch:
    """Torch, imported once it is used: backends of the part `basic` must not import it."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


torch: Any = _Torch()
NAME = "mutant"
ANY = "any"
"""Name of every operation that has no function of its own."""
LIMIT = "ANYGAUGE_MUTANT_LIMIT_S"
"""Variable with the seconds that each check may take; without it their own limits hold."""
Change = Callable[..., Any]
"""It gets the usual one first, mostly; see `Wrong.replace`."""
Changes = Mapping[str, Change]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong backend.

    Attributes:
        name: what is wrong, in words.
        part, check: the part of the kit and the check that must fail; of the part ``loop`` a test.
            Of the parts ``sound`` and ``odd`` there is none, see `tests.testing.unusual`.
        changes: by target, what takes its place.
        base: the sound backend that it is otherwise: ``cpu`` or ``sim``.
        ranks: how many, where the part is ``ranks``.
        limit_s: of checks, where one is to hang.
    """

    name: str
    part: str
    check: str
    changes: Changes
    base: str = "cpu"
    ranks: int = 2
    limit_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, part: str, check: str, changes: Changes, **more: Any) -> None:
    """A line of the table."""
    if name in MUTANTS:
        raise ValueError(f"two mutants are named {name!r}")
    MUTANTS[name] = Mutant(name, part, check, changes, **more)


def lines(part: str, rows: Iterable[tuple[str, str, str, Change]], **more: Any) -> None:
    """Lines of a part: name, check, target, and what takes its place."""
    for name, check, target, change in rows:
        mutant(name, part, check, {target: change}, **more)


class Wrong:
    """A backend that a mutant changes.

    Attributes:
        backend, placement, collectives, graph: classes of its own.
        kernels: those that the plugin provides, by operation.
    """

    def __init__(self, base: type[Backend], usual_probe: Callable[[], Probe]) -> None:
        self.placement: type = type("WrongPlacement", (base.placement_class,), {})
        self.collectives: type = type("Wrong", (base.collectives_class,), {})
        self.graph: type = type("WrongGraph", (base.graph_class,), {})
        own = {
            "name": NAME,
            "placement_class": self.placement,
            "collectives_class": self.collectives,
            "graph_class": self.graph,
            "diagnostics": lambda self: (),  # the processors' own take seconds
        }
        self.backend: type[Backend] = type("WrongBackend", (base,), own)
        self.kernels: dict[str, Change] = {}
        self.probe: Callable[[], Any] = usual_probe
        self._spec: dict[str, Change] = {}
        self._at_import: list[Change] = []
        self._operations: dict[str, Change] = {}
        self._distributed: dict[str, Change] = {}
        self.replace("placement.open", self._open)

    def replace(self, target: str, change: Change) -> None:
        """Replace one thing.

        Args:
            target: ``probe``, which gets the usual one; ``settings``, further ones, which get job,
                node and local rank; ``spec.FIELD``, whose value `change` gives; ``at import`` or
                ``at make``, when it is called; ``class OWNER.ATTRIBUTE``, which it gets;
                ``OWNER.METHOD``, which it gets, bound, before the arguments; ``op NAMES``, torch's
                operations on this device's tensors, and ``dist NAMES``, functions of
                `torch.distributed`, likewise; ``kernel OPERATION``, one more.
        """
        kind, _, names = target.partition(" ")
        owner, _, attribute = (names or kind).partition(".")
        if kind == "op":
            self._operations |= dict.fromkeys(names.split(), change)
        elif kind == "dist":
            self._distributed |= dict.fromkeys(names.split(), change)
        elif kind == "kernel":
            self.kernels[names] = change
        elif target == "probe":
            self.probe = functools.partial(change, self.probe)
        elif target == "at import":
            self._at_import.append(change)
        elif owner == "spec":
            self._spec[attribute] = change
        elif kind == "class":
            of = getattr(self, owner)
            setattr(of, attribute, change(getattr(of, attribute)))
        elif target == "at make":
            self._method("backend.__init__", lambda usual, *a: (usual(*a), change(usual.__self__)))
        elif target == "settings":
            self._method(
                "backend.environment", lambda u, j, n, r=None: [*u(j, n, r), *change(j, n, r)]
            )
        else:
            self._method(target, change)

    def _method(self, path: str, change: Change) -> None:
        owner, name = path.split(".")
        kind = getattr(self, owner)
        usual = getattr(kind, name)

        @functools.wraps(usual)
        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            found = change(types.MethodType(usual, this), *args, **kwargs)
            return None if name == "__init__" else found

        setattr(kind, name, method)

    def announce(self) -> Mapping[str, Any]:
        """Fields of the `BackendSpec` that are other ones."""
        for change in self._at_import:
            change()
        return {name: value() for name, value in self._spec.items()}

    def _open(self, usual: Change, local_rank: int) -> Any:
        """Once the device is open, torch has been imported, and is changed."""
        device = usual(local_rank)
        functions, self._distributed = self._distributed, {}
        for name, change in functions.items():
            import torch.distributed as dist

            function = getattr(dist, name)
            setattr(dist, name, functools.wraps(function)(functools.partial(change, function)))
        operations, self._operations = self._operations, {}
        if operations:
            _mode(operations, self.backend.device_type).__enter__()
        return device


def _mode(operations: Changes, device_type: str) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            wrong = operations.get(func.overloadpacket.__name__, operations.get(ANY))
            if wrong is None or func.namespace != "aten":
                return func(*args, **kwargs)
            on_device = any(t.device.type == device_type for t in tensors_of(args, kwargs))
            made = torch.device(kwargs.get("device") or "cpu").type == device_type
            return wrong(func, *args, **kwargs) if on_device or made else func(*args, **kwargs)

    return Mode()


def tensors_of(*given: Any) -> list[Any]:
    """The tensors among arguments."""
    from torch.utils._pytree import tree_leaves

    return [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]


def host_probe() -> Probe:
    """Of four devices that are the host."""
    here = Finding.not_needed("the host")
    return Probe(devices=here, driver=here, software=here, device_count=4)


def limit_checks(seconds: float) -> None:
    """How long each check may take from now on, and the process to end after them."""
    for name, each in CHECKS.items():
        CHECKS[name] = replace(each, limit_s=seconds)
    process.STEPS_S[process.ENDING] = seconds


@functools.cache
def changed(name: str) -> Wrong:
    """The mutant's backend as it is changed, once in a process; a sound one of no known name."""
    found = mutant_named(name) or Mutant(name, "", "", {})
    os.environ.update(found.environment)
    if LIMIT in os.environ:
        limit_checks(float(os.environ[LIMIT]))
    if found.base == "sim":
        from anygauge_sim.backend import SimBackend
        from anygauge_sim.probe import probe

        on = Wrong(SimBackend, probe)
        on.replace("spec.options", str)
    else:
        from anygauge_cpu.backend import CpuBackend

        on = Wrong(CpuBackend, host_probe)
    for target, change in found.changes.items():
        on.replace(target, change)
    return on


def mutant_named(name: str) -> Mutant | None:
    """One of the table; None if it is not in it."""
    return table().get(name)


def table() -> Mapping[str, Mutant]:
    """All of them; importing them imports no torch, which backends of the part `basic` must not."""
    from tests.testing import table, unusual, wrong_loop, wrong_operators  # noqa: F401

    return MUTANTS
