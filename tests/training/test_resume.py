"""A run that ends early resumes as if it had not: on other ranks, another strategy, after any kill.

Every loss is compared with that of a run that nobody disturbed. The schedule is constant where the
parts of a run are of different length, because a schedule knows the length of its run.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import STOPPED, RunFileError
from tests.helpers.child_processes import begin, bounded
from tests.helpers.forked import RunPart, finished, random_delays, runs_of
from tests.helpers.runs import Run, run_file, train, trained_here

CLOSE = 2e-5
"""Relative; float32 sums in another order, as in the tests of parity."""

CONSTANT = {"schedule": {"name": "constant"}, "optimizer": {"lr": 1e-2, "weight_decay": 0.1}}
HELD_OUT = {"eval_fraction": 0.2}
SINGLE = {"strategy": {"name": "single"}}
PATIENCE_S = 240.0


def lengths(steps: int, **more: Any) -> dict[str, Any]:
    return {**CONSTANT, "steps": steps, "micro_batch_size": 1, **more}


def undisturbed(folder: Path, steps: int, **changes: Any) -> Run:
    (folder / "whole").mkdir()
    return trained_here(run_file(folder / "whole", train=lengths(steps), **SINGLE, **changes))


def train_records(run: Run) -> list[dict[str, Any]]:
    return [r for r in run.records if "loss" in r]


@pytest.mark.parametrize(
    "way",
    [
        [(2, "zero"), (4, "fsdp"), (2, "ddp"), (1, "single")],
        pytest.param(
            [(2, "zero"), (1, "zero"), (4, "zero"), (1, "single")], marks=pytest.mark.slow
        ),
    ],
    ids=["strategies", "ranks"],
)
def test_other_ranks_and_another_strategy(way: list[tuple[int, str]], tmp_path: Path) -> None:
    """One curve, with moments, step count and masters intact."""
    whole = undisturbed(tmp_path, 8)
    file = run_file(tmp_path, train=lengths(2), checkpoint={"every": 2, "resume": "auto"})
    parts = [
        RunPart(
            file=str(file),
            overrides=(
                f"train.steps={2 * number}",
                f"launch.devices={devices}",
                f"strategy.name={name}",
            ),
        )
        for number, (devices, name) in enumerate(way, 1)
    ]
    runs = finished(parts)
    assert len({run.folder for run in runs}) == 1
    assert runs[-1].steps("loss") == pytest.approx(whole.steps("loss"), rel=CLOSE)
    # At this rate differences of rounding grow tenfold every two steps, also of undisturbed runs;
    # single norms show them first.
    assert runs[-1].steps("grad_norm") == pytest.approx(whole.steps("grad_norm"), rel=0.05)
    assert max(whole.steps("loss")) > 1.001 * min(whole.steps("loss")), "the weights did move"


LAYOUTS = {
    "single": (1, {"name": "single"}),
    "ddp2": (2, {"name": "ddp"}),
    "fsdp2": (2, {"name": "fsdp"}),
    "hsdp4": (4, {"name": "fsdp", "dp_replicate": 2}),
    "tp2": (2, {"name": "ddp", "tp": 2}),
    "pp2": (2, {"name": "ddp", "pp": 2}),
    "zero3": (2, {"name": "zero"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("first", LAYOUTS)
def test_what_any_strategy_wrote_any_other_goes_on_with(first: str, tmp_path: Path) -> None:
    def part(name: str, layout: str, steps: int, **changes: Any) -> RunPart:
        devices, strategy = LAYOUTS[layout]
        (tmp_path / name).mkdir()
        file = run_file(
            tmp_path / name,
            name=name,
            strategy=strategy,
            train=lengths(steps),
            launch={"devices": devices},
            **changes,
        )
        return RunPart(file=str(file))

    whole = undisturbed(tmp_path, 4)
    written = part("first", first, 2, checkpoint={"every": 2})
    folder = tmp_path / "first/out/first/checkpoints/step-00000002"
    rest = [part(f"then-{n}", n, 4, checkpoint={"resume": str(folder)}) for n in LAYOUTS]
    _, *runs = finished([written, *rest])
    for run in runs:
        assert run.steps("loss") == pytest.approx(whole.steps("loss")[2:], rel=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "trained"),
    [
        ({"r": 4}, {}),
        (None, {}),
        # Of the first stage, nothing.
        (None, {"trainable": [r"model\.layers\.1\..*"]}),
    ],
    ids=["adapter", "all weights", "the last layer"],
)
def test_layers_stages_and_rows_on_eight_cards_and_shards_on_two(
    adapter: dict[str, Any] | None, trained: dict[str, Any], tmp_path: Path
) -> None:
    """Each goes on with what the other wrote."""
    pytest.importorskip("anygauge_sim", reason="needs `make plugins`")
    (tmp_path / "whole").mkdir()
    alone = run_file(tmp_path / "whole", train=lengths(6, **trained), adapter=adapter, **SINGLE)
    file = run_file(
        tmp_path,
        backend="sim",
        precision={"param_dtype": "float32"},
        train=lengths(2, **trained),
        adapter=adapter,
        checkpoint={"every": 2, "resume": "auto"},
        strategy={"name": "ddp", "tp": 2, "pp": 2},
        launch={"devices": 8},
    )
    shards = ("strategy=fsdp", "launch.devices=2", "train.steps=4")
    ways = ((), shards, ("train.steps=6",))
    parts = [RunPart(file=str(file), overrides=way) for way in ways]
    whole, *_, last = finished([RunPart(file=str(alone)), *parts])
    assert last.steps("loss") == pytest.approx(whole.steps("loss"), rel=CLOSE)


@pytest.mark.slow
def test_from_single_to_zero_with_all_weights_in_bfloat16(tmp_path: Path) -> None:
    """Masters keep the digits that bfloat16 weights lack, and odd sizes are padded per rank."""
    changes: dict[str, Any] = {"adapter": None, "precision": {"param_dtype": "bfloat16"}}
    file = run_file(
        tmp_path, train=lengths(2), checkpoint={"every": 2, "resume": "auto"}, **changes
    )
    whole = RunPart(
        file=str(run_file(tmp_path, name="whole", train=lengths(4), **SINGLE, **changes))
    )
    first = RunPart(file=str(file), overrides=("strategy.name=single",))
    second = RunPart(
        file=str(file), overrides=("strategy=zero", "train.steps=4", "launch.devices=2")
    )
    reference, _, resumed = finished([whole, first, second])
    assert resumed.steps("loss") == pytest.approx(reference.steps("loss"), rel=5e-4)


@pytest.mark.parametrize(
    ("kills", "steps"), [(1, 25), pytest.param(20, 60, marks=pytest.mark.slow)]
)
def test_kills_at_random_moments(kills: int, steps: int, tmp_path: Path) -> None:
    """On the same ranks nothing is rounded otherwise: the losses are equal to the last digit."""
    shared: dict[str, Any] = {
        "train": lengths(steps, eval_every=7),
        "data": HELD_OUT,
        "launch": {"devices": 2},
    }
    whole = run_file(tmp_path, name="whole", **shared)
    file = run_file(tmp_path, checkpoint={"every": 1, "resume": "auto", "keep_best": 1}, **shared)
    parts = [RunPart(file=str(file), kill_after_s=s) for s in random_delays(7, kills, 0.15)]
    reference, *killed, last = runs_of(
        [RunPart(file=str(whole)), *parts, RunPart(file=str(file))], timeout_s=1500
    )
    assert [run.status for run in killed] == [-signal.SIGKILL] * kills
    assert (reference.status, last.status) == (0, 0), last.err
    assert [r["step"] for r in train_records(last)] == list(range(1, steps + 1))
    assert last.steps("loss") == reference.steps("loss")
    assert last.evaluations() == reference.evaluations()
    evaluated = [r["step"] for r in last.records if "eval_loss" in r]
    assert evaluated == [*range(7, steps, 7), steps]


def test_dropout_goes_on_where_it_was(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"adapter": {"r": 4, "dropout": 0.5}, "launch": {"devices": 2}}
    whole = run_file(tmp_path, name="whole", train=lengths(6), **changes)
    file = run_file(
        tmp_path, train=lengths(3), checkpoint={"every": 3, "resume": "auto"}, **changes
    )
    reference, _, resumed = finished(
        [
            RunPart(file=str(whole)),
            RunPart(file=str(file)),
            RunPart(file=str(file), overrides=("train.steps=6",)),
        ]
    )
    assert resumed.steps("loss") == reference.steps("loss")


@pytest.mark.parametrize(
    ("optimizer", "layout", "adapter"),
    [
        # Where a vector's state is another than a matrix's.
        ("muon", "single", None),
        ("muon", "pp2", None),
        ("muon", "ddp2", {"r": 4}),
        ("adafactor", "single", None),
    ],
)
def test_an_optimizer_resumes_to_the_last_digit(
    optimizer: str, layout: str, adapter: dict[str, Any] | None, tmp_path: Path
) -> None:
    devices, strategy = LAYOUTS[layout]
    shared = {"adapter": adapter, "strategy": strategy, "launch": {"devices": devices}}
    train = {**lengths(2), "optimizer": {"name": optimizer, "lr": 1e-3}}
    checkpoint = {"every": 2, "resume": "auto"}
    whole = run_file(tmp_path, name="whole", train={**train, "steps": 4}, **shared)
    file = run_file(tmp_path, train=train, checkpoint=checkpoint, **shared)
    reference, _, resumed = finished(
        [
            RunPart(file=str(whole)),
            RunPart(file=str(file)),
            RunPart(file=str(file), overrides=("train.steps=4",)),
        ]
    )
    assert resumed.steps("loss") == reference.steps("loss")
    assert len(set(reference.steps("loss"))) == 4, "the weights did move"


def test_sigterm_ends_the_step_writes_a_checkpoint_and_has_a_status_of_its_own(
    tmp_path: Path,
) -> None:
    shared: dict[str, Any] = {"train": lengths(40), "launch": {"devices": 2}}
    whole = run_file(tmp_path, name="whole", **shared)
    file = run_file(tmp_path, checkpoint={"resume": "auto"}, **shared)
    reference, stopped, resumed = runs_of(
        [
            RunPart(file=str(whole)),
            RunPart(file=str(file), stop_after_s=0.05),
            RunPart(file=str(file)),
        ]
    )
    assert stopped.status == STOPPED, stopped.err
    (event, _) = [json.loads(x) for x in stopped.out.splitlines() if '"stopped"' in x]
    done = event["step"]
    assert 0 < done < 40
    assert Path(event["checkpoint"]).name == f"step-{done:08}"
    assert resumed.status == 0, resumed.err
    assert "steps done" in resumed.out
    assert resumed.steps("loss") == reference.steps("loss")


def test_a_finished_run_of_an_adapter_can_be_prolonged(tmp_path: Path) -> None:
    """Nothing was said of checkpoints: there is one of the last step."""
    whole = undisturbed(tmp_path, 6)
    first = trained_here(run_file(tmp_path, train=lengths(4), **SINGLE))
    assert [each.name for each in (first.folder / "checkpoints").iterdir()] == ["step-00000004"]
    resume = {"checkpoint": {"resume": "auto"}}
    longer = trained_here(run_file(tmp_path, train=lengths(6), **SINGLE, **resume))
    assert longer.folder == first.folder
    assert longer.steps("loss") == whole.steps("loss")
    left = whole.steps("remaining_s")
    assert left[-1] == 0 and left[0] > 0


def test_a_prolonged_run_says_where_its_schedule_knew_another_length(tmp_path: Path) -> None:
    warmed = {**CONSTANT, "schedule": {"name": "constant", "warmup_ratio": 0.5}}
    parts = [
        RunPart(
            file=str(run_file(tmp_path, name=name, train={**train, "steps": 2}, **SINGLE)),
            overrides=(f"train.steps={steps}", "checkpoint.resume=auto"),
        )
        for name, train in (("constant", CONSTANT), ("warmed", warmed))
        for steps in (2, 3)
    ]
    _, constant, _, longer = finished(parts)
    told = "steps 1 to 2 had the learning rates of a run of 2 steps, so the losses differ"
    assert told in longer.out and told not in constant.out


def test_all_weights_leave_no_checkpoint_and_say_so(tmp_path: Path) -> None:
    run = trained_here(run_file(tmp_path, adapter=None, train=lengths(2), **SINGLE))
    assert not (run.folder / "checkpoints").exists()
    report = json.loads((run.folder / "report.json").read_text())
    assert report["checkpoints"] == "none to resume from; set checkpoint.every to have them"


def test_a_flipped_byte_is_found_and_the_checkpoint_before_it_taken(tmp_path: Path) -> None:
    file = run_file(tmp_path, train=lengths(4), checkpoint={"every": 2, "resume": "auto"}, **SINGLE)
    first = trained_here(file)
    (first.folder / "report.json").unlink()  # what a run writes last
    newest = first.folder / "checkpoints/step-00000004/state-00001.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    (resumed,) = finished([RunPart(file=str(file))])
    assert "checkpoints/step-00000004 is skipped: state-00001.safetensors: its SHA-256" in (
        resumed.out
    )
    assert "step-00000002 (2 steps done)" in resumed.out
    assert resumed.steps("loss") == first.steps("loss")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """The run file of a run that is complete, and the run."""
    file = run_file(
        tmp_path_factory.mktemp("done"),
        train=lengths(2),
        checkpoint={"every": 2, "resume": "auto"},
        **SINGLE,
    )
    return file, trained_here(file)


def test_a_run_that_is_complete_stays_so(done: tuple[Path, Run]) -> None:
    file, first = done
    losses = first.steps("loss")
    again = trained_here(file)
    assert again.folder == first.folder and again.steps("loss") == losses


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("train.seed", 1, r"train.seed \(before: 0; now: 1\)"),
        ("train.global_batch_size", 8, r"train.global_batch_size \(before: 4; now: 8\)"),
        ("adapter.r", 8, "adapter"),
        ("data.max_length", 80, "data and its order"),
    ],
)
def test_another_run_is_refused(field: str, value: int, named: str, done: tuple[Path, Run]) -> None:
    with pytest.raises(RunFileError, match=f"belongs to another run: .*{named}"):
        trained_here(done[0], **{field: value})


def test_the_command_line_stops_and_goes_on(tmp_path: Path) -> None:
    """What a scheduler does: SIGTERM to the command; the same command again with --resume auto."""
    file = run_file(tmp_path, train=lengths(400), **SINGLE)
    process = begin("train", file)
    assert process.stdout is not None
    with bounded(process, PATIENCE_S):
        for line in process.stdout:
            if line.startswith("step 3/"):
                break
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == STOPPED, said
    assert "stopped at request after step" in said
    assert "--resume auto" in said
    done = train(file, "--resume", "auto", "--set", "train.steps=1", timeout_s=PATIENCE_S)
    assert done.status == 0, done.err
    assert "steps done)" in done.out
    assert not (tmp_path / "out" / "tiny-2").exists()
