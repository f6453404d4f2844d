"""Announces the real backend of Gaudi with a probe that finds the stand-in's cards."""

import dataclasses
import functools
import sys

import habana_standin

import anygauge_hpu
from anygauge.interface import Finding, Probe, hookimpl
from anygauge_hpu.backend import HpuGraph

anygauge_provide_kernels = anygauge_hpu.anygauge_provide_kernels


def probe():
    found = Finding.yes("a stand-in for tests, no Gaudi card")
    return Probe(devices=found, driver=found, software=found, device_count=8)


mark_step = HpuGraph.mark_step


@functools.wraps(mark_step)
def told(self, phase):
    """Write down, in every mode, where a step's parts end: a census is read step by step."""
    tell_of_evaluations()
    mark_step(self, phase)
    habana_standin.record("phase", phase.value)


@functools.cache
def tell_of_evaluations():
    """Write down where an evaluation begins and ends: its forward passes look like a step's."""
    loop = getattr(sys.modules.get("anygauge.training.loop"), "Loop", None)
    if loop is None:
        return
    evaluate = loop.evaluate

    @functools.wraps(evaluate)
    def told_of(self, done):
        habana_standin.record("evaluation", "begins")
        try:
            return evaluate(self, done)
        finally:
            habana_standin.record("evaluation", "ends")

    loop.evaluate = told_of


HpuGraph.mark_step = told


@hookimpl
def anygauge_provide_backends():
    (spec,) = anygauge_hpu.anygauge_provide_backends()
    return [dataclasses.replace(spec, probe=probe)]
