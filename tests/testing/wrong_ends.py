"""Wrong backends that leave something behind, hang, or give figures that cannot be."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import locale
import logging
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anygauge.interface import LaunchProfile, PeakFlops
from tests.testing.wrong import Wrong, mutant

FOR_EVER = 10**6
HELPER = [sys.executable, "-c", "import time; time.sleep(60)"]


def on_paper(name: str, check: str, at: str) -> Callable[[Callable[[], Any]], None]:
    """Decorator: a mutant that does this when it is imported, probed, made or asked.

    Args:
        at: ``import``, ``probe``, ``make`` or ``ask``.
    """

    def register(act: Callable[[], Any]) -> None:
        @mutant(name, part="basic", check=check)
        def _(on: Wrong) -> None:
            if at == "import":
                on.when_announced(act)
            if at == "probe":
                on.probe(lambda usual: (act(), usual())[1])
            if at == "make":
                on.made(lambda backend: act())
            if at == "ask":
                on.settings(lambda job, node, rank: act() and [])

    return register


def on_device(name: str, check: str, at: str = "open") -> Callable[[Callable[[], Any]], None]:
    """Decorator: a mutant that does this each time when it is opened or closed."""
    return _then(name, "device", check, f"placement.{at}")


def on_ranks(name: str, check: str, at: str = "open") -> Callable[[Callable[[], Any]], None]:
    """Decorator: a mutant that does this when its ranks join or leave their group."""
    return _then(name, "ranks", check, f"collectives.{at}")


def _then(name: str, part: str, check: str, method: str) -> Callable[[Callable[[], Any]], None]:
    def register(act: Callable[[], Any]) -> None:
        @mutant(name, part=part, check=check)
        def _(on: Wrong) -> None:
            @on.method(method)
            def call(self: Any, usual: Any, *args: Any, **kwargs: Any) -> Any:
                found = usual(*args, **kwargs)
                act()
                return found

    return register


def say() -> None:
    print("Vendor SDK 3.1")


def say_in_c() -> None:
    ctypes.CDLL(None).printf(b"Vendor SDK 3.1\n")


def stop() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: None)


def end_at_pipes() -> None:
    ctypes.CDLL(None).signal(int(signal.SIGPIPE), None)  # SIG_DFL, without Python's knowledge


def block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def start_thread() -> None:
    threading.Thread(target=time.sleep, args=(20,), name="mutant's watch").start()


def start_helper() -> None:
    subprocess.Popen(HELPER)


def start_orphan() -> None:
    """A helper whose parent has ended, as services are started."""
    code = f"import subprocess; subprocess.Popen({HELPER!r})"
    subprocess.run([sys.executable, "-c", code], check=True)


def write_log() -> None:
    Path("vendor.log").write_text("opened\n")


def hide_warnings() -> None:
    warnings.filterwarnings("ignore")


# -- on paper -------------------------------------------------------------------------------------

on_paper("prints when it is imported", "paper_prints_nothing", "import")(say)
on_paper("the probe prints as C code does", "paper_prints_nothing", "probe")(say_in_c)
on_paper("prints when it is made", "paper_prints_nothing", "make")(say)
on_paper("prints when it is asked", "paper_prints_nothing", "ask")(
    lambda: os.write(1, b"rule 7 of 9\n") and None
)
on_paper("takes SIGTERM when it is imported", "paper_leaves_signals", "import")(stop)
on_paper("once it is made, a closed pipe ends the process", "paper_leaves_signals", "make")(
    end_at_pipes
)
on_paper("blocks Ctrl-C when it is probed", "paper_leaves_signals", "probe")(block)
on_paper("sets a variable when it is imported", "paper_leaves_variables", "import")(
    lambda: os.environ.setdefault("MUTANT_LOG_LEVEL", "3")
)
on_paper("hides warnings when it is imported", "paper_leaves_process", "import")(hide_warnings)
on_paper("sets up logging when it is made", "paper_leaves_process", "make")(logging.basicConfig)
on_paper("sets the locale when it is asked", "paper_leaves_process", "ask")(
    lambda: locale.setlocale(locale.LC_NUMERIC, "C.UTF-8") and None
)
on_paper("settles how processes start when it is imported", "paper_leaves_process", "import")(
    lambda: multiprocessing.set_start_method("spawn")
)
on_paper("is polite when it is made", "paper_leaves_settings", "make")(lambda: os.nice(1))
on_paper("the probe writes a log", "paper_leaves_no_file", "probe")(write_log)
on_paper("starts a thread when it is made", "paper_starts_nothing", "make")(start_thread)
on_paper("the probe starts a service", "paper_starts_nothing", "probe")(start_orphan)
on_paper("the probe leaves a file open", "paper_opens_no_descriptor", "probe")(
    lambda: os.open("/dev/null", os.O_RDONLY)
)

# -- one device -----------------------------------------------------------------------------------

on_device("opening prints a banner", "device_prints_nothing")(say)
on_device("closing prints a summary in C", "device_prints_nothing", "close")(say_in_c)
on_device("opening takes SIGTERM", "device_leaves_signals")(stop)
on_device("once it is open, a closed pipe ends the process", "device_leaves_signals")(end_at_pipes)
on_device("closing resets Ctrl-C", "device_leaves_signals", "close")(
    lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
)
on_device("opening blocks Ctrl-C", "device_leaves_signals")(block)
on_device("opening corrects the number of threads", "device_leaves_variables")(
    lambda: os.environ.update(OMP_NUM_THREADS="64")
)
on_device("closing clears the path of modules", "device_leaves_variables", "close")(
    lambda: os.environ.pop("PYTHONPATH", None)
)
on_device("opening changes the working folder", "device_leaves_process")(lambda: os.chdir("/"))
on_device("opening lets all write its files", "device_leaves_process")(lambda: os.umask(0))
on_device("opening hides warnings", "device_leaves_process")(hide_warnings)
on_device("opening sets up logging", "device_leaves_process")(logging.basicConfig)


@on_device("opening rounds the host's small numbers to 0", "device_leaves_process")
def _() -> None:
    import torch

    torch.set_flush_denormal(True)


@on_device("opening makes weights bfloat16", "device_leaves_torch")
def _() -> None:
    import torch

    torch.set_default_dtype(torch.bfloat16)


@on_device("opening makes tensors on it", "device_leaves_torch")
def _() -> None:
    import torch

    torch.set_default_device("meta")


@on_device("opening records no gradients", "device_leaves_torch")
def _() -> None:
    import torch

    torch.set_grad_enabled(False)


@on_device("opening asks for determinism", "device_leaves_torch")
def _() -> None:
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)


@on_device("opening multiplies with less precision", "device_leaves_torch")
def _() -> None:
    import torch

    torch.set_float32_matmul_precision("medium")


@on_device("closing leaves torch one thread more", "device_restores_processors", "close")
def _() -> None:
    import torch

    torch.set_num_threads(torch.get_num_threads() + 1)


on_device("opening makes the process slow", "device_restores_processors")(lambda: os.nice(1))
on_device("a watching thread is left", "device_leaves_no_thread")(start_thread)
on_device("a helper is left", "device_leaves_no_helper")(start_helper)
on_device("a service is left", "device_leaves_no_helper")(start_orphan)
on_device("closing writes a profile", "device_leaves_no_file", "close")(write_log)
on_device("each opening takes a descriptor", "opens_again_and_again")(
    lambda: os.open("/dev/null", os.O_RDONLY)
)
on_device("each opening starts a thread", "opens_again_and_again")(
    lambda: threading.Thread(target=time.sleep, args=(FOR_EVER,), daemon=True).start()
)


@mutant("waiting for the device never ends", part="device", check="synchronizes", limit_s=4)
def _(on: Wrong) -> None:
    @on.method("placement.synchronize")
    def synchronize(self: Any, usual: Any) -> None:
        time.sleep(FOR_EVER)


@mutant("a new peak never begins", part="device", check="peak_is_kept_and_reset", limit_s=4)
def _(on: Wrong) -> None:
    @on.method("placement.reset_peak")
    def reset_peak(self: Any, usual: Any) -> None:
        time.sleep(FOR_EVER)


@mutant("the process never ends", part="device", check="ends_on_device", limit_s=4)
def _(on: Wrong) -> None:
    @on.method("placement.close")
    def close(self: Any, usual: Any) -> None:
        usual()
        threading.Thread(target=time.sleep, args=(FOR_EVER,)).start()


# -- several ranks --------------------------------------------------------------------------------

on_ranks("joining prints a banner", "ranks_print_nothing")(say)
on_ranks("joining takes SIGTERM", "ranks_leave_signals")(stop)
on_ranks("joining corrects the number of ranks", "ranks_leave_variables")(
    lambda: os.environ.update(WORLD_SIZE="1")
)
on_ranks("a proxy of the group is left", "ranks_leave_nothing_running")(start_helper)
on_ranks("leaving writes a trace", "ranks_leave_no_file", "close")(write_log)


@mutant("leaving keeps the group", part="ranks", check="leaves_no_group")
def _(on: Wrong) -> None:
    @on.method("collectives.close")
    def close(self: Any, usual: Any) -> None:
        pass


@mutant("all_reduce never ends", part="ranks", check="all_reduce_sums", limit_s=4)
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(FOR_EVER)


@mutant("rank 1 never comes to a barrier", part="ranks", check="barrier_waits", limit_s=6)
def _(on: Wrong) -> None:
    @on.method("collectives.barrier")
    def barrier(self: Any, usual: Any) -> None:
        if os.environ["RANK"] == "1":
            time.sleep(FOR_EVER)
        usual()


# -- figures --------------------------------------------------------------------------------------


def memory(name: str, change: Callable[[Any], dict[str, Any]]) -> None:
    """A mutant whose memory has other numbers."""

    @mutant(name, part="device", check="memory_is_in_bytes")
    def _(on: Wrong) -> None:
        @on.method("placement.memory")
        def memory(self: Any, usual: Any) -> Any:
            found = usual()
            return dataclasses.replace(found, **change(found))


memory("memory is counted in mebibytes", lambda found: {"in_use": found.in_use / 2**20})
memory("memory without limit has the limit -1", lambda found: {"limit": -1})
memory("the limit is what is free", lambda found: {"limit": 2**40 - found.in_use})
memory("the limit is in gibibytes", lambda found: {"limit": 80})


def busy(name: str, **values: Any) -> None:
    """A mutant that is busy in a way that cannot be."""

    @mutant(name, part="device", check="utilisation_is_sound")
    def _(on: Wrong) -> None:
        @on.method("placement.utilisation")
        def utilisation(self: Any, usual: Any) -> Any:
            return values


busy("more than wholly busy", utilisation_percent=130.0)
busy("infinitely busy", utilisation_percent=math.inf)
busy("power in milliwatts", power_w=310_000.0)
busy("colder than can be", temperature_c=-273.0)
busy("busy as a text", utilisation_percent="30")


@mutant("a peak rate in units of 10**12", part="device", check="peak_rate")
def _(on: Wrong) -> None:
    @on.method("placement.peak_flops")
    def peak_flops(self: Any, usual: Any, dtype: str) -> Any:
        return PeakFlops(value=989.0, source="a table")


@mutant("a peak rate that is measured each time", part="device", check="peak_rates_stay")
def _(on: Wrong) -> None:
    clock = itertools.count(10**12, 10**9)

    @on.method("placement.peak_flops")
    def peak_flops(self: Any, usual: Any, dtype: str) -> Any:
        return PeakFlops(value=float(next(clock)), source="measured")


@mutant("the probe counts halves of devices", part="device", check="counts_agree", base="sim")
def _(on: Wrong) -> None:
    @on.probe
    def probe(usual: Any) -> Any:
        found = usual()
        return dataclasses.replace(found, device_count=2 * found.device_count)


@mutant(
    "the visibility variable has another name",
    part="device",
    check="visibility_variable_hides",
    base="sim",
)
def _(on: Wrong) -> None:
    on.backend.launch = LaunchProfile(visibility_variable="MUTANT_VISIBLE_DEVICES")


@mutant("sums vary, and it does not say so", part="device", check="same_bits_again", base="sim")
def _(on: Wrong) -> None:
    turns = itertools.count()

    @on.operation("mm")
    def product(usual: Any, left: Any, right: Any) -> Any:
        found = usual(left, right)
        return found * (1 + 2.0**-20) if next(turns) % 3 == 0 else found
