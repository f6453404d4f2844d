"""Wrong backends that checks of the kit's part `device` find: see `tests.testing.wrong`."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

from anygauge.interface import Compiler, NotAvailableError, PeakFlops
from tests.testing.wrong import Wrong, mutant, torch


@mutant("the device is not seeded", part="device", check="seeds_count", base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.seed")
    def seed(self: Any, usual: Any, seed: int) -> None:
        torch.default_generator.manual_seed(seed)


# -- memory and rates -----------------------------------------------------------------------------

EXHAUSTED = "out_of_memory_at_any_size"


@mutant("exhaustion by small requests is unknown", part="device", check=EXHAUSTED, base="sim")
def _(on: Wrong) -> None:
    os.environ["ANYGAUGE_SIM_CAPACITY"] = str(2**28)

    @on.method("placement.is_out_of_memory")
    def is_out_of_memory(self: Any, usual: Any, error: BaseException) -> bool:
        asked = str(error).partition("out of memory: ")[2].partition(" ")[0]
        return usual(error) and asked.isdigit() and int(asked) > 2**24


@mutant("exhaustion by huge requests is unknown", part="device", check=EXHAUSTED, base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.is_out_of_memory")
    def is_out_of_memory(self: Any, usual: Any, error: BaseException) -> bool:
        asked = str(error).partition("out of memory: ")[2].partition(" ")[0]
        return usual(error) and asked.isdigit() and int(asked) < 2**50


@mutant("the limit is half of what is given", part="device", check=EXHAUSTED, base="sim")
def _(on: Wrong) -> None:
    os.environ["ANYGAUGE_SIM_CAPACITY"] = str(2**28)

    @on.method("placement.memory")
    def memory(self: Any, usual: Any) -> Any:
        found = usual()
        return replace(found, limit=found.limit // 2 + 2**20)


@mutant("products are 0 after memory was exhausted", part="device", check=EXHAUSTED, base="sim")
def _(on: Wrong) -> None:
    refused: list[Any] = []

    @on.operation("empty")
    def empty(usual: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return usual(*args, **kwargs)
        except RuntimeError as error:
            refused.append(type(error))
            raise

    @on.operation("mm")
    def mm(usual: Any, a: Any, b: Any) -> Any:
        return usual(a, b) * (0 if refused else 1)


@mutant("exhausted memory is not given back", part="device", check=EXHAUSTED, base="sim")
def _(on: Wrong) -> None:
    os.environ["ANYGAUGE_SIM_CAPACITY"] = str(2**28)
    kept: list[Any] = []

    @on.operation("empty")
    def empty(usual: Any, *args: Any, **kwargs: Any) -> Any:
        out = usual(*args, **kwargs)
        if out.numel() == 2**22:
            kept.append(out)
        return out


RATES = "peak_rates_are_plausible"


def _rates(name: str, **values: float) -> None:
    @mutant(name, part="device", check=RATES)
    def _(on: Wrong) -> None:
        @on.method("placement.peak_flops")
        def peak_flops(self: Any, usual: Any, dtype: str) -> Any:
            found = values.get(dtype, values.get("any"))
            return None if found is None else PeakFlops(value=found, source="a page")


_rates("rates are in TFLOPS", bfloat16=312.0)
_rates("a rate is beyond all devices", bfloat16=1e18)
_rates("a rate is infinite", bfloat16=math.inf)
_rates("bfloat16 is slower than float32", bfloat16=1e13, float32=2e13)
_rates("float16 is slower than float32", float16=1e13, float32=2e13)
_rates("a rate is known of every type", any=1e13)


def _busy(name: str, what: str, value: float) -> None:
    @mutant(name, part="device", check="utilisation_is_plausible")
    def _(on: Wrong) -> None:
        @on.method("placement.utilisation")
        def utilisation(self: Any, usual: Any) -> Any:
            return {what: value}


_busy("a share is infinite", "utilisation_percent", math.inf)
_busy("a share is beyond 100 percent", "utilisation_percent", 4200.0)
_busy("power is in milliwatts", "power_w", 312_000.0)
_busy("temperature is in kelvin", "temperature_c", 330.0)
_busy("memory in use is negative", "memory_bytes", -1.0)


# -- opening, seeds, types ------------------------------------------------------------------------


@mutant("opening gives the host", part="device", check="opens", base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.open")
    def open_(self: Any, usual: Any, local_rank: int) -> Any:
        usual(local_rank)
        return torch.device("cpu")


@mutant("a rank without a device learns no number", part="device", check="too_large_rank")
def _(on: Wrong) -> None:
    @on.method("placement.open")
    def open_(self: Any, usual: Any, local_rank: int) -> Any:
        if local_rank > 100:
            raise NotAvailableError("no device")
        return usual(local_rank)


@mutant(
    "exhausted memory is any error", part="device", check="out_of_memory_is_recognised", base="sim"
)
def _(on: Wrong) -> None:
    @on.method("placement.is_out_of_memory")
    def is_out_of_memory(self: Any, usual: Any, error: BaseException) -> bool:
        return False


@mutant("the host is not seeded", part="device", check="seeds_the_host", base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.seed")
    def seed(self: Any, usual: Any, seed: int) -> None:
        state = torch.get_rng_state()
        usual(seed)
        torch.set_rng_state(state)


@mutant("autocast lowers float32, too", part="device", check="autocast_to_float32", base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.autocast")
    def autocast(self: Any, usual: Any, dtype: Any) -> Any:
        return usual(torch.bfloat16)


def doubled(graph: Any, inputs: Any) -> Any:
    """A compiler whose graphs give twice what they should."""
    return lambda *given: tuple(2 * each for each in graph.forward(*given))


@mutant("compiled graphs give twice the result", part="device", check="compiles")
def _(on: Wrong) -> None:
    on.graph.compiler = Compiler(backend=doubled, regions="model")  # type: ignore[arg-type]
