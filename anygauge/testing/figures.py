"""Checks of what an opened device says in numbers, and of which devices a process sees."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import torch

from anygauge.interface import HOST_DEVICE
from anygauge.registry import Registry
from anygauge.testing.check import NotAsked, Opened, check

LARGEST_MEMORY = 2**50
"""Bytes that no device of today has."""
TIMES = 3
"""How often the same is computed where it must have the same bits."""
SEEN = """
import json, os, sys
from anygauge.registry import Registry
name, options, answer = json.load(sys.stdin)
backend = Registry.load(os.environ).create_backend(name, options)
backend.open(0)
found = backend.placement.device_count()
backend.close()
with open(answer, "w") as file:
    json.dump(found, file)
"""


@check(
    "memory is counted in whole bytes of a plausible number, and its limit stays the same",
    part="device",
    means="the memory column and the plan's warning show nonsense; the vendor's tool gives "
    "mebibytes, a share or -1 for unknown",
)
def memory_is_in_bytes(on: Opened) -> None:
    stats = on.placement.memory()
    for name in ("in_use", "peak", "reserved", "limit"):
        value = getattr(stats, name)
        if value is None and name in ("reserved", "limit"):
            continue
        assert type(value) is int, f"{name} is {value!r}, not a whole number"
        assert 0 <= value < LARGEST_MEMORY, f"{name} is {value}, which no device has"
    assert stats.limit is None or stats.limit >= 2**20, (
        f"limit is {stats.limit} bytes; it is not counted in larger units, and None where unknown"
    )
    held = torch.ones(2**20, device=on.device)
    on.placement.synchronize()
    again = on.placement.memory()
    del held
    assert again.limit == stats.limit, f"the limit was {stats.limit}, then {again.limit}"
    assert again.kind == stats.kind, f"kind was {stats.kind!r}, then {again.kind!r}"


@check(
    "peak rates are finite, and the same when asked again",
    part="device",
    means="the share of the peak that a run reports is nonsense; a table in other units, or a rate "
    "read from a clock that changes",
)
def peak_rates_stay(on: Opened) -> None:
    for name in ("float32", "bfloat16", "float16"):
        peak, again = (on.placement.peak_flops(name) for _ in range(2))
        assert peak == again, f"peak_flops({name!r}) was {peak}, then {again}"
        assert peak is None or math.isfinite(peak.value), f"peak_flops({name!r}) is {peak}"


@check(
    "the probe counts as many devices as can be opened",
    part="device",
    means="`--devices auto` starts too few ranks or too many; the probe counts device files, and "
    "the library partitions or hides some",
)
def counts_agree(on: Opened) -> None:
    if on.device.index is None:
        raise NotAsked("its device bears no number, and any number of ranks share it")
    probed = Registry.load(os.environ).probe(on.backend.name).device_count
    if probed is None:
        raise NotAsked("the probe does not count them")
    # The probe looks at the machine, also where this process may see some of its devices alone.
    hidden = (on.backend.launch.visibility_variable or "") in os.environ
    fits = probed >= on.visible if hidden else probed == on.visible
    assert fits, f"the probe counts {probed}, the placement {on.visible}"


@check(
    "the visibility variable hides devices: with one device named, a process sees one",
    part="device",
    means="jobs that share a machine take each other's devices; the variable has another name or "
    "form, or is read before it is set",
    limit_s=120,
)
def visibility_variable_hides(on: Opened) -> None:
    variable = on.backend.launch.visibility_variable
    if variable is None:
        raise NotAsked("launch.visibility_variable is None")
    if on.visible < 2:
        raise NotAsked("there is one device, and none to hide")
    named = os.environ.get(variable, ",".join(map(str, range(on.visible)))).split(",")
    answer = Path(f"{variable}.json").absolute()
    done = subprocess.run(
        [sys.executable, "-c", SEEN],
        input=json.dumps(
            [on.backend.name, on.backend.options.model_dump(exclude_unset=True), str(answer)]
        ),
        env={**os.environ, variable: named[-1]},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    said = done.stderr.strip().splitlines()
    assert done.returncode == 0, f"with {variable}={named[-1]}: {said[-1] if said else ''}"
    found = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink()
    assert found == 1, f"with {variable}={named[-1]} a process sees {found} devices"


@check(
    "the same operations on the same values give the same bits, unless `sums_vary` says otherwise",
    part="device",
    means="a resumed run has other losses than an undisturbed one, and nobody is warned; sums "
    "whose order threads decide",
)
def same_bits_again(on: Opened) -> None:
    reason = on.backend.sums_vary
    assert isinstance(reason, str), f"sums_vary is {reason!r}; it gives the reason in words"
    if reason:
        raise NotAsked(f"sums vary: {reason}")
    host = torch.Generator().manual_seed(11)
    a, b = torch.randn(256, 512, generator=host), torch.randn(512, 128, generator=host)
    rows = torch.randint(0, 16, (512,), generator=host)

    def computed() -> list[torch.Tensor]:
        left, right, index = (each.to(on.device, copy=True) for each in (a, b, rows))
        left.requires_grad_()
        table = torch.zeros(16, 256, device=on.device).index_add(0, index, left.t())
        loss = torch.softmax(left @ right, dim=-1).square().mean() + table.square().mean()
        loss.backward()
        assert left.grad is not None
        return [each.detach().to(HOST_DEVICE) for each in (table, loss, left.grad)]

    first = computed()
    for _ in range(TIMES):
        for what, one, other in zip(
            ("a sum of rows", "a loss", "a gradient"), first, computed(), strict=True
        ):
            assert torch.equal(one, other), (
                f"{what} differs from the same before by {float((one - other).abs().max()):.1e}; "
                "if that is how the device adds, say why in Backend.sums_vary"
            )
