"""A deep model's figures from shallow ones: each part of a peak grows evenly with the layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from anygauge.config.problems import LAYERS
from anygauge.models.factory import CausalModelFactory
from anygauge.planning.memory import SAVE, STEP, Peak

FactoryT = TypeVar("FactoryT", bound=CausalModelFactory)

SHALLOW = 8
"""A model of no more layers is rehearsed whole."""
UNEVEN = 0.002
"""By how much, relatively, three depths may miss a straight line."""
MOST = 5
"""Depths that are tried, before all layers are."""


def layers_of(config: Any) -> int:
    """How many decoder layers a text model's configuration says."""
    return next((int(getattr(config, name)) for name in LAYERS if getattr(config, name, None)), 0)


def cut(config: Any, layers: int) -> None:
    """Make a configuration that of its first layers; what it says of each layer is cut as well."""
    before = layers_of(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == before:
            setattr(config, name, value[:layers])
    for name in LAYERS:
        if getattr(config, name, None):
            setattr(config, name, layers)


def of_depth(factory: FactoryT, layers: int) -> FactoryT:
    """The same model with its first layers alone."""
    other = copy.copy(factory)
    other.config = copy.deepcopy(factory.config)
    cut(other.config.get_text_config(), layers)
    return other


def pattern(config: Any) -> tuple[int, int]:
    """Layers before the pattern of a text model begins, and its length; (0, 1): all are alike."""
    layers = layers_of(config)
    lists = [
        tuple(map(repr, value))
        for value in vars(config).values()
        if isinstance(value, list | tuple) and len(value) == layers
    ]
    first = int(getattr(config, "first_k_dense_replace", 0) or 0)
    kinds = list(zip(*lists, strict=True)) or [()] * layers
    for start in range(first, layers):
        for length in range(1, (layers - start) // 2 + 1):
            if all(kinds[i] == kinds[i + length] for i in range(start, layers - length)):
                return start, length
    return layers, 1


def shallowest(config: Any, reach: int = 0) -> tuple[int, int, int] | None:
    """The least layers that show a text model's pattern, the pattern's length, and how often it
    comes again until the model is whole; None: the model is shallow enough.

    Args:
        reach: layers from which on what is gathered at once no longer grows.
    """
    layers = layers_of(config)
    start, length = pattern(config)
    # The last layers stay the pattern's last: a depth has as much left over as the whole.
    least = start + 2 * length + (layers - start) % length
    while least < reach:
        least += length
    if layers <= max(SHALLOW, least + 2 * length):
        return None
    return least, length, (layers - least) // length


def depths_of(config: Any, reach: int = 0) -> list[int]:
    """Layers to be rehearsed, one after the other, until three are on a line; []: all layers.

    Args:
        config: of the text model, whole.
        reach: see `shallowest`.
    """
    depth = shallowest(config, reach)
    if depth is None:
        return []
    least, length, _ = depth
    found = (least + turn * length for turn in range(MOST))
    return [layers for layers in found if layers < layers_of(config)]


def at_depth(
    rehearsed: Callable[[int], Mapping[str, Peak]], config: Any, reach: int = 0
) -> tuple[Mapping[str, Peak], str]:
    """Peaks of a model by phase, and how they were found.

    Args:
        rehearsed: number of layers -> peaks by phase.
        config: of the text model, whole.
        reach: see `shallowest`.
    """
    layers = layers_of(config)
    depths = depths_of(config, reach)
    found: list[Mapping[str, Peak]] = []
    for last in depths:
        found.append(rehearsed(last))
        if len(found) >= 3 and _is_even(found[-3:]):
            turns = (layers - last) // (depths[1] - depths[0])
            return _further(found[-3:], turns), f"from {depths[0]} to {last} of {layers} layers"
    return rehearsed(layers), "all layers"


def _is_even(found: list[Mapping[str, Peak]]) -> bool:
    """Whether what a rank holds at most lies on a line."""
    phase = max(found[-1], key=lambda name: found[-1][name].total)
    return _is_line(_largest([peaks[phase] for peaks in found]))


def _most(peak: Peak) -> int:
    return max(range(len(peak.parts)), key=peak.parts.__getitem__)


def _is_line(sizes: list[int]) -> bool:
    one, two, three = sizes
    return abs(three - 2 * two + one) <= UNEVEN * three


def _further(found: list[Mapping[str, Peak]], turns: int) -> Mapping[str, Peak]:
    """Peaks of so many patterns more than the last.

    Parts that are not the largest may be uneven, by what happens to be gathered when: they get the
    larger growth. None grows faster than what is kept for backward, or is there at the update.
    """
    *_, three = found
    steps = list(zip(*_by_step(*found), strict=True))
    even = [peaks for peaks in steps if _is_line(_largest(peaks))]
    bound = max(map(_growth, even or steps))

    def at(phase: str) -> Peak:
        parts, kinds = [], []
        for index, size in enumerate(three[phase].parts):
            sizes = [peaks[phase].parts[index] for peaks in found]
            growth = size - sizes[1]
            if not _is_line(sizes):
                growth = min(bound, max(growth, sizes[1] - sizes[0]))
            parts.append(size + turns * growth)
            kinds.append(_kinds([peaks[phase] for peaks in found], index, turns, parts[-1]))
        total = max(parts)
        return Peak(
            total=total,
            kinds=kinds[parts.index(total)],
            parts=(parts[0], parts[1], parts[2]),
        )

    return {phase: at(phase) for phase in three}


def _by_step(*found: Mapping[str, Peak]) -> Iterator[list[Peak]]:
    """Peaks of several depths: of a step the phase that is largest, and none of a save."""
    last = found[-1]
    groups: dict[str, list[str]] = {}
    for phase in last:
        where, _, name = phase.rpartition(" ")
        if name != SAVE:
            groups.setdefault(f"{where} step" if name in STEP else phase, []).append(phase)
    for peaks in found:
        yield [peaks[max(names, key=lambda name: last[name].total)] for names in groups.values()]


def _largest(peaks: Sequence[Peak]) -> list[int]:
    """The largest part of the last, at each depth."""
    most = _most(peaks[-1])
    return [peak.parts[most] for peak in peaks]


def _growth(peaks: Sequence[Peak]) -> int:
    """Of the largest part, from the last depth but one."""
    *_, two, three = _largest(peaks)
    return three - two


def _kinds(found: Sequence[Peak], part: int, turns: int, total: int) -> dict[str, int]:
    """Kinds of a part, which sum up to what it does.

    Peaks may be of different moments: kinds that are on no line share what is left by the others.
    """
    of = [peak.kinds_of_parts[part] if peak.kinds_of_parts else peak.kinds for peak in found]
    sizes = {kind: [kinds.get(kind, 0) for kinds in of] for kind in {**of[-1], **of[-2]}}
    if not sizes:
        return {}
    even = {kind: _is_line(size) and size[2] >= size[1] for kind, size in sizes.items()}
    kinds = {kind: s[2] + (turns * (s[2] - s[1]) if even[kind] else 0) for kind, s in sizes.items()}
    sharing = {kind: kinds[kind] for kind in kinds if not even[kind] and kinds[kind]}
    if not sharing:
        most = max(kinds, key=kinds.__getitem__)
        sharing = {most: kinds[most]}
    rest = total - sum(kinds.values())
    whole = sum(sharing.values())
    for kind, size in sharing.items():
        kinds[kind] += rest * size // max(1, whole)
    last = max(sharing, key=sharing.__getitem__)
    kinds[last] += total - sum(kinds.values())
    return {kind: max(0, size) for kind, size in kinds.items()}
