"""Processes in a moment: forks of one that has imported everything (a zygote, as browsers call it).

Importing torch, transformers, peft and DeepSpeed takes a processor ten seconds; forking a process
that has them takes none. A test runner has threads and must not fork, so the zygote is a process of
its own: one for each test process, started when it is first needed, ended with its owner.

What a process does before or while it imports needs a new one: tests of agents, of environments
and of the command line start those.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from anygauge.util.processes import tie_to_parent

ROOT = Path(__file__).parents[2]
START_S = 300.0
"""Seconds that the imports may take on a busy machine."""
LATE_S = 60.0
EARLY = ("PYTHON", "HF_", "ANYGAUGE_")
"""How variables begin that Python reads when it starts, or a module when it is imported."""
FORK_SAFE = {"jemalloc_bg_thd"}
"""A thread of pyarrow's allocator, which takes care of forks itself."""
POLL_S = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """One process to run, as ``python -m module arguments``.

    Attributes:
        log: file for what it prints.
        errors: file for what it prints as errors; None for the same.
        environment: over that of the caller.
    """

    module: str
    arguments: Sequence[str]
    log: str
    errors: str | None = None
    folder: str = str(ROOT)
    environment: Mapping[str, str] = field(default_factory=dict)


def run_forks(forks: Sequence[Fork], *, timeout_s: float) -> list[int]:
    """Run processes at once, and wait for them; after so long they are killed.

    Returns:
        Exit codes as `subprocess` has them.
    """
    return zygote().run(forks, timeout_s)


def is_early(environment: Mapping[str, str]) -> bool:
    """Whether a fork would come too late for an environment: it differs in what imports read."""
    now = {**os.environ, **environment}
    names = {name for name in (*now, *zygote().environment) if name.startswith(EARLY)}
    return any(now.get(name) != zygote().environment.get(name) for name in names)


@functools.cache
def zygote() -> Zygote:
    """The one of this process."""
    started = Zygote()
    atexit.register(started.close)
    return started


class Zygote:
    """The owner's side.

    Attributes:
        environment: the owner's when it started.
    """

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self._channel, theirs = socket.socketpair()
        self._lines = self._channel.makefile("r", encoding="utf-8")
        # Written by a process that this one outlives.
        self._log = tempfile.NamedTemporaryFile(prefix="zygote-", suffix=".log")  # noqa: SIM115
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.zygote", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "ANYGAUGE_BLOCK_PLUGINS": ""},
            )
        self._answer(START_S)

    def run(self, forks: Sequence[Fork], timeout_s: float) -> list[int]:
        """See `run_forks`."""
        common = {**os.environ, "OMP_NUM_THREADS": "1"}
        asked = [{**asdict(f), "environment": {**common, **f.environment}} for f in forks]
        line = json.dumps({"forks": asked, "timeout_s": timeout_s}) + "\n"
        self._channel.settimeout(LATE_S)
        self._channel.sendall(line.encode())
        codes: list[int] = self._answer(timeout_s + LATE_S)
        return codes

    def close(self) -> None:
        """End it, with what it still runs."""
        self._lines.close()
        self._channel.close()
        try:
            self._process.wait(timeout=LATE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=LATE_S)
        self._log.close()

    def _answer(self, within_s: float) -> Any:
        self._channel.settimeout(within_s)
        line = self._lines.readline()
        assert line, f"the zygote ended:\n{Path(self._log.name).read_text()[-3000:]}"
        return json.loads(line)


# -- the zygote's side ------------------------------------------------------------------------


def preload() -> None:
    """Import and make what ranks will need, without starting a thread."""
    import peft
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import anygauge.strategies.zero.engine
    import anygauge.training.save
    import anygauge.training.setup  # noqa: F401
    from anygauge import open_backend
    from anygauge.strategies.zero.deepspeed_runtime import import_deepspeed

    import_deepspeed(open_backend("cpu"))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    config = AutoConfig.for_model("llama", num_attention_heads=1, num_key_value_heads=1, **sizes)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        # The libraries' tables of all architectures are made with a process's first model.
        peft.get_peft_model(
            AutoModelForCausalLM.from_config(config), peft.LoraConfig(target_modules="all-linear")
        )
    # Else every fork's first collection of garbage looks at all of this, and so copies it.
    gc.collect()
    gc.freeze()


def threads() -> list[str]:
    """Names of all threads but the main one, those of libraries included."""
    folders = [p for p in Path("/proc/self/task").iterdir() if p.name != str(os.getpid())]
    return [(folder / "comm").read_text().strip() for folder in folders]


def main(descriptor: int) -> None:
    channel = socket.socket(fileno=descriptor)
    preload()
    others = set(threads()) - FORK_SAFE
    assert not others and threading.active_count() == 1, f"with threads it must not fork: {others}"
    channel.sendall(b"{}\n")
    for line in channel.makefile("r", encoding="utf-8"):
        asked = json.loads(line)
        deadline = time.monotonic() + asked["timeout_s"]
        pids = [started(channel, Fork(**fork)) for fork in asked["forks"]]
        codes = waited(channel, pids, deadline)
        channel.sendall((json.dumps(codes) + "\n").encode())


def waited(channel: socket.socket, pids: Sequence[int], deadline: float) -> list[int]:
    """Exit codes; all are killed at the deadline, or when the owner has gone."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        # The owner says nothing while it waits: what can be read then is its end.
        gone = bool(select.select([channel], [], [], POLL_S)[0])
        for pid in pids:
            if pid in codes:
                continue
            if gone or time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
    return [codes[pid] for pid in pids]


def started(channel: socket.socket, fork: Fork) -> int:
    """Start a process; returns its id, which is its group's, too."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        tie_to_parent(signal.SIGKILL, parent)
        channel.close()
        become(fork)
    # Both sides do it, so that neither is too early; here it may be over.
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    return pid


def become(fork: Fork) -> NoReturn:
    """Run a module in this process, as a new process would, and end."""
    status = 1
    try:
        for descriptor, path in ((1, fork.log), (2, fork.errors or fork.log)):
            written = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
            os.dup2(written, descriptor)
            os.close(written)
        os.chdir(fork.folder)
        os.environ.clear()
        os.environ.update(fork.environment)
        sys.argv = [fork.module, *fork.arguments]
        runpy.run_module(fork.module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))
