"""The plugin whose backend has one defect: a line of a table, which `ANYGAUGE_MUTATION` names.

Installed by the tests as a distribution of its own. Without a defect it is the host's processors
under another name.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any

from anygauge.interface import (
    API_VERSION,
    Backend,
    BackendSpec,
    Finding,
    KernelSpec,
    Probe,
    hookimpl,
)

MUTATION = os.environ.get("ANYGAUGE_MUTATION", "none")


@functools.cache
def wrong() -> Any:
    """What its line makes of a backend."""
    from tests.testing.wrong import Mutant, changed, mutant_named

    sound = Mutant(MUTATION, "", "", "cpu", lambda on: None)
    return changed(mutant_named(MUTATION) or sound)


def probe() -> Probe:
    usual = wrong().usual_probe or usual_probe
    found: Probe = usual() if wrong().probed is None else wrong().probed(usual)
    return found


def usual_probe() -> Probe:
    here = Finding.not_needed("the host")
    return Probe(devices=here, driver=here, software=here, device_count=4)


@hookimpl
def anygauge_provide_backends() -> Iterable[BackendSpec]:
    fields: dict[str, Any] = {
        "name": "mutant",
        "factory": "anygauge_mutant:make",
        "options": "anygauge_cpu.options:CpuOptions",
        "probe": probe,
        "api_version": API_VERSION,
        "priority": -1000,
    }
    return [BackendSpec(**{**fields, **wrong().announce()})]


if MUTATION == "a kernel is wrong":

    @hookimpl
    def anygauge_provide_kernels() -> Iterable[KernelSpec]:
        return [
            KernelSpec(
                operation="softmax",
                name="mutant",
                factory="anygauge_mutant:unnormalised",
                api_version=API_VERSION,
            )
        ]


def unnormalised() -> Any:
    """The factory of a softmax that forgets to divide."""
    return lambda x, dim, *rest, **named: (x - x.amax(dim, keepdim=True)).exp()


def make(options: Any) -> Backend:
    found: Backend = wrong().backend(options)
    return found
