"""A job of several nodes in this process: real agents over fake ranks, by a clock of their own."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from anygauge.interface import Job
from anygauge.launch import attempt, channel, nodes, other_nodes, rank_process, supervisor
from anygauge.launch.watchdog import ProcessSample
from anygauge.util.processes import END_AT_ONCE
from tests.helpers.jobs import make_job

TURN_S = 0.2
GRACE_S = 1.0
LIMIT_S = 20.0
"""The job's `collective_timeout_s`; more than any other of its limits, which are defaults."""


class FakeClock:
    """Time that passes when it is told to."""

    now = 1000.0
    wall_ahead_s = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + self.wall_ahead_s

    def strftime(self, form: str) -> str:
        return f"{self.now:.1f}"


class FakeRank(rank_process.RankProcess):
    """One rank without a process.

    Attributes:
        written: events that its agent has not read.
        exit_code: once it has ended.
        on_term: the events that it writes and the code it ends with at SIGTERM; None: it is deaf.
        deaf: to `END_AT_ONCE`, too.
    """

    def __init__(
        self, _: Any, environment: Mapping[str, str], *__: Any, idle_limit_s: float, **___: Any
    ) -> None:
        self.rank, self.local_rank = int(environment["RANK"]), int(environment["LOCAL_RANK"])
        self.log = self.result = Path("/nowhere/log")
        self.log_offset = 0
        self._begin(idle_limit_s)
        self.exit_code: int | None = None
        self.deaf = False
        self.written: list[dict[str, Any]] = []
        self.on_term: tuple[list[dict[str, Any]], int] | None = ([], -signal.SIGTERM)
        self.state, self.cpu_s = "S", 0.0
        self._process: Any = types.SimpleNamespace(pid=4000 + self.rank, wait=self._wait)
        self.recorded = ""

    @property
    def ended(self) -> bool:
        return self.exit_code is not None

    def write(self, event: str, **fields: Any) -> None:
        """Report to its agent."""
        self.written.append({"event": event, "time": supervisor.time.time(), **fields})

    def exit(self, code: int) -> None:
        """End, unless it has."""
        self.exit_code = code if self.exit_code is None else self.exit_code

    def write_result(self, outcome: str, host: str) -> None:
        with mock.patch.object(rank_process, "write_text") as written:
            super().write_result(outcome, host)
        self.recorded = json.loads(written.call_args.args[1])["state"]

    def _read(self) -> list[tuple[dict[str, Any], bytes]]:
        events, self.written = self.written, []
        for event in events:
            self._take_event(event)
        return [(event, json.dumps(event).encode() + b"\n") for event in events]

    def _sample(self) -> ProcessSample:
        return ProcessSample(self.cpu_s, self.state, exiting=self.ended)

    def _has_exited(self) -> bool:
        return self.ended

    def _wait(self, timeout: float | None = None) -> int:
        if self.exit_code is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self.exit_code

    def _signal_group(self, signum: int) -> None:
        if signum == signal.SIGKILL:
            self.exit(-signum)
        elif self.ended or self.state == "T":
            return
        elif signum == END_AT_ONCE and not self.deaf:
            self.exit(-signum)
        elif signum == signal.SIGTERM and self.on_term is not None:
            for event in self.on_term[0]:
                self.write(**event)
            self.exit(self.on_term[1])

    def _close(self) -> None:
        pass


class SimulatedAgent:
    """What an agent's process does once the nodes have met."""

    def __init__(self, job: Job, node: int, made: nodes.Nodes) -> None:
        self.node, self.nodes = node, made
        self.requests = attempt.Requests()
        self.running = True
        """Neither killed nor stopped, as by SIGSTOP."""
        self.killed = False
        self.status: int | None = None
        self._supervisor = supervisor.Supervisor(
            job,
            made,
            node_rank=node,
            hostname=f"host{node}",
            rank_argv=lambda *_: (),
            rank_environment=lambda local_rank: {},
            grace_s=GRACE_S,
            requests=self.requests,
        )
        self._turns = self._supervisor.turns()
        self.turn()

    @property
    def ranks(self) -> list[FakeRank]:
        return self._supervisor._attempt.ranks  # type: ignore[return-value]

    def turn(self) -> None:
        """One turn of its supervisor."""
        if self.running and self.status is None and next(self._turns, self) is self:
            assert self.nodes.outcome is not None
            self.status = self.nodes.outcome.exit_status

    def kill(self) -> None:
        """SIGKILL: its ranks die with it."""
        self.running, self.killed = False, True
        for one in self.ranks:
            one.exit(-signal.SIGKILL)
        for each in self.nodes._channels.values():
            each.close("it was killed")


