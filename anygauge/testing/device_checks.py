"""Checks on one opened device: what opening gives, a block of a model in each type, graphs and the
kernels that are installed for it.

What is expected comes from the host in float64, never from the device itself.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from anygauge.interface import (
    CAPABILITIES,
    HOST_DEVICE,
    Level,
    NotAvailableError,
    Phase,
    UnsupportedError,
)
from anygauge.registry import Registry
from anygauge.registry.specs import guarded_probe
from anygauge.testing.check import TOLERANCE, Device, SkipCheck, check
from anygauge.testing.kernel_trials import KERNEL_TRIALS
from anygauge.testing.process import answer_of

LARGEST_LIMIT = 10_000
"""Operations per graph up to which the limit is tried."""
COUNTED_WITHIN_S = 2.0
"""Seconds within which a graph that ended must have been counted."""


@check(
    "opening gives a device of the backend's type and settles its capabilities; a rank without a "
    "device is refused",
    part="device",
    means="nothing would run on the device, or two ranks share a card without a word; look at "
    "open(), which must return this rank's device, and compare the rank with their number",
)
def opens(on: Device) -> None:
    assert on.device.type == on.backend.device_type, f"open() gave {on.device}"
    assert on.placement.device == on.device
    for name in CAPABILITIES:
        support = on.backend.support(name)
        assert support.level is not Level.DEPENDS, f"{name}: {support}, and one is open"
    made = torch.ones(3, device=on.device)
    assert made.device.type == on.device.type
    assert made.to(HOST_DEVICE).tolist() == [1, 1, 1]
    beyond = on.placement.device_count() + 1000
    try:
        on.fresh().placement.open(beyond)
    except NotAvailableError as error:
        named = any(str(each) in str(error) for each in (beyond - 1000, beyond))
        assert named, f"the refusal of local rank {beyond} names no number: {error}"
    else:  # where it bears no number, any number of ranks share it
        assert on.device.index is None, f"local rank {beyond} was opened"


@check(
    "as many devices are probed as can be opened, and the visibility variable hides the others",
    part="device",
    means="`--devices auto` starts too few ranks or too many, or jobs that share a machine take "
    "each other's devices; the probe counts files, or the variable has another name or form",
    limit_s=120,
)
def devices_are_counted(on: Device) -> None:
    if on.device.index is None:
        raise SkipCheck("its device bears no number, and any number of ranks share it")
    variable, visible = on.backend.launch.visibility_variable, on.placement.device_count()
    probed = guarded_probe(Registry.load().find_backend(on.backend.name)).device_count
    if probed is not None:
        # The probe looks at the machine, also where this process may see some of its devices alone.
        fits = probed >= visible if (variable or "") in os.environ else probed == visible
        assert fits, f"the probe counts {probed}, the placement {visible}"
    if variable is None or visible < 2:
        return
    named = os.environ.get(variable, ",".join(map(str, range(visible)))).split(",")[-1]
    options = on.backend.options.model_dump(exclude_unset=True)
    environment = {**os.environ, variable: named}
    what = f"the devices with {variable}={named}"
    found = answer_of(_devices_seen, [on.backend.name, options], environment, what, 110)
    assert found == 1, f"with {variable}={named} a process sees {found} devices"


def _devices_seen(name: str, options: Mapping[str, Any]) -> int:
    """How many devices this process may open, of a backend."""
    backend = Registry.load(os.environ).create_backend(name, options)
    backend.open(0)
    count = backend.placement.device_count()
    backend.close()
    return count


@check(
    "nothing is open after closing, and closing twice is not an error",
    part="device",
    means="the next run would find the device taken; look at close(), which must give back "
    "what open() took",
)
def closes(on: Device) -> None:
    other = on.fresh()
    other.open(0)
    other.close()
    assert not other.placement.is_open, "the device is still open"
    other.close()


def _block(device: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """The result of something like attention, and the gradients of its inputs."""
    generator = torch.Generator().manual_seed(5)
    given = (torch.randn(32, 32, generator=generator) / 6**0.5 for _ in range(4))
    x, *weights = inputs = [each.to(device, dtype, copy=True).requires_grad_() for each in given]
    q, k, v = (x @ w for w in weights)
    out = torch.nn.functional.silu(torch.softmax(q @ k.t() / 32**0.5, dim=-1) @ v)
    (out.float() if dtype != torch.float64 else out).pow(2).mean().backward()
    return [out.detach(), *(each.grad for each in inputs if each.grad is not None)]


def _blocks_agree(dtype: str, on: Device) -> None:
    allowed = 4 * TOLERANCE[dtype]
    if dtype == "float32":
        allowed = max(allowed, 16 * 2.0**-on.placement.float32_product_bits)
    found = _block(on.device, getattr(torch, dtype))
    wanted = _block(HOST_DEVICE, torch.float64)
    for number, (there, here) in enumerate(zip(found, wanted, strict=True)):
        what = f"gradient {number}" if number else "the result"
        assert there.device.type == on.device.type, f"{what} is on {there.device}"
        away = (there.to(HOST_DEVICE, torch.float64) - here).abs().max() / here.abs().max()
        assert float(away) <= allowed, (
            f"{what} differs from float64 on the host by {float(away):.1e} of its largest value; "
            f"{allowed:.0e} is allowed in {dtype}"
        )


for _dtype in TOLERANCE:
    check(
        f"{_dtype}: a block with softmax and its gradients agree with float64",
        name=f"{_dtype}_arithmetic",
        part="device",
        capability=None if _dtype == "float32" else _dtype,
        means=f"training in {_dtype} would go another way than on other devices; the checks of "
        "operations and products name the cause",
    )(functools.partial(_blocks_agree, _dtype))


@check(
    "autocast computes in the lower type, gradients stay float32; to float32 it changes nothing",
    part="device",
    means="a loop of one's own would compute in another type than it asked for; look at the "
    "device's list of operations for autocast",
)
def autocast_casts(on: Device) -> None:
    a = torch.randn(8, 8, device=on.device)
    with on.placement.autocast(torch.float32):
        assert (a @ a).dtype == torch.float32, "autocast to float32 lowers products"
    name = next((each for each in ("bfloat16", "float16") if on.backend.support(each)), None)
    if name is None:
        raise SkipCheck("it has no lower type")
    lower = getattr(torch, name)
    try:
        with on.placement.autocast(lower):
            inside = a @ a
    except UnsupportedError as refusal:
        raise SkipCheck(str(refusal)) from refusal
    outside = a @ a
    assert inside.dtype == lower, f"a product under autocast has {inside.dtype}"
    assert outside.dtype == torch.float32, f"a product after autocast has {outside.dtype}"


@check(
    "a graph ends at mark_step where they accumulate, and at its limit: its counters show it",
    part="device",
    means="graphs would grow until memory is exhausted, or a long one never be compiled; look at "
    "mark_step, at the option that carries the limit to the vendor's software, and at counters "
    "that count nothing",
)
def graphs_end(on: Device) -> None:
    graph = on.backend.graph
    for size in (3, 4, 5):  # a graph of shapes that came before may need no compilation
        value = torch.ones(size, size, device=on.device) * 2 + 1
        before = dict(graph.counters())
        graph.mark_step(Phase.UPDATE)
        counted = _grew(on, before, COUNTED_WITHIN_S if graph.accumulates else 0.0)
        assert counted == graph.accumulates, (
            f"graph.accumulates is {graph.accumulates}, and graph.mark_step changes "
            f"{'some' if counted else 'none'} of graph.counters() ({before or 'there are none'})"
        )
        assert float(value.sum().to(HOST_DEVICE)) == 3 * size * size
    limit = graph.limit
    if limit is None and not graph.accumulates:
        raise SkipCheck("graph.accumulates is False, and graph.limit None: there is none to end")
    if limit is None or limit > LARGEST_LIMIT:
        return  # there is none, or it takes too long to reach
    on.placement.synchronize()
    value, before = torch.ones(3, 7, device=on.device), dict(graph.counters())
    for _ in range(3 * limit):
        value = value + 1
    assert _grew(on, before), (
        f"{3 * limit} operations changed none of graph.counters(), though a graph holds {limit}"
    )
    assert float(value[0, 0].to(HOST_DEVICE)) == 3 * limit + 1


def _grew(on: Device, before: Mapping[str, float], within_s: float = COUNTED_WITHIN_S) -> bool:
    """Whether a counter has grown, or grows soon: graphs may be compiled in the background."""
    until = time.monotonic() + within_s
    while True:
        if any(value > before.get(name, 0) for name, value in on.backend.graph.counters().items()):
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)


@check(
    "every installed kernel for it agrees with float64 on the host",
    part="device",
    means="a run with the vendor's kernel would go another way; look in the kernel named, at "
    "masks and incomplete blocks",
)
def kernels_agree(on: Device) -> None:
    from anygauge.kernels.choose import KernelChoice, choose_kernels, load_kernel

    registry = Registry.load(os.environ)
    chosen = choose_kernels(registry, on.backend, {})
    tried = []
    for provided in registry.kernels:
        spec = provided.spec
        serves = not spec.device_types or on.device.type in spec.device_types
        if not serves or spec.operation not in KERNEL_TRIALS or spec.missing():
            continue
        choice = KernelChoice(
            operation=spec.operation, name=spec.name, reason="tried", provided=provided
        )
        table = {**chosen, spec.operation: choice}
        KERNEL_TRIALS[spec.operation](on, load_kernel(table, spec.operation), spec.name)
        tried.append(spec.name)
    if not tried:
        raise SkipCheck(f"none is installed for {', '.join(sorted(KERNEL_TRIALS))}")
