"""`anygauge.train`, `plan` and `load`, called by a script."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

import anygauge
from anygauge.cli.from_python import set_options
from anygauge.config.load import load_run_file
from anygauge.interface import STOPPED, AnygaugeError, DataError, ModelError, UsageError
from anygauge.util.events import EVENTS_FD
from tests.docs.pages import marked
from tests.helpers.child_processes import alive, begin, end, until
from tests.helpers.runs import called, check_here, prepare_here, run_file, save_tiny
from tests.launch.fakes import FINISHED, FOREVER, read_pid, sends, write_script

FAKE_RANK = str(Path(__file__).parents[1] / "launch/fake_rank.py")
STARTED = sends("started", steps=9, stops=True)


def fields_of(path: Path) -> dict[str, Any]:
    """A run file as a script would write it."""
    return dict(yaml.safe_load(path.read_text()))


def example(word: str) -> Any:
    """The code of docs/python.md whose fence bears this word."""
    (block,) = (one for one in marked(word) if one.page.name == "python.md")
    return compile(block.text, str(block), "exec")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, and with run.yaml."""
    folder = tmp_path_factory.mktemp("desk")
    save_tiny(folder / "base")
    run_file(folder, name="run", model={"name": str(folder / "base")}, train={"steps": 3})
    return folder


@pytest.fixture(scope="module")
def page(desk: Path) -> dict[str, Any]:
    """What the page's first example makes: a real run of one rank."""
    names: dict[str, Any] = {}
    with chdir(desk), mock.patch("anygauge.launch.prepare.prepare", prepare_here):
        exec(example("trains"), names)
    return names


@pytest.fixture(scope="module")
def result(page: dict[str, Any]) -> anygauge.Result:
    found = page["result"]
    assert isinstance(found, anygauge.Result)
    return found


