"""Ranks and agents end, die, hang or are asked in any order: one outcome, and its first cause."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from anygauge.interface import LOST, STOPPED
from anygauge.util.processes import END_AT_ONCE
from tests.launch.simulated import GRACE_S, LIMIT_S, TURN_S, FakeRank, Simulation

BROKEN = {"error": "RuntimeError", "message": "Connection closed by peer"}
CHECKPOINT = {"event": "stopped", "step": 7, "checkpoint": "/run/step-7"}
NODES, DEVICES = 3, 2
NUMBERS = st.integers(0, NODES * DEVICES - 1)
AGENTS = st.integers(0, NODES - 1)

CODES = {
    0: "exit status 0, but its work was not finished",
    7: "exit status 7",
    -signal.SIGKILL: "signal 9.*out of memory",
    -signal.SIGSEGV: "SIGSEGV",
}


def named(number: int, words: str = "") -> str:
    """A rank and what it did, as an expression."""
    return f"rank {number} on host{number // DEVICES}" + (f" .*{words}" if words else "")


class AnyOrder(RuleBasedStateMachine):
    """What happens to a job of three nodes with two ranks each; `first` must be its outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.job = Simulation(NODES, DEVICES)
        self.first: tuple[str, int, str] | None = None
        """State, exit status and the cause, as an expression."""
        self.finished: set[int] = set()

    @initialize(
        saving=st.booleans(),
        deaf=st.sets(NUMBERS, max_size=2),
        deaf_to_term=st.sets(NUMBERS, max_size=1),
    )
    def begin(self, saving: bool, deaf: set[int], deaf_to_term: set[int]) -> None:
        self.job.turns(8)
        for rank in self.job.ranks:
            rank.deaf = rank.rank in deaf
            if saving:
                rank.on_term = ([CHECKPOINT], STOPPED)
            if rank.rank in deaf_to_term:
                rank.on_term = None

    def because(self, state: str, status: int, cause: str) -> None:
        self.first = self.first or (state, status, cause)

    def running(self, number: int) -> FakeRank | None:
        rank = self.job.ranks[number]
        return None if rank.ended or rank.state == "T" else rank

    @rule(number=NUMBERS, crashes=st.booleans())
    def finishes(self, number: int, crashes: bool) -> None:
        if rank := self.running(number):
            rank.write("finished")
            rank.exit(-signal.SIGSEGV if crashes else 0)
            self.finished.add(number)
            if crashes:
                self.because("failed", 1, named(number, "SIGSEGV.*, after it had finished"))
            elif len(self.finished) == NODES * DEVICES:
                self.because("ok", 0, "")
        self.job.turns()

    @rule(number=NUMBERS, code=st.sampled_from([*CODES]))
    def dies(self, number: int, code: int) -> None:
        if rank := self.running(number):
            rank.exit(code)
            self.because("failed", 1, named(number, CODES[code]))
        self.job.turns()

    @rule(killed=NUMBERS, peer=NUMBERS, aborts=st.booleans())
    def breaks_a_connection(self, killed: int, peer: int, aborts: bool) -> None:
        """One dies and another reports it, before an agent looks; an abort comes of a report."""
        one, other = self.running(killed), self.running(peer)
        if one and other and one is not other:
            one.exit(-signal.SIGABRT if aborts else -signal.SIGKILL)
            other.write("failed", **BROKEN)
            words = named(peer, BROKEN["message"]) if aborts else named(killed, "signal 9")
            self.because("failed", 1, words)
        self.job.turns()

    @rule(number=NUMBERS, for_user=st.booleans())
    def reports_a_failure(self, number: int, for_user: bool) -> None:
        if rank := self.running(number):
            rank.write("failed", message="no", for_user=for_user, exit_status=2 if for_user else 1)
            words = rf"^no\n\({named(number)}\)$" if for_user else named(number, "failed with no")
            self.because("failed", 2 if for_user else 1, words)
        self.job.turns()

    @rule(number=NUMBERS)
    def stops_to_work(self, number: int) -> None:
        """As by SIGSTOP: the agent notices when its time is up."""
        if rank := self.running(number):
            rank.state = "T"
            self.job.turns(int((LIMIT_S + GRACE_S) * 1.6), seconds=1.0)
            words = "neither worked nor reported.*rank [0-5]: starting; stopped"
            self.because("failed", 1, named(number, words))
        self.job.turns()

    @rule(node=AGENTS, signum=st.sampled_from([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
    def is_requested_to_end(self, node: int, signum: int) -> None:
        if self.job.agents[node].status is None and self.job.agents[node].running:
            all_save = all(r.on_term and not r.ended and r.state != "T" for r in self.job.ranks)
            if all_save and self.job.ranks[0].on_term == ([CHECKPOINT], STOPPED):
                self.because("stopped", STOPPED, "after step 7; checkpoint: /run/step-7")
            self.because("cancelled", 128 + signum, f"ended by {signal.Signals(signum).name}")
            self.job.request(node, signum)
        self.job.turns(4)

    @precondition(lambda self: self.lost is None)
    @rule(node=AGENTS, silent=st.booleans())
    def loses_an_agent(self, node: int, silent: bool) -> None:
        self.job.turns(8)  # the others date a loss by the last heartbeat, a second before at most
        agent = self.job.agents[node]
        if agent.status is not None:
            return
        who = rf"node {node} \(host{node}\) is lost" if node else "the coordinator is lost"
        self.because("lost", LOST, who)
        if silent:
            agent.running = False
        else:
            agent.kill()
        self.job.turns()

    @property
    def lost(self) -> int | None:
        gone = [agent.node for agent in self.job.agents if not agent.running]
        return gone[0] if gone else None

    @rule(seconds=st.sampled_from([0.2, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.job.turns(int(seconds / TURN_S))

    def teardown(self) -> None:
        try:
            self.end()
        finally:
            self.job.close()

    def end(self) -> None:
        job, lost = self.job, self.lost
        if self.first is None:
            if self.finished:
                for rank in job.ranks:
                    rank.write("progress", doing="step 1")
                words = f"neither worked .* for {LIMIT_S + GRACE_S:g} s .*collective_timeout_s"
                self.because("failed", 1, words)
            else:
                self.is_requested_to_end(0, signal.SIGTERM)
        job.run()
        assert self.first is not None
        state, status, cause = self.first
        survivors = [agent for agent in job.agents if agent.running]
        for agent in survivors:
            ended = job.outcome(agent.node)
            found = (ended["state"], ended["exit_status"])
            if lost == 0 and found == ("lost", LOST):
                assert "the coordinator is lost" in ended["cause"]
                continue
            assert found == (state, status), (ended, self.first)
            assert re.search(cause, ended["cause"] or "", re.DOTALL), (ended, self.first)
        for agent in job.agents:
            if agent.running or agent.killed:
                assert all(rank.ended for rank in agent.ranks), "a rank is left"
            else:
                agent.running = True
                job.run()
                assert job.outcome(agent.node)["state"] in (state, "lost")
                assert all(rank.ended for rank in agent.ranks), "a rank is left"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=300, stateful_step_count=6, deadline=None)

Step = Callable[[Simulation], object]


def rank(number: int, *events: dict[str, Any], code: int | None = None, **changed: Any) -> Step:
    """What one rank reports, how it ends, and how it is from then on."""

    def step(job: Simulation) -> None:
        one = job.ranks[number]
        vars(one).update(changed)
        for event in events:
            one.write(**event)
        if code is not None:
            one.exit(code)

    return step


def failed(**fields: Any) -> dict[str, Any]:
    return {"event": "failed", **fields}


FINISHED = {"event": "finished"}
USER = failed(message="row 3 is empty", for_user=True, exit_status=2)
HANGS = "rank 1 on .*neither worked .*launch\\.collective_timeout_s.*"
WORDS: dict[str, tuple[list[Step], str]] = {
    "one that stays after its work": (
        [rank(0, FINISHED, code=0), rank(1, FINISHED)], HANGS + "rank 1: ending; idle for",
    ),
    "what each was doing": (
        [rank(0, {"event": "progress", "doing": "step 3, update"}), rank(1, state="T")],
        HANGS + r"rank 0: step 3, update.*rank 1: starting; stopped \(state T",
    ),
    "one that fails because another is stopped": (
        [rank(1, state="T"), rank(0, failed(message="Timed out waiting for recv"))],
        "rank 0 on .*Timed out .*rank 1: starting; stopped",
    ),
}  # fmt: skip


@pytest.fixture
def simulated() -> Iterator[Callable[..., Simulation]]:
    """Makes jobs, which end with the test."""
    jobs: list[Simulation] = []

    def make(*numbers: int, **launch: Any) -> Simulation:
        jobs.append(Simulation(*numbers, **launch))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.mark.parametrize("case", WORDS)
def test_the_outcome_in_words(case: str, simulated: Callable[..., Simulation]) -> None:
    steps, cause = WORDS[case]
    job = simulated(1, 2)
    for step in steps:
        step(job)
    job.run()
    ended = job.outcome()
    assert (ended["state"], ended["exit_status"]) == ("failed", 1), ended
    assert re.search(cause, ended["cause"], re.DOTALL), ended["cause"]


@pytest.mark.parametrize("event", [None, failed(message="hung teardown")], ids=["deaf", "failed"])
def test_what_does_not_end_at_once_is_killed(
    event: dict[str, Any] | None, simulated: Callable[..., Simulation]
) -> None:
    job = simulated(1, 2)
    rank(0, *([event] if event else []), deaf=True)(job)
    rank(1, code=None if event else 3)(job)
    began = job.clock.now
    job.turns(3)
    assert not job.ranks[0].ended
    job.run()
    assert GRACE_S <= job.clock.now - began < GRACE_S + 3
    assert job.ranks[0].code == -signal.SIGKILL
    assert job.ranks[1].code == (-END_AT_ONCE if event else 3)
    assert [one.recorded for one in job.ranks] == (
        ["failed", "stopped"] if event else ["stopped", "failed"]
    )


def test_only_a_second_request_takes_the_time_for_a_checkpoint(
    simulated: Callable[..., Simulation],
) -> None:
    job = simulated(2, 1)
    for number in (0, 1):
        rank(number, on_term=None)(job)
    job.request(1)
    job.request(1)  # a wrapper's double of the first
    job.turns(50)
    assert not any(one.ended for one in job.ranks)
    job.request(1)
    job.turns(5)
    assert [one.code for one in job.ranks] == [-signal.SIGKILL] * 2
    assert [one.recorded for one in job.ranks] == ["cancelled"] * 2
    assert job.outcome()["state"] == "cancelled"


def test_ranks_that_report_or_work_may_take_their_time(
    simulated: Callable[..., Simulation],
) -> None:
    """One saves, one has a single micro-batch for longer than the limit."""
    job = simulated(1, 2)
    rank(1, {"event": "progress", "doing": "step 1"})(job)
    for second in range(2 * int(LIMIT_S)):
        rank(0, {"event": "progress", "doing": "saving the result"})(job)
        rank(1, cpu_s=0.5 * second)(job)
        job.turns(seconds=1.0)
    for number in (0, 1):
        rank(number, FINISHED, code=0)(job)
    job.run()
    assert job.outcome()["state"] == "ok"
    assert not [event for event in job.events[0] if event["event"] == "progress"]


def test_restarts_come_to_an_end(simulated: Callable[..., Simulation]) -> None:
    job = simulated(2, 1, max_restarts=2)
    for attempt in range(3):
        assert not job.over and job.agents[1].nodes.restarts == attempt
        rank(1, code=7)(job)
        job.turns(20)
    assert job.outcome(1)["cause"] == job.outcome()["cause"]
    exits = [e["code"] for e in job.events[0] + job.events[1] if e["event"] == "rank_exited"]
    assert "exit status 7" in job.outcome()["cause"] and exits.count(-END_AT_ONCE) == 3


def test_an_error_of_the_user_is_not_tried_again(simulated: Callable[..., Simulation]) -> None:
    job = simulated(2, 1, max_restarts=5)
    rank(1, USER, code=2)(job)
    job.run()
    assert (job.outcome()["state"], job.outcome()["exit_status"]) == ("failed", 2)


def test_who_joins_early_is_not_lost_for_waiting(simulated: Callable[..., Simulation]) -> None:
    job = simulated(3, 1, lost_after_s=2.0, joins_every_s=5.0)
    for number in range(3):
        rank(number, FINISHED, code=0)(job)
    job.run()
    assert job.outcome()["state"] == "ok"


def test_a_wall_clock_that_is_set_back_ends_nothing(simulated: Callable[..., Simulation]) -> None:
    job = simulated(2, 1, lost_after_s=2.0)
    job.turns(8)
    job.clock.wall_ahead_s = -86_400.0
    job.turns(50)
    assert not any(one.ended for one in job.ranks)
    rank(1, code=7)(job)
    job.run()
    assert "rank 1 on host1 ended with exit status 7" in job.outcome()["cause"]
