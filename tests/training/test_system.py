"""System metrics: what is read, how often, and that nothing is left behind."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import MemoryStats, Placement
from anygauge.training.system import SystemSampler


class FakeDevice(Placement):
    """A device that can tell how busy it is."""

    def memory(self) -> MemoryStats:
        return MemoryStats(in_use=5, peak=9, reserved=7)

    def utilization(self) -> dict[str, float]:
        return {"power_w": 250.0}


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "system-metrics"]


def test_reads_host_process_disk_and_device(tmp_path: Path) -> None:
    reader = SystemSampler(FakeDevice("any"), tmp_path, 0, pytest.fail)
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    values = reader.read()
    assert values["process_busy_percent"] > 10, "it was busy since the reading before"
    assert 0 < values["host_busy_percent"] <= 100
    page = os.sysconf("SC_PAGE_SIZE")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
    assert values["process_memory"] == pytest.approx(resident, rel=0.1)
    assert values["process_memory"] < values["host_memory_used"]
    disk = os.statvfs(tmp_path)
    assert values["disk_free"] == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.1)
    device = {name: value for name, value in values.items() if name.startswith("device_")}
    assert device == {
        "device_memory_in_use": 5,
        "device_memory_reserved": 7,
        "device_power_w": 250.0,
    }


def test_a_device_that_counts_nothing_more_has_no_such_values(tmp_path: Path) -> None:
    class Plain(Placement):
        def memory(self) -> MemoryStats:
            return MemoryStats(in_use=5, peak=9)

    values = SystemSampler(Plain("any"), tmp_path, 0, pytest.fail).read()
    assert [name for name in values if name.startswith("device_")] == ["device_memory_in_use"]


class CountingSampler(SystemSampler):
    """Reads how often it has read."""

    def __init__(self, every_s: float, warn: Any = pytest.fail) -> None:
        self.count = itertools.count()
        super().__init__(FakeDevice("any"), Path("/"), every_s, warn)

    def read(self) -> dict[str, float]:
        return {"n": float(next(self.count))}


def test_samples_come_on_time_and_the_thread_ends() -> None:
    sampler = CountingSampler(0.02)
    deadline = time.monotonic() + 20
    samples = []
    while len(samples) < 3 and time.monotonic() < deadline:
        samples += sampler.drain()
        time.sleep(0.01)
    assert threads()
    sampler.stop()
    samples += sampler.drain()
    assert [values["n"] for _, values in samples] == [float(n) for n in range(len(samples))]
    # The last one is taken at the end, whenever that is.
    assert all(b[0] - a[0] >= 0.015 for a, b in itertools.pairwise(samples[:-1]))
    assert not sampler.drain() and not threads()


def test_the_shortest_run_has_a_sample_and_zero_has_none() -> None:
    sampler = CountingSampler(3600)
    sampler.stop()
    assert [values for _, values in sampler.drain()] == [{"n": 0.0}]
    off = CountingSampler(0)
    assert not threads()
    off.stop()
    assert not off.drain()


def test_a_failing_reading_is_told_once() -> None:
    class Failing(CountingSampler):
        def read(self) -> dict[str, float]:
            raise OSError("gone")

    warnings: list[str] = []
    sampler = Failing(0.01, warnings.append)
    deadline = time.monotonic() + 20
    while not warnings and time.monotonic() < deadline:
        time.sleep(0.01)
    sampler.stop()
    assert len(warnings) == 1 and "OSError: gone" in warnings[0]


def test_a_card_tells_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from anygauge_cuda.placement import CudaPlacement

    def fails(device: Any) -> int:
        raise RuntimeError("not supported")

    placement = CudaPlacement("cuda")
    placement._device = torch.device("cuda", 1)
    asked = []

    def power(device: Any) -> int:
        asked.append(device)
        return 412_345

    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 97)
    monkeypatch.setattr(torch.cuda, "memory_usage", fails)
    monkeypatch.setattr(torch.cuda, "power_draw", power)
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 61)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert placement.utilization() == {}
    monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert placement.utilization() == {
        "utilization_percent": 97.0,
        "power_w": 412.345,
        "temperature_c": 61.0,
    }
    assert asked == [torch.device("cuda", 1)]
