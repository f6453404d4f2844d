"""Announces the real CUDA backend; its real probe looks at a machine of files beside this one."""

import dataclasses
from pathlib import Path

import anygauge_cuda
from anygauge.interface import hookimpl
from anygauge_cuda.probe import probe

MACHINE = Path(__file__).parent / "machine"


def probe_machine():
    return probe(MACHINE, MACHINE / "torch")


@hookimpl
def anygauge_provide_backends():
    (spec,) = anygauge_cuda.anygauge_provide_backends()
    return [dataclasses.replace(spec, probe=probe_machine)]
