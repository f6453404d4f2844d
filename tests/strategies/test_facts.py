"""What is refused of a strategy before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from anygauge.config.schema import StrategySection
from anygauge.interface import FULL, Backend, Level, RunFileError, Support, UnsupportedError
from anygauge.strategies.facts import FACTS, _zero_fields, check_known, check_needs, check_section


@pytest.mark.parametrize(
    "options",
    [
        {"offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": {"device": "nvme", "nvme_path": "/fast"}},
        {"cpu_offload": True},
    ],
)
def test_an_offloaded_optimizer_is_refused_with_the_reason(options: dict[str, Any]) -> None:
    section = StrategySection(options=options)
    with pytest.raises(UnsupportedError, match=r"an optimizer of its own.*Leave it out"):
        check_section(section)


def test_options_that_move_no_optimizer_pass() -> None:
    for options in (
        {},
        {"offload_optimizer": {"device": "none"}},
        {"offload_optimizer": None},
        {"cpu_offload": False},
        {"reduce_bucket_size": 1000},
    ):
        check_section(StrategySection(options=options))


def test_fields_that_deepspeed_does_not_have() -> None:
    """Held against DeepSpeed's own class, which is not imported for it."""
    known = _zero_fields()
    assert known is not None
    assert {"stage3_param_persistence_threshold", "reduce_bucket_size", "overlap_comm"} <= known
    for name in known:
        check_known(StrategySection(options={name: 1}))
    with pytest.raises(RunFileError, match=r"reduce_bukcet_size: .*did you mean 'reduce_bucket_"):
        check_known(StrategySection(options={"reduce_bukcet_size": 1}))


def test_options_of_a_strategy_that_has_none() -> None:
    with pytest.raises(RunFileError, match="'single' has none, but got stage3"):
        check_section(StrategySection(name="single", options={"stage3": 1}))


def backend(**members: Any) -> Backend:
    return type("Toy", (Backend,), {"name": "toy", "device_type": "toy", **members})()


def test_a_device_that_lacks_what_zero_needs_is_named_with_the_reason() -> None:
    lacking = {"collectives": Support(Level.NOT_WRITTEN_YET, "one card only")}
    toy = backend(capabilities=lacking)
    with pytest.raises(
        UnsupportedError, match=r"'toy' lacks 'collectives', needed because.*one card only"
    ):
        check_needs(toy, FACTS["zero"])
    check_needs(toy, FACTS["single"])


def test_a_device_that_cannot_run_the_engine_says_why() -> None:
    given: dict[str, Any] = {"capabilities": {"collectives": FULL}}
    check_needs(backend(**given), FACTS["zero"])
    toy = backend(**given, unsupported_engines={"deepspeed": "no reduce_scatter"})
    with pytest.raises(UnsupportedError, match=r"'toy' cannot run deepspeed.*no reduce_scatter"):
        check_needs(toy, FACTS["zero"])
    check_needs(toy, FACTS["single"])


def test_this_needs_no_torch() -> None:
    code = "import sys; import anygauge.strategies.facts; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
