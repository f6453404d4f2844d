"""Each strategy brings the fields of its section; another's: `messages.txt`."""

from __future__ import annotations

from anygauge.config.resolved import dump_run


def test_the_default_and_its_fields(folder, minimal):
    strategy = folder.load(minimal).strategy
    assert strategy.model_dump() == {"name": "auto"}
    zero = folder.load(minimal, "strategy=zero", "strategy.stage=2").strategy
    assert (zero.stage, zero.gather) == (2, "layer")
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


def test_a_word_stands_for_a_section(folder, minimal):
    assert folder.load(minimal + "strategy: single").strategy.model_dump() == {"name": "single"}
    assert folder.load(minimal + "strategy: {name: single}", "strategy=fsdp").strategy.gather
    folder.write("base.yaml", minimal + "strategy: fsdp")
    run = folder.load("extends: base.yaml\nstrategy: {gather: step}")
    assert (run.strategy.name, run.strategy.gather) == ("fsdp", "step")
    run = folder.load(minimal + "strategy: fsdp", "strategy.gather=step")
    assert (run.strategy.name, run.strategy.gather) == ("fsdp", "step")


def test_a_layout_that_has_a_name_of_its_own(folder, minimal):
    launch = "\nlaunch: {nodes: 2, devices: 8}"
    strategy = folder.load(minimal + "strategy: mics" + launch).strategy
    assert (strategy.name, strategy.dp_replicate, strategy.dp_shard) == ("fsdp", 2, -1)
    strategy = folder.load(minimal + "strategy: mics" + launch, "launch.nodes=4").strategy
    assert strategy.dp_replicate == 4
    assert "mics" not in dump_run(folder.load(minimal + "strategy: mics"))


def test_fields_join_a_word_wherever_it_was_said(folder, minimal):
    """A later word takes the place of the whole section, fields before it among them."""
    launch = "\nlaunch: {nodes: 2, devices: 4}"
    run = folder.load(minimal + "strategy: zero", "strategy=fsdp", "strategy.tp=2")
    assert (run.strategy.name, run.strategy.tp) == ("fsdp", 2)
    run = folder.load(minimal + "strategy: pipeline" + launch, "strategy.schedule=gpipe")
    assert (run.strategy.name, run.strategy.pp, run.strategy.schedule) == ("ddp", 8, "gpipe")
    run = folder.load(minimal + launch, "strategy=tensor", "strategy.tp=4")
    assert (run.strategy.name, run.strategy.tp) == ("ddp", 4)
    run = folder.load(minimal, "strategy.cp=2", "strategy=ddp")
    assert (run.strategy.name, run.strategy.cp) == ("ddp", 1)
    file = minimal + "strategy: {name: zero, stage: 2}"
    run = folder.load(file, "strategy=ddp", "strategy.pp=2")
    assert (run.strategy.name, run.strategy.pp) == ("ddp", 2)
