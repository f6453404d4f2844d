"""How the cost of a job's coordinator grows with the agents that join it.

    python -m benchmarks.growth_agents --agents 1,10,100,300,1000

The coordinator is the real agent of node 0, a process of its own, with one rank that sleeps. The
agents of the other nodes are simulated: they are this process's own `WorkerNode` and `Link`
objects, which send what real agents send, over real connections of this machine. They have no
ranks, and all of them share one thread. So the coordinator's figures are those of a job of as many
machines, and the wall times are upper bounds: the agents compete with it for the processors.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import random
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from anygauge.agent.foreign import scrub
from anygauge.agent.link import Hello, Link, WorkerHandshake
from anygauge.agent.nodes import HEARTBEAT_S, Instruction, Outbox, WorkerNode
from anygauge.agent.outcome import NodeReport
from anygauge.interface import Job, LaunchSettings
from anygauge.util.files import write_text
from benchmarks.errors import BenchmarkError
from benchmarks.growth import growth_table, usage_of
from benchmarks.processes import free_port

TOKEN = "of this benchmark alone"
ASK_S, TURN_S = 0.02, 0.2
"""Seconds between two looks at a connection: before the start and after it, as real agents do."""
PATIENCE_S = 120.0
RANK = "import time; time.sleep(3600)"
WAITING = "waiting for the other nodes"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentGrowth:
    """What one number of agents costs the coordinator.

    Attributes:
        agents: nodes that join it.
        join_s, join_cpu_s: from the first connection until every agent has been given the start.
        idle_cpu: processor seconds per second while every node is idle.
        sent, received: bytes per agent and second meanwhile, without the headers of TCP.
        end_s: from the request to end until the coordinator's process has ended.
        status: its exit status.
    """

    agents: int
    join_s: float
    join_cpu_s: float
    idle_cpu: float
    sent: float
    received: float
    descriptors: int
    threads: int
    memory: int
    end_s: float
    status: int


class CountedSocket(socket.socket):
    """A socket that counts the bytes of all of its kind."""

    sent = received = 0

    def send(self, data: Any, flags: int = 0) -> int:
        """See `socket.send`."""
        count = super().send(data, flags)
        CountedSocket.sent += count
        return count

    def recv(self, size: int, flags: int = 0) -> bytes:
        """See `socket.recv`."""
        found = super().recv(size, flags)
        CountedSocket.received += len(found)
        return found


class SimulatedNode(WorkerNode):
    """A worker that has joined already: `WorkerNode` itself waits for the start, and blocks."""

    def __init__(
        self, job: Job, outbox: Outbox, own: Hello, link: Link, start: Mapping[str, Any]
    ) -> None:
        self._given = link, start
        self.rank, self.host = own.node_rank, own.host
        super().__init__(job, outbox, own, ("", 0))
        self._heartbeat_at -= random.random() * HEARTBEAT_S  # machines are not in step

    def _join(self, coordinator: tuple[str, int], requests: Sequence[object]) -> Link:
        link, start = self._given
        self._compare_clocks(start)
        return link


def joined(job: Job, port: int, outbox: Outbox) -> list[SimulatedNode]:
    """The agents of all nodes but the first, once each has been given the start.

    Raises:
        BenchmarkError: the coordinator closed a connection, or was not done in time.
    """
    waiting: list[tuple[WorkerHandshake, Hello]] = []
    nodes: list[SimulatedNode] = []
    deadline = time.monotonic() + PATIENCE_S
    for rank in range(1, job.launch.nodes):
        connected = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        link = Link(CountedSocket(fileno=connected.detach()), "the coordinator")
        own = Hello(node_rank=rank, nodes=job.launch.nodes, devices_per_node=1, host=f"n{rank}")
        join = {"clock": time.time(), "hello": asdict(own)}
        waiting.append((WorkerHandshake(link, job.token, join), own))
    while waiting:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{len(waiting)} agents have not joined in {PATIENCE_S:g} s")
        time.sleep(ASK_S)
        for pair in list(waiting):
            handshake, own = pair
            message, link = handshake.advance(), handshake.link
            if link.closed or (message is not None and message["kind"] == "refused"):
                raise BenchmarkError(f"{own.host} could not join: {link.why or message}")
            if message is not None and message["kind"] == "start":
                waiting.remove(pair)
                nodes.append(SimulatedNode(job, outbox, own, link, message))
    return nodes


def until(nodes: Sequence[SimulatedNode], head: subprocess.Popen[bytes], deadline: float) -> None:
    """Do what agents do until a time (monotonic seconds), or until the coordinator has ended."""
    with selectors.EpollSelector() as selector:
        for node in nodes:
            node.attach(selector)
        began = time.monotonic()
        due = [(began + TURN_S * place / len(nodes), place) for place in range(len(nodes))]
        while (now := time.monotonic()) < deadline and head.poll() is None:
            ready = [key.data for key, _ in selector.select(max(0, due[0][0] - now))]
            while due[0][0] <= time.monotonic():
                at, place = due[0]
                heapq.heapreplace(due, (at + TURN_S, place))
                ready.append(nodes[place])
            for node in ready:
                for instruction in node.poll():
                    if instruction is Instruction.STOP:
                        end = {"signalled_at": time.time(), "signum": node.signum}
                        node.report(NodeReport(node_rank=node.rank, host=node.host, **end))
                if node.over:
                    node.close()


@contextlib.contextmanager
def coordinator(
    job: Job, folder: Path, port: int, open_files: int
) -> Iterator[subprocess.Popen[bytes]]:
    """The agent of node 0, once it waits for the others; ended at the exit.

    Raises:
        BenchmarkError: it ended instead.
    """
    path = folder / "job.json"
    write_text(path, job.dump(), 0o600)
    argv = [sys.executable, "-m", "benchmarks.growth_agents", "--job", str(path)]
    argv += ["--coordinator", f"127.0.0.1:{port}"]
    log = folder / "logs" / "agent0.log"
    head = subprocess.Popen(
        ["prlimit", f"--nofile={open_files}:", *argv],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (log.is_file() and WAITING in log.read_text()):
            if head.poll() is not None or time.monotonic() > deadline:
                said = log.read_text() if log.is_file() else ""
                raise BenchmarkError(f"the coordinator does not wait for agents: {said[-1000:]}")
            time.sleep(0.02)
        yield head
    finally:
        if head.poll() is None:
            head.kill()
        head.communicate()


def measured(agents: int, idle_s: float, open_files: int) -> AgentGrowth:
    """Join, be idle for some seconds, and end.

    Args:
        open_files: the coordinator's limit of open files, unless it raises it.
    """
    with tempfile.TemporaryDirectory(prefix="growth-") as scratch:
        folder, port = Path(scratch), free_port()
        job = Job(
            name="growth",
            run_directory=scratch,
            run_file=str(folder / "run.json"),
            backend="cpu",
            launch=LaunchSettings(nodes=agents + 1, join_timeout_s=PATIENCE_S),
            rendezvous="file:///nowhere",
            token=TOKEN,
        )
        outbox = Outbox(os.open(os.devnull, os.O_WRONLY))
        with coordinator(job, folder, port, open_files) as head:
            began, before = time.monotonic(), usage_of(head.pid)
            nodes = joined(job, port, outbox)
            join_s, after = time.monotonic() - began, usage_of(head.pid)
            until(nodes, head, time.monotonic() + 2)  # its rank starts meanwhile
            quiet, moved = usage_of(head.pid), (CountedSocket.sent, CountedSocket.received)
            idle_from = time.monotonic()
            until(nodes, head, idle_from + idle_s)
            took, idle = time.monotonic() - idle_from, usage_of(head.pid)
            heard = CountedSocket.sent - moved[0], CountedSocket.received - moved[1]
            asked = time.monotonic()
            head.send_signal(signal.SIGTERM)
            until(nodes, head, asked + PATIENCE_S)
            if head.poll() is None:
                raise BenchmarkError(f"the coordinator has not ended in {PATIENCE_S:g} s")
            return AgentGrowth(
                agents=agents,
                join_s=join_s,
                join_cpu_s=after.cpu_s - before.cpu_s,
                idle_cpu=(idle.cpu_s - quiet.cpu_s) / took,
                sent=heard[1] / took / agents,
                received=heard[0] / took / agents,
                descriptors=idle.descriptors,
                threads=idle.threads,
                memory=idle.memory,
                end_s=time.monotonic() - asked,
                status=head.wait(),
            )


COLUMNS: Mapping[str, tuple[str, float, str]] = {
    "agents": ("agents", 1, ",.0f"),
    "join_s": ("all joined after, s", 1, ".2f"),
    "join_cpu_s": ("CPU s of joining", 1, ".3f"),
    "idle_cpu": ("CPU s per s, idle", 1, ".4f"),
    "sent": ("bytes to each agent per s", 1, ".0f"),
    "received": ("from each", 1, ".0f"),
    "descriptors": ("descriptors", 1, ",.0f"),
    "threads": ("threads", 1, ".0f"),
    "memory": ("memory, MiB", 2**-20, ".1f"),
    "end_s": ("ended after, s", 1, ".2f"),
}


def main(
    agents: Annotated[str, typer.Option(help="Numbers.")] = "1,10,100,300,1000",
    idle_s: Annotated[float, typer.Option(min=1)] = 10,
    output: Annotated[Path, typer.Option(help="A JSON file.")] = Path("runs/growth_agents.json"),
) -> None:
    """Measure the coordinator of each number of agents."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one for each agent, here too
    rows = [asdict(measured(count, idle_s, soft)) for count in map(int, agents.split(","))]
    Console(highlight=False, soft_wrap=True).print(growth_table(COLUMNS, rows), markup=False)
    write_text(output, json.dumps({"open_files": soft, "rows": rows}, indent=2) + "\n")


def _be_coordinator() -> int:
    from anygauge.agent.__main__ import main as agent

    return agent(
        sys.argv[1:],
        rank_argv=(sys.executable, "-S", "-c", RANK),
        rank_environment=lambda local_rank: scrub(os.environ),
    )


if __name__ == "__main__":
    if "--job" in sys.argv:
        sys.exit(_be_coordinator())
    typer.run(main)