class Simulation:
    """A job that has just begun on all its nodes."""

    def __init__(
        self, nodes_count: int, devices: int, *, joins_every_s: float = 0.0, **launch: Any
    ) -> None:
        self._held = contextlib.ExitStack()
        self.clock = FakeClock()
        patch = self._held.enter_context
        for module in (supervisor, attempt, nodes, other_nodes, channel, rank_process):
            patch(mock.patch.object(module, "time", self.clock))
        patch(mock.patch.object(supervisor, "RankProcess", FakeRank))
        self.outboxes: dict[int, types.SimpleNamespace] = {}
        self.events: dict[int, list[dict[str, Any]]] = {node: [] for node in range(nodes_count)}
        job = make_job(
            **{"run_directory": "/nowhere", "nodes": nodes_count, "devices": devices},
            **{"collective_timeout_s": LIMIT_S, "max_restarts": 0, **launch},
        )
        met = self._met(job, joins_every_s)
        self.agents = [SimulatedAgent(job, node, made) for node, made in enumerate(met)]

    def _outbox(self, node: int) -> Any:
        def send(event: str, **fields: Any) -> None:
            self.events[node].append({"event": event, **fields})

        found = types.SimpleNamespace(is_full=False, shared=False, forward=bytes, send=send)
        self.outboxes[node] = found
        return found

    def _met(self, job: Job, every_s: float) -> list[nodes.Nodes]:
        """The nodes, which have joined one after the other."""
        to_workers: dict[int, channel.Channel] = {}
        workers: list[nodes.Nodes] = []
        for node in range(1, job.launch.nodes):
            self.clock.now += every_s
            ends = [channel.Channel(end, "the coordinator") for end in socket.socketpair()]
            ends[0].peer = f"node {node} (host{node})"
            to_workers[node] = ends[0]
            workers.append(other_nodes.Worker(job, self._outbox(node), ends[1], "tcp://host0:1"))
        if not workers:
            return [nodes.Nodes(job, self._outbox(0))]
        hosts = {node: f"host{node}" for node in range(job.launch.nodes)}
        first = other_nodes.Coordinator(job, self._outbox(0), to_workers, hosts, "127.0.0.1")
        return [first, *workers]

    @property
    def ranks(self) -> list[FakeRank]:
        """All of them, by their numbers."""
        return [one for agent in self.agents for one in agent.ranks]

    def turns(self, count: int = 1, seconds: float = TURN_S) -> None:
        """Let so many turns of every agent pass."""
        for _ in range(count):
            self.clock.now += seconds
            for agent in self.agents:
                agent.turn()

    def request(self, node: int, signum: int = signal.SIGTERM) -> None:
        """A signal to an agent."""
        self.agents[node].requests.received.append((signum, self.clock.now))

    @property
    def over(self) -> bool:
        """Whether each agent that runs has come to its end."""
        return all(agent.status is not None for agent in self.agents if agent.running)

    def run(self, within_s: float = 200.0) -> None:
        """Until all is over."""
        until = self.clock.now + within_s
        while not self.over:
            assert self.clock.now < until, "an agent does not come to an end"
            self.turns(seconds=1.0)

    def outcome(self, node: int = 0) -> dict[str, Any]:
        """What an agent reported at its end, once."""
        (ended,) = [event for event in self.events[node] if event["event"] == "ended"]
        assert ended["exit_status"] == self.agents[node].status
        return ended

    def close(self) -> None:
        for agent in self.agents:
            agent.nodes.close()
        self._held.close()
