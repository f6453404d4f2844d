"""Each strategy brings the fields of its section; another's: `messages.txt`."""

from __future__ import annotations

import pytest

from anygauge.config.resolved import dump_run


def test_the_default_and_its_fields(folder, minimal):
    strategy = folder.load(minimal).strategy
    assert strategy.model_dump() == {"name": "auto"}
    zero = folder.load(minimal, "strategy=zero", "strategy.stage=2").strategy
    assert (zero.stage, zero.gather) == (2, "auto")
    for null in ("{name: null}", "null"):
        assert folder.load(minimal + f"strategy: {null}").strategy.name == "auto"


def test_a_strategy_has_its_own_fields_alone(folder, minimal):
    run = folder.load(minimal + "strategy: {name: single}")
    assert run.model_dump()["strategy"] == {"name": "single"}
    assert "stage" not in dump_run(run)


def test_an_unknown_strategy_hides_nothing_else(folder, minimal):
    lines = folder.refuse(minimal + "strategy: {name: zreo}\ntrian: {}")
    assert len(lines) == 2
    assert "did you mean 'zero'?" in lines[0] and "did you mean 'train'?" in lines[1]


LAUNCH = "launch: {nodes: 2, devices: 4}"
FSDP = {"name": "fsdp", "gather": "step"}


@pytest.mark.parametrize(
    ("base", "text", "overrides", "expected"),
    [
        ("", "strategy: single", (), {"name": "single"}),
        ("", "strategy: {name: single}", ("strategy=fsdp",), {"name": "fsdp"}),
        ("strategy: fsdp", "strategy: {gather: step}", (), FSDP),
        ("", "strategy: fsdp", ("strategy.gather=step",), FSDP),
        # A later word takes the place of the whole section, fields before it among them.
        ("", "strategy: zero", ("strategy=fsdp", "strategy.tp=2"), {"name": "fsdp", "tp": 2}),
        ("", "", ("strategy.cp=2", "strategy=ddp"), {"name": "ddp", "cp": 1}),
        (
            *("", "strategy: {name: zero, stage: 2}", ("strategy=ddp", "strategy.pp=2")),
            {"name": "ddp", "pp": 2},
        ),
        # Layouts that have a name of their own.
        ("", "strategy: mics", (), {"name": "fsdp", "dp_replicate": 2, "dp_shard": -1}),
        ("", "strategy: mics", ("launch.nodes=4",), {"name": "fsdp", "dp_replicate": 4}),
        (
            *("", "strategy: pipeline", ("strategy.schedule=gpipe",)),
            {"name": "ddp", "pp": 8, "schedule": "gpipe"},
        ),
        ("", "", ("strategy=tensor", "strategy.tp=4"), {"name": "ddp", "tp": 4}),
    ],
)
def test_a_word_stands_for_a_section_and_fields_join_it(
    folder, minimal, base, text, overrides, expected
):
    folder.write("base.yaml", f"{minimal}{LAUNCH}\n{base}")
    run = folder.load(f"extends: base.yaml\n{text}", *overrides)
    found = run.strategy.model_dump()
    assert {name: found[name] for name in expected} == expected
    assert "mics" not in dump_run(run)
