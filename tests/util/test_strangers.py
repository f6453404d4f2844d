"""Who does not know the job's secret is not believed, though torch lets him join."""

from __future__ import annotations

import contextlib
import datetime
import queue
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from anygauge.interface import AnygaugeError
from anygauge.util.exchange import MAX_BYTES, SignedExchange, derived_key
from anygauge.util.rendezvous import file_of, listen_at, open_store, tcp_address
from tests.helpers.child_processes import free_port
from tests.util.meet_processes import opened, run_roles

needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(),
    reason="this build of torch has no gloo",
)


@needs_gloo
def test_who_joins_without_the_secret_is_refused_and_runs_no_code(tmp_path: Path) -> None:
    at = tcp_address("127.0.0.1", free_port())
    said, other = run_roles("honest", "stranger", at=at, folder=tmp_path)
    assert "what came from rank 1 (greeting) does not prove" in said, said
    assert other == "joined", other
    assert list(tmp_path.iterdir()) == []


class Pair(SignedExchange):
    """An exchange between two threads, in place of a process group.

    Attributes:
        seen: what this one sent, frame by frame.
        altered: number of a frame -> what is sent in its place.
    """

    def __init__(self, rank: int, queues: list[queue.Queue[bytes]], secret: str = "s") -> None:
        self._group, self._rank, self._size, self._count = None, rank, 2, 0
        self._queues = queues
        self._key = derived_key(secret, "test")
        self.seen: list[bytes] = []
        self.altered: dict[int, bytes] = {}

    def _all(self, own: bytes, size: int | None = None) -> list[bytes]:
        own = own.ljust(size or 0, b"\0")
        self.seen.append(own)
        own = self.altered.get(len(self.seen) - 1, own)
        self._queues[self._rank].put(own)
        other = self._queues[1 - self._rank].get(timeout=30)
        return [own, other] if self._rank == 0 else [other, own]


def talk(first: Any, second: Any, secret: str = "s") -> tuple[Pair, Any]:
    """Run what each of two ranks says; the first, and what it got or how it failed."""
    queues: list[queue.Queue[bytes]] = [queue.Queue(), queue.Queue()]
    pair = [Pair(0, queues), Pair(1, queues, secret)]
    results: list[Any] = [None, None]

    def run(rank: int, say: Any) -> None:
        try:
            results[rank] = say(pair[rank])
        except AnygaugeError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return pair[0], results[0]


def test_messages_of_any_length_arrive_whole() -> None:
    for mine, its in ((b"", b"x"), (b"longer", b""), (b"\0", b"\0\0")):
        _, got = talk(lambda e, m=mine: e.gather(m, "p"), lambda e, m=its: e.gather(m, "p"))
        assert got == [mine, its]


def test_each_frame_is_taken_once_from_its_sender_for_its_purpose() -> None:
    def twice(exchange: Pair) -> list[bytes]:
        return exchange.gather_alike(b"one", "p") + exchange.gather_alike(b"two", "p")

    def repeated(exchange: Pair) -> None:
        exchange.gather_alike(b"one", "p")
        exchange.altered[1] = exchange.seen[0]
        exchange.gather_alike(b"two", "p")

    first, got = talk(twice, twice)
    assert got == [b"one", b"one", b"two", b"two"]

    def as_another(exchange: Pair) -> None:
        exchange.altered[0] = first.seen[0]  # a true frame, of rank 0
        exchange.gather_alike(b"one", "p")

    for other in (repeated, as_another, lambda e: e.gather_alike(b"one", "q")):
        assert "rank 1 (p) does not prove" in str(talk(twice, other)[1])
    assert "rank 1 (p) does not prove" in str(talk(twice, twice, secret="another")[1])


@pytest.mark.parametrize("size", [-1, MAX_BYTES + 1, 2**62])
def test_no_room_is_made_for_what_is_too_long(size: int) -> None:
    def boasts(exchange: Pair) -> None:
        exchange.altered[0] = size.to_bytes(8, "little", signed=True)
        exchange.gather(b"x", "p")

    _, got = talk(lambda e: e.gather(b"x", "p"), boasts)
    assert f"rank 1 announced a message of {size:,} bytes (p)" in str(got)


@needs_gloo
@pytest.mark.parametrize("name", ["lr#1", "lr?2", "50%20", "é 'x'"])
def test_ranks_meet_in_the_file_that_was_named(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    with contextlib.closing(opened(f"file://{folder}/rendezvous", 0, world=1)):
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert (folder / "rendezvous").is_file()


def store_of(where: str, secret: str = "s", **more: Any) -> Any:
    timeout = datetime.timedelta(seconds=30)
    return open_store(where, secret=secret, rank=0, world_size=1, timeout=timeout, **more)


def test_two_runs_whose_paths_part_at_a_mark_of_urls_do_not_meet(tmp_path: Path) -> None:
    stores = []
    for name in ("lr#1", "lr#2", "lr?2"):
        (tmp_path / name).mkdir()
        stores.append(store_of(f"file://{tmp_path / name}/rendezvous"))
    for number, store in enumerate(stores):
        assert not store.check(["who"])
        store.set("who", str(number))
    assert [store.get("who") for store in stores] == [b"0", b"1", b"2"]


def test_keys_of_another_job_are_not_met(tmp_path: Path) -> None:
    where = f"file://{tmp_path}/rendezvous"
    left = store_of(where, "one")
    left.set("who", "an earlier job")
    assert not store_of(where, "two").check(["who"])
    # The prefix stands in the store for all to read: the secret does not.
    assert b"two" not in (tmp_path / "rendezvous").read_bytes()


def test_the_store_listens_at_its_address_alone() -> None:
    listener = listen_at("127.0.0.1")
    port = listener.getsockname()[1]
    store = store_of(tcp_address("127.0.0.1", port), listener=listener.detach())
    store.set("a", "b")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def test_meeting_points_that_are_none_are_refused() -> None:
    for where in ("udp://host:1", "tcp://host", "tcp://:1", "/path"):
        with pytest.raises(AnygaugeError, match="cannot meet at"):
            store_of(where)
    with pytest.raises(AnygaugeError, match="without a secret"):
        store_of("tcp://127.0.0.1:1", secret="")
    assert file_of("file:///a#b?c%20") == "/a#b?c%20"
    assert file_of(tcp_address("::1", 5)) is None
    assert tcp_address("::1", 5) == "tcp://[::1]:5"
