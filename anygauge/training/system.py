"""What a run takes of its machine: host, process, disk and device, sampled in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from anygauge.interface import Placement
from anygauge.util.text import describe

STOP_S = 5.0


class SystemSampler:
    """Takes a sample every so often in a thread of its own; `drain` hands them over.

    Samples wait until they are fetched, so that only one thread writes a run's files. Rates are
    means since the sample before.

    ====================================  ==========================================================
    ``host_busy_percent``                 of all cores of the machine, by everybody, 0 to 100
    ``process_busy_percent``              by this process; 100 is one core
    ``host_memory_used``                  bytes in use on the machine, by everybody
    ``process_memory``                    bytes of this process that are resident
    ``disk_free``                         bytes left where the run directory is
    ``device_memory_in_use``              bytes held by live tensors; see `MemoryStats`
    ``device_memory_reserved``            bytes taken from the device, where it is counted
    ``device_...``                        what `Placement.utilization` gives
    ====================================  ==========================================================
    """

    def __init__(
        self, placement: Placement, folder: Path, every_s: float, warn: Callable[[str], None]
    ) -> None:
        """Begin.

        Args:
            folder: the run directory.
            every_s: seconds between samples; 0: none are taken.
            warn: called once if reading fails; sampling ends then.
        """
        self._placement, self._folder = placement, folder
        self._every_s, self._warn = every_s, warn
        self._samples: list[tuple[float, dict[str, float]]] = []
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._process = psutil.Process()
        # The first answer of either is 0: there is no reading before it.
        psutil.cpu_percent()
        self._process.cpu_percent()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)
        if every_s > 0:
            self._thread.start()

    def read(self) -> dict[str, float]:
        """The values now."""
        memory = psutil.virtual_memory()
        device = self._placement.memory()
        values: dict[str, float] = {
            "host_busy_percent": psutil.cpu_percent(),
            "process_busy_percent": self._process.cpu_percent(),
            "host_memory_used": memory.total - memory.available,
            "process_memory": self._process.memory_info().rss,
            "disk_free": psutil.disk_usage(str(self._folder)).free,
            "device_memory_in_use": device.in_use,
        }
        if device.reserved is not None:
            values["device_memory_reserved"] = device.reserved
        for name, value in self._placement.utilization().items():
            values[f"device_{name}"] = value
        return values

    def drain(self) -> list[tuple[float, dict[str, float]]]:
        """Samples since the last call, oldest first: seconds since the epoch, and the values."""
        with self._lock:
            samples, self._samples = self._samples, []
        return samples

    def stop(self) -> None:
        """End the thread; it takes a last sample, so that the shortest run has one."""
        self._ending.set()
        if self._thread.is_alive():
            # A driver that does not answer must not hold up the run's end.
            self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            while not self._ending.wait(self._every_s):
                self._take()
            self._take()
        except Exception as error:
            self._warn(f"system metrics stop here: {describe(error)}. Training continues")

    def _take(self) -> None:
        sample = (time.time(), self.read())
        with self._lock:
            self._samples.append(sample)
