"""Ranks that are forks of one process: real processes, without torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from anygauge.agent.forks import ForkError, ForkServer, prepare_order
from anygauge.agent.rank import RankProcess
from anygauge.util.processes import adopt_orphans
from tests.agent.fake_agent import FORKED
from tests.agent.fakes import FINISHED, FOREVER, PATIENCE_S, alive, read_pid, until, write_script
from tests.agent.test_supervisor import AgentRun
from tests.agent.test_supervisor import run as run

MODULE = "tests.agent.fake_forked"

Serve = Callable[..., ForkServer]


def order(imports: list[Any], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    given = os.environ if environment is None else environment
    return prepare_order(given, json.dumps(imports), "cpu", {})


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server whose imports do something, and wait until it has done so."""
    servers = []

    def started(*imports: Any) -> ForkServer:
        servers.append(ForkServer(None, order(list(imports)), module=MODULE))
        assert servers[-1].settled(PATIENCE_S)
        return servers[-1]

    yield started
    for server in servers:
        server.close()


def rank_of(server: ForkServer, folder: Path, *actions: Any, **given: Any) -> RankProcess:
    script = write_script(folder, {3: actions})
    environment = {**os.environ, "RANK": "3", **given.pop("environment", {})}
    argv = [sys.executable, "-m", "tests.agent.fake_rank", str(script)]
    return RankProcess(3, 0, argv, environment, folder, forks=server, **given)


def ended(rank: RankProcess) -> int | None:
    until(lambda: rank.poll_exit(time.time()), "the rank's end")
    list(rank.read_events())
    rank.reap()
    return rank.code


def variables(rank: RankProcess) -> dict[str, str]:
    """What its Python has; the kernel shows those of the server."""
    return dict(line.split("=", 1) for line in rank.log.read_text().splitlines() if "=" in line)


# -- what a rank is ---------------------------------------------------------------------------


def test_a_rank_is_a_child_of_its_agent_and_leads_a_session(serve: Serve, tmp_path: Path) -> None:
    rank = rank_of(serve(), tmp_path, FOREVER)
    until((tmp_path / "pid3").exists, "the rank")
    fields = Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()
    assert list(map(int, fields[1:4])) == [os.getpid(), rank.pid, rank.pid]
    assert Path(f"/proc/{rank.pid}/comm").read_text() == "rank3\n"
    rank.signal(signal.SIGKILL)
    assert ended(rank) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("action", "code"),
    [(["exit", 7], 7), (["leave", "a text"], 1), (["die", signal.SIGSEGV], -11), (["sleep", 0], 0)],
)
def test_its_exit_code_is_that_of_a_process(
    serve: Serve, tmp_path: Path, action: list[Any], code: int
) -> None:
    assert ended(rank_of(serve(), tmp_path, action)) == code


def test_it_reports_events_and_writes_its_log_after_what_imports_printed(
    serve: Serve, tmp_path: Path
) -> None:
    server = serve(["print", "from an import"])
    rank = rank_of(server, tmp_path, ["print", "from the rank"], FINISHED)
    assert ended(rank) == 0
    assert rank.finished_at is not None
    assert rank.log.read_text() == "from an import\nfrom the rank\n"


def test_its_end_waits_for_threads_and_runs_handlers(serve: Serve, tmp_path: Path) -> None:
    rank = rank_of(serve(), tmp_path, ["leave", 5])
    assert ended(rank) == 5
    assert rank.log.read_text() == "of a thread\nat the end\n"


def test_an_error_is_a_traceback_in_its_log(serve: Serve, tmp_path: Path) -> None:
    rank = rank_of(serve(), tmp_path, ["fail", "a reason"])
    assert ended(rank) == 1
    text = rank.log.read_text()
    assert text.startswith("Traceback") and text.endswith("RuntimeError: a reason\n")


def test_it_has_its_own_variables_and_those_that_imports_set(serve: Serve, tmp_path: Path) -> None:
    server = serve(["set", {"SET_BY_AN_IMPORT": "1"}], ["unset", "PYTHONUNBUFFERED"])
    own = {"ITS_OWN": "2"}
    rank = rank_of(server, tmp_path, ["variables", None], environment=own)
    assert ended(rank) == 0
    found = variables(rank)
    assert (found["SET_BY_AN_IMPORT"], found["ITS_OWN"], found["RANK"]) == ("1", "2", "3")
    assert "PYTHONUNBUFFERED" not in found, "an import has removed it"
    assert "ANYGAUGE_PARENT_PID" not in found


def test_it_has_no_descriptor_of_the_server(serve: Serve, tmp_path: Path) -> None:
    with (tmp_path / "socket").open("w") as listener:
        rank = rank_of(serve(), tmp_path, FOREVER, listener=listener.fileno())
        until((tmp_path / "pid3").exists, "the rank")
        log = str(rank.log).replace(str(tmp_path), "")
        wanted = sorted(["/dev/null", log, log, "/socket", "pipe"])
        # It may still be reading what to do.
        until(lambda: opened_by(rank.pid, tmp_path) == wanted, f"these alone to be open: {wanted}")
    rank.abandon()


