"""Compiling a model's regions, where its device wants that."""

from __future__ import annotations

from torch import nn

from anygauge.interface import Backend
from anygauge.strategies.materialise import decoder_layers


def compile_regions(model: nn.Module, backend: Backend) -> int:
    """Compile what `Graph.compiler` names, in place; returns the number of regions.

    Decoder layers are alike: one compilation serves all of them, and what stands between them
    (gathers of shards, recomputation) stays outside.
    """
    compiler = backend.graph.compiler
    if compiler is None:
        return 0
    regions = list(decoder_layers(model)) if compiler.regions == "layer" else [model]
    for region in regions:
        region.compile(backend=compiler.backend)
    return len(regions)