@pytest.fixture
def fake(desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`anygauge.train` with ranks that do what they are told."""
    check_here(monkeypatch)

    def run(*actions: Any, **options: Any) -> anygauge.Result:
        command = (sys.executable, FAKE_RANK, str(write_script(tmp_path, {0: actions})))
        monkeypatch.setattr("anygauge.launch.local_run.rank_argv", lambda *_: command)
        return anygauge.train(desk / "run.yaml", output=tmp_path / "out", **options)

    return run


def test_a_run_returns_what_it_left(desk: Path, result: anygauge.Result) -> None:
    assert result.folder == desk / "out/run"
    assert (result.adapter, result.model) == (desk / "out/run/adapter", None)
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    assert result.metrics == [json.loads(line) for line in lines]
    assert [line["step"] for line in result.metrics if "loss" in line] == [1, 2, 3]
    assert result.losses == [line["loss"] for line in result.metrics if "loss" in line]
    assert result.stopped_by == "steps"
    assert "metrics" not in repr(result)


def test_a_run_that_is_done_is_returned_again(
    desk: Path, result: anygauge.Result, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = {"train.optimizer.lr": 1e-4}
    again = anygauge.train(str(desk / "run.yaml"), resume="auto", **rate)
    assert again == result
    assert "already finished after 3 steps" in capsys.readouterr().out


def test_load_gives_what_peft_gives(desk: Path, result: anygauge.Result) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(desk / "base")
    expected = PeftModel.from_pretrained(base, result.adapter).eval()
    for source in (result, str(result.folder), result.adapter):
        model, tokenizer = anygauge.load(source)
        ids = torch.tensor([tokenizer.encode("What is a gauge?")])
        assert not model.training and model.dtype == torch.float32
        assert torch.equal(model(ids).logits, expected(ids).logits)
    assert anygauge.load(result, dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_load_says_what_is_not_there(tmp_path: Path, result: anygauge.Result) -> None:
    (tmp_path / "run.yaml").write_text((result.folder / "run.yaml").read_text())
    with pytest.raises(ModelError, match="its run has not finished"):
        anygauge.load(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        anygauge.load(tmp_path / "nothing")


def test_the_page_loads_and_plans(desk: Path, page: dict[str, Any]) -> None:
    with chdir(desk):
        exec(example("loads"), page)
    assert page["model"].active_adapters == ["default"]
    assert page["plan"].fits is True and page["plan"].time["step"] > 0


def test_the_page_tries_several_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: dict[str, float] = {}

    def train(run: dict[str, Any], **set: Any) -> mock.Mock:
        found = load_run_file(run, set_options(set))
        tried[found.name] = found.train.optimizer.lr
        return mock.Mock(losses=[2.0, found.train.optimizer.lr])

    monkeypatch.setattr(anygauge, "train", train, raising=False)
    names: dict[str, Any] = {"anygauge": anygauge}
    exec(example("sweep"), names)
    assert tried == {"lr-0.0001": 1e-4, "lr-0.0003": 3e-4}
    assert names["losses"] == {1e-4: 1e-4, 3e-4: 3e-4}


def test_a_plan_has_what_the_command_prints(desk: Path) -> None:
    options = ["--machine", "h100:1", "--set", "strategy=single", "--json"]
    printed = json.loads(called(["plan", desk / "run.yaml", *options]).stdout)
    run = fields_of(desk / "run.yaml")
    found = anygauge.plan(run, machine="h100:1", strategy="single")
    assert json.loads(json.dumps(vars(found))) == printed
    assert found.fits is True and found.fit is not None and found.fit["needed"] > 0


def test_a_wrong_run_gets_the_message_of_the_command(desk: Path) -> None:
    wrong = {**fields_of(desk / "run.yaml"), "train": {"stepz": 3}}
    (desk / "wrong.yaml").write_text(yaml.safe_dump(wrong))
    command = called(["train", desk / "wrong.yaml"])
    for run in (wrong, desk / "wrong.yaml"):
        with pytest.raises(anygauge.AnygaugeError) as caught:
            anygauge.train(run)
        (said,) = str(caught.value).splitlines()[1:]
        assert caught.value.exit_status == command.returncode == 2
        assert said.partition(": ")[2] in command.stderr


# -- how it ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "for_user", "raised", "said"),
    [
        ("DataError", True, DataError, "row 3 is empty\nlogs: "),
        ("OurOwnError", True, AnygaugeError, "row 3 is empty\nlogs: "),
        ("", False, AnygaugeError, "failed with E: row 3 is empty\nits log: "),
    ],
)
def test_a_failing_rank_raises(
    fake: Any, tmp_path: Path, kind: str, for_user: bool, raised: type, said: str
) -> None:
    message = {"error": "E", "message": "row 3 is empty", "for_user": for_user, "kind": kind}
    with pytest.raises(AnygaugeError) as caught:
        fake(sends("failed", **message, exit_status=2), ["exit", 2])
    assert type(caught.value) is raised and caught.value.exit_status == 2
    assert said in str(caught.value)
    assert str(caught.value).endswith(f"\nlogs: {tmp_path}/out/run/logs")


def test_an_error_of_a_rank_keeps_its_class(tmp_path: Path) -> None:
    from anygauge.launch.outcome import NodeReport, resolve_outcome
    from anygauge.launch.rank_failure import reported_failure
    from anygauge.util.errors import NonFiniteLossError, error_class
    from anygauge.util.events import EventWriter, read_event

    class Narrow(NonFiniteLossError): ...

    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as lines, os.fdopen(writer):
        EventWriter(writer, 0).report_failure(Narrow("loss is nan"))
        event = read_event(lines.readline())
    assert event is not None
    report = NodeReport(node_rank=0, host="a", failures=(reported_failure(0, event, 1.0),))
    assert error_class(resolve_outcome([report]).error_kind) is NonFiniteLossError


def interrupt(folder: Path, signum: int) -> None:
    """Send this process a signal once the rank is up."""

    def send() -> None:
        until((folder / "up").exists, "the rank")
        os.kill(os.getpid(), signum)

    threading.Thread(target=send).start()


STOPPING: Sequence[Any] = [
    ["on_term_stop", {"step": 5, "checkpoint": "/c/step-5"}],
    *(STARTED, ["touch", "up"], FOREVER),
]


def test_ctrl_c_reaches_the_caller_when_the_ranks_have_ended(fake: Any, tmp_path: Path) -> None:
    interrupt(tmp_path, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        fake(*STOPPING)
    assert not alive(read_pid(tmp_path / "pid0"))
    assert str(caught.value) == (
        "stopped at request after step 5; checkpoint: /c/step-5; to resume: the same call with "
        'resume="auto"'
    )
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_signal_ends_the_program_with_the_status_of_the_command(
    fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(tmp_path, signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        fake(*STOPPING)
    assert caught.value.code == STOPPED
    assert "checkpoint: /c/step-5" in capsys.readouterr().err


def test_a_signal_that_the_program_handles_reaches_it(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        interrupt(tmp_path, signal.SIGTERM)
        found = fake(*STOPPING)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
    assert (found.stopped_by, found.adapter, found.losses) == ("request", None, [])


def test_a_notebook_that_can_show_nothing_leaves_no_rank(fake: Any, tmp_path: Path) -> None:
    broken = mock.patch("anygauge.launch.view.View.show", side_effect=LookupError("no display"))
    with broken, pytest.raises(LookupError, match="no display"):
        fake(STARTED, FOREVER)
    assert not alive(read_pid(tmp_path / "pid0"))


# -- where it is called --------------------------------------------------------------------------


def test_it_blocks_inside_an_event_loop(fake: Any) -> None:
    async def cell() -> anygauge.Result:
        return fake(STARTED, FINISHED)

    assert asyncio.run(cell()).folder.name == "run"


def test_it_runs_in_any_thread_and_takes_no_signals_there(fake: Any) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with ThreadPoolExecutor(1) as pool, mock.patch("signal.signal", side_effect=AssertionError):
        assert pool.submit(fake, STARTED, FINISHED).result().stopped_by == "steps"
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {**RANK, "MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"},
            "torchrun has started it as rank 1 of 2",
        ),
        ({EVENTS_FD: "7"}, "anygauge has started it"),
    ],
)
def test_a_rank_is_told_what_to_do(
    environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        anygauge.train("run.yaml")
    assert said in str(caught.value)
    assert "torchrun ... -m anygauge train RUN.yaml" in str(caught.value)


def test_a_process_with_a_process_group_is_a_rank() -> None:
    import torch.distributed

    group = mock.patch.object(torch.distributed, "is_initialized", lambda: True)
    with group, pytest.raises(UsageError, match="it has a process group"):
        anygauge.train("run.yaml")


@pytest.mark.parametrize("name", ["train", "plan", "load"])
def test_a_fork_beside_threads_of_torch_is_told_what_to_do(name: str) -> None:
    assert "torch" in sys.modules
    stay = threading.Event()
    threading.Thread(target=stay.wait).start()
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            getattr(anygauge, name)("run.yaml")
        except UsageError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    stay.set()
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert said.startswith(f"anygauge.{name}: this process is a fork of one in which torch had")
    assert 'multiprocessing.get_context("spawn")' in said


def test_a_launcher_that_leaves_nothing_here_is_refused(desk: Path) -> None:
    with pytest.raises(AnygaugeError, match="start the run with `anygauge launch`"):
        anygauge.train(
            desk / "run.yaml",
            **{
                "launch.launcher": "kubernetes",
                "launch.options.storage": {"claim": "c", "path": "/d"},
            },
        )


def test_names_are_there_without_torch() -> None:
    source = (
        "import anygauge, sys; print(sorted(dir(anygauge))); print('torch' in sys.modules)\n"
        "print(anygauge.train.__module__, anygauge.RunFile.__module__, 'torch' in sys.modules)\n"
        "print(hasattr(anygauge, 'nothing'))"
    )
    process = begin("-c", source, program=(sys.executable,))
    out, err = process.communicate(timeout=60)
    names, early, late, other = out.splitlines()
    assert not err and names == str(sorted(anygauge.__all__))
    assert (early, other) == ("False", "False")
    assert late == "anygauge.cli.from_python anygauge.config.schema False"


# -- a real interrupt ----------------------------------------------------------------------------

SCRIPT = """
import sys
import anygauge

try:
    anygauge.train(sys.argv[1], devices=2, **{"train.steps": 100000})
except KeyboardInterrupt as error:
    print("INTERRUPTED", error)
"""


@pytest.mark.slow
def test_ctrl_c_keeps_a_checkpoint_and_leaves_no_process(desk: Path, tmp_path: Path) -> None:
    path = run_file(tmp_path, model={"name": str(desk / "base")}, checkpoint={"every": 50000})
    process = begin("-c", SCRIPT, path, program=(sys.executable,))
    folder = tmp_path / "out/tiny"
    try:
        until(lambda: (folder / "metrics.jsonl").exists(), "a step")
        started = (folder / "logs/supervisor.log").read_text().splitlines()
        pids = [int(line.rpartition("process ")[2].split()[0]) for line in started]
        assert len(pids) == 2 and all(map(alive, pids))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        end(process)
    assert process.returncode == 0, err
    (said,) = (line for line in out.splitlines() if line.startswith("INTERRUPTED"))
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert f"checkpoint: {checkpoint}" in said and (checkpoint / "checkpoint.json").is_file()
    assert not any(map(alive, pids))