def opened_by(pid: int, folder: Path) -> list[str]:
    """What a process has open: kinds, and files within a folder."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(descriptor.readlink()).partition(":")[0].replace(str(folder), ""))
    return sorted(found)


# -- when it refuses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (["thread", None], "libraries started threads"),
        (["open", "/dev/ptmx"], "libraries opened devices: /dev/pt"),
        (["raise", "no such library"], "ImportError: no such library"),
        (["exit", 3], "it ended while it imported"),
    ],
)
def test_a_server_that_must_not_be_forked_refuses(
    serve: Serve, tmp_path: Path, action: list[Any], why: str
) -> None:
    server = serve(action)
    with pytest.raises(ForkError, match=why):
        rank_of(server, tmp_path, FINISHED)


def test_a_server_that_has_died_gives_no_rank(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    server._process.kill()
    server._process.wait()
    with pytest.raises(ForkError, match="it gave no rank"):
        rank_of(server, tmp_path, FINISHED)


def test_without_forks_ranks_start_one_by_one(
    run: AgentRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORKED, '[["thread", null]]')
    end = run({0: [FINISHED], 1: [FINISHED]})
    assert end["state"] == "ok"
    assert "not forked, but started one by one: libraries started threads" in run.err
    assert "(a fork)" not in run.err


def test_it_serves_what_it_was_told_and_nothing_else(serve: Serve) -> None:
    server = serve()
    assert not server.serves(order([]))
    assert "cannot be forked" in server.serves(None)
    assert "another run" in server.serves(order([["print", "x"]]))
    other = server.serves(order([], {**os.environ, "OMP_NUM_THREADS": "77"}))
    assert other == "it has other variables: OMP_NUM_THREADS"


def test_a_variable_that_was_read_before_makes_it_unfit() -> None:
    begun = {**os.environ, "OMP_NUM_THREADS": "3"}
    for name, fits in (("OMP_NUM_THREADS", True), ("X_SOCKET_IFNAME", True), ("LD_X", False)):
        told = order([], {**begun, name: "1"})
        server = ForkServer(begun, module=MODULE)
        server.prepare(told)
        assert server.serves(told) == ("" if fits else f"it began with another value of {name}")
        server.close()


def test_nothing_is_loaded_before_the_environment_is_known_that_reads_it() -> None:
    code = (
        "import importlib, sys, anygauge.training.worker\n"
        "from anygauge.training.fork_server import PLAIN\n"
        "for name in PLAIN: importlib.import_module(name)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    late = {"torch", "numpy", "transformers", "tokenizers", "huggingface_hub", "accelerate"}
    assert not late & set(done.stdout.split())


def test_another_folder_makes_it_unfit(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    monkeypatch.chdir(tmp_path)
    assert server.serves(order([])).startswith("it began in ")


# -- its end ----------------------------------------------------------------------------------


def test_it_ends_when_it_is_closed_and_its_ranks_do_not(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    rank = rank_of(server, tmp_path, FOREVER)
    server.close()
    assert not alive(server._process.pid)
    assert alive(rank.pid)
    rank.abandon()
    assert not alive(rank.pid)


def test_one_that_imports_ends_at_once() -> None:
    server = ForkServer(None, order([["sleep", 600]]), module=MODULE)
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < PATIENCE_S / 2
    assert not alive(server._process.pid)


OWNER = """
import json, os, sys, time
from pathlib import Path
from tests.agent.test_forks import ForkServer, MODULE, order, rank_of
imports, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
server = ForkServer(None, order(imports), module=MODULE)
(folder / "server.new").write_text(str(server._process.pid))
(folder / "server.new").rename(folder / "server")
if not imports:
    server.settled(60)
    rank_of(server, folder, ["sleep", 600])
time.sleep(600)
"""


@pytest.mark.parametrize("imports", [[], [["sleep", 600]]])
def test_nothing_outlives_an_agent_that_is_killed(tmp_path: Path, imports: list[Any]) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, json.dumps(imports), str(tmp_path)])
    names = ["server"] if imports else ["server", "pid3"]
    for name in names:
        until((tmp_path / name).exists, name)
    pids = [read_pid(tmp_path / name) for name in names]
    owner.kill()
    owner.wait()
    until(lambda: not any(map(alive, pids)), "their end")


def test_a_request_to_end_while_it_imports_ends_all(
    run: AgentRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORKED, '[["sleep", 600]]')
    agent = run.start({0: [FINISHED], 1: [FINISHED]})
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    until(lambda: children.read_text().split(), "the server")
    (server,) = map(int, children.read_text().split())
    agent.terminate()
    assert run.end()["state"] == "cancelled"
    assert not alive(server)


def test_orphans_come_to_this_process_only_while_it_forks(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    rank = rank_of(server, tmp_path, FINISHED)
    ended(rank)
    server.close()
    script = "import os, time; os.fork() and os._exit(0); time.sleep(0.2); print(os.getppid())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert int(done.stdout) != os.getpid()
    assert adopt_orphans(False)
