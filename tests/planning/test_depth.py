"""A deep model's figures from shallow ones: what lies on a line, what not, where patterns begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from anygauge.planning.depth import at_depth, pattern, shallowest
from transformers import AutoConfig

from anygauge.planning.memory import Peak

MIB = 2**20


def config(layers: int = 40, **fields: object) -> object:
    return AutoConfig.for_model("llama", num_hidden_layers=layers, **fields)


def peak(*parts: int) -> Peak:
    return Peak(
        total=max(parts), kinds={"weights": max(parts)}, parts=(parts[0], parts[1], parts[2])
    )


def line(layers: int) -> Mapping[str, Peak]:
    return {"step": peak(layers * MIB, (10 + 3 * layers) * MIB, (8 + 2 * layers) * MIB)}


def deep(of: Callable[[int], Mapping[str, Peak]]) -> tuple[Mapping[str, Peak], str, list[int]]:
    """What is found of 40 layers, how it is told, and the depths that were rehearsed."""
    asked: list[int] = []

    def rehearsed(layers: int) -> Mapping[str, Peak]:
        asked.append(layers)
        return of(layers)

    found, how = at_depth(rehearsed, config())
    return found, how, asked


def test_a_line_goes_on() -> None:
    found, how, asked = deep(line)
    assert found["step"] == line(40)["step"]
    assert asked == [2, 3, 4] and how == "from 2 to 4 of 40 layers"


def test_a_part_that_overtakes_is_seen() -> None:
    found, *_ = deep(lambda layers: {"step": peak(100 * MIB, 100 * MIB, 5 * layers * MIB)})
    assert found["step"].total == 200 * MIB


def test_kinds_are_those_of_the_part_that_is_largest_at_last() -> None:
    def rehearsed(layers: int) -> Mapping[str, Peak]:
        early = {"activations": 5 * layers * MIB, "weights": layers * MIB}
        return {
            "backward": Peak(
                total=100 * MIB,
                kinds={"logits and loss": 100 * MIB},
                parts=(100 * MIB, 6 * layers * MIB, 0),
                kinds_of_parts=({"logits and loss": 100 * MIB}, early, {}),
            )
        }

    found, *_ = deep(rehearsed)
    peak = found["backward"]
    assert peak.kinds == {"activations": 200 * MIB, "weights": 40 * MIB}
    assert peak.total == sum(peak.kinds.values()) == 240 * MIB


def test_an_uneven_part_grows_as_the_largest_of_a_step_and_not_as_a_smaller_phase() -> None:
    uneven = {2: 60, 3: 61, 4: 80}
    found, *_ = deep(
        lambda layers: {
            "forward": peak(20 * layers * MIB, 0, 0),
            "backward": peak(0, (100 + 3 * layers) * MIB, uneven[layers] * MIB),
        }
    )
    assert found["backward"].parts == (0, 220 * MIB, (80 + 36 * 3) * MIB)


def test_depths_go_on_until_they_are_even() -> None:
    found, _, asked = deep(lambda layers: line(layers if layers > 3 else 1))
    assert asked == [2, 3, 4, 5, 6]
    assert found["step"] == line(40)["step"]


def test_what_is_never_even_is_rehearsed_whole() -> None:
    found, how, asked = deep(lambda layers: {"step": peak(0, layers * layers * MIB, 0)})
    assert asked[-1] == 40 and how == "all layers" and found["step"].total == 1600 * MIB


def test_an_uneven_part_grows_no_faster_than_what_is_kept() -> None:
    sizes = {2: 0, 3: 9, 4: 1}
    found, *_ = deep(lambda layers: {"step": peak(0, (100 + layers) * MIB, sizes[layers] * MIB)})
    assert found["step"].total == 140 * MIB
    assert found["step"].parts[2] == 37 * MIB


def test_what_an_evaluation_gathers_by_chance_says_nothing_of_growth() -> None:
    gathered = {2: 90, 3: 70, 4: 100}
    found, *_ = deep(
        lambda layers: {
            "backward": peak(0, (100 + 3 * layers) * MIB, 0),
            "evaluation": peak(gathered[layers] * MIB, 0, 0),
        }
    )
    assert found["evaluation"].total == (100 + 36 * 3) * MIB


def test_the_first_depth_reaches_what_is_gathered_at_once() -> None:
    assert shallowest(config(), 7) == (7, 1, 33)
    assert shallowest(config(9), 7) is None


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["full_attention"] * 12, (0, 1)),
        (["sliding_attention", "full_attention"] * 6, (0, 2)),
        (["full_attention", *["sliding_attention"] * 11], (1, 1)),
    ],
)
def test_patterns_of_layers(kinds: list[str], expected: tuple[int, int]) -> None:
    of = AutoConfig.for_model("qwen2", num_hidden_layers=12, layer_types=kinds)
    assert pattern(of) == expected
