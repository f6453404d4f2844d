"""Checks on one opened device, in a process of their own.

What is expected comes from the host in float64, never from the device itself.
"""

from __future__ import annotations

import os

import torch

from anygauge.interface import CAPABILITIES, HOST_DEVICE, Level, NotAvailableError
from anygauge.registry import Registry
from anygauge.testing.check import NotAsked, Opened, check
from anygauge.testing.watch import answer_of

SEEN = """
import json, os, sys
from anygauge.registry import Registry
from anygauge.testing.watch import answer
backend = Registry.load(os.environ).create_backend(*json.load(sys.stdin))
backend.open(0)
answer(backend.placement.device_count())
backend.close()
"""


@check(
    "opening gives a device of the backend's type and settles its capabilities; a rank without a "
    "device is refused",
    part="device",
    means="nothing would run on the device, or two ranks share a card without a word; look at "
    "open(), which must return this rank's device, and compare the rank with their number",
)
def opens(on: Opened) -> None:
    assert on.device.type == on.backend.device_type, f"open() gave {on.device}"
    assert on.placement.device == on.device
    for name in CAPABILITIES:
        support = on.backend.support(name)
        assert support.level is not Level.DEPENDS, f"{name}: {support}, and one is open"
    made = torch.ones(3, device=on.device)
    assert made.device.type == on.device.type
    assert made.to(HOST_DEVICE).tolist() == [1, 1, 1]
    try:
        on.fresh().placement.open(on.visible + 1000)
    except NotAvailableError as error:
        named = any(str(each) in str(error) for each in (on.visible, on.visible + 1000))
        assert named, f"the refusal of local rank {on.visible + 1000} names no number: {error}"
    else:  # where it bears no number, any number of ranks share it
        assert on.device.index is None, f"local rank {on.visible + 1000} was opened"


@check(
    "as many devices are probed as can be opened, and the visibility variable hides the others",
    part="device",
    means="`--devices auto` starts too few ranks or too many, or jobs that share a machine take "
    "each other's devices; the probe counts files, or the variable has another name or form",
    limit_s=120,
)
def devices_are_counted(on: Opened) -> None:
    if on.device.index is None:
        raise NotAsked("its device bears no number, and any number of ranks share it")
    variable = on.backend.launch.visibility_variable
    probed = Registry.load(os.environ).probe(on.backend.name).device_count
    if probed is not None:
        # The probe looks at the machine, also where this process may see some of its devices alone.
        fits = probed >= on.visible if (variable or "") in os.environ else probed == on.visible
        assert fits, f"the probe counts {probed}, the placement {on.visible}"
    if variable is None or on.visible < 2:
        return
    named = os.environ.get(variable, ",".join(map(str, range(on.visible)))).split(",")[-1]
    options = on.backend.options.model_dump(exclude_unset=True)
    environment = {**os.environ, variable: named}
    what = f"the devices with {variable}={named}"
    found = answer_of(("-c", SEEN), [on.backend.name, options], environment, what, 110)
    assert found == 1, f"with {variable}={named} a process sees {found} devices"


@check(
    "nothing is open after closing, and closing twice is not an error",
    part="device",
    means="the next run would find the device taken; look at close(), which must give back "
    "what open() took",
)
def closes(on: Opened) -> None:
    other = on.fresh()
    other.open(0)
    other.close()
    assert not other.placement.is_open, "the device is still open"
    other.close()
