"""What is refused of `zero` before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from anygauge.interface import Activations, Precision, RunFileError, StrategyRun, UnsupportedError
from anygauge.strategies import zero_versions
from anygauge.strategies.zero_options import ZeroOptions
from anygauge.strategies.zero_spec import ZERO, zero_fields


def check(
    *,
    optimizer: str = "adamw",
    precision: Precision | None = None,
    activations: Activations = Activations(),  # noqa: B008
    router_aux_loss: bool = False,
    reentrant_only: str = "",
    **fields: Any,
) -> None:
    ZERO.check(
        StrategyRun(
            options=ZeroOptions(**fields),
            world_size=2,
            optimizer=optimizer,
            precision=precision,
            activations=activations,
            router_aux_loss=router_aux_loss,
            reentrant_only=reentrant_only,
        )
    )


@pytest.mark.parametrize(
    "options",
    [
        {"offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": {"device": "nvme", "nvme_path": "/fast"}},
        {"offload_param": {"device": "nvme", "nvme_path": "/fast"}},
        {"cpu_offload": True},
    ],
)
def test_offloading_has_a_field_of_its_own(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"only its own optimizer.*strategy\.offload: opt"):
        check(options=options)


@pytest.mark.parametrize(
    ("stage", "offload", "said"),
    [
        (0, "optimizer", "stage 0 offloads nothing"),
        (2, "parameters", "stage 2 keeps all weights on every device"),
        (1, "both", "stage 1 keeps all weights on every device"),
    ],
)
def test_a_stage_that_has_nothing_to_offload_is_refused(
    stage: int, offload: str, said: str
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        check(stage=stage, offload=offload)
    check(stage=3, offload=offload)


def test_options_that_move_no_optimizer_pass() -> None:
    for options in (
        {},
        {"offload_optimizer": {"device": "none"}},
        {"offload_optimizer": None},
        {"cpu_offload": False},
        {"reduce_bucket_size": 1000},
    ):
        check(options=options)


def test_fields_that_deepspeed_does_not_have() -> None:
    """Held against DeepSpeed's own class, which is not imported for it."""
    known = zero_fields()
    assert known is not None
    assert {"stage3_param_persistence_threshold", "reduce_bucket_size", "overlap_comm"} <= known
    for name in known - {"cpu_offload"}:
        check(options={name: None})
    with pytest.raises(RunFileError, match=r"reduce_bukcet_size: .*did you mean 'reduce_bucket_"):
        check(options={"reduce_bukcet_size": 1})


def test_where_ranks_run_elsewhere_their_deepspeed_may_know_more() -> None:
    options = ZeroOptions(options={"brand_new": 1})
    ZERO.check(StrategyRun(options=options, world_size=2, optimizer="adamw", ranks_run_here=False))


def test_types_that_a_stage_does_not_combine() -> None:
    mixed = Precision(param_dtype="bfloat16", reduce_dtype="float32")
    check(stage=1, precision=mixed)
    check(stage=0, precision=Precision(param_dtype="bfloat16", reduce_dtype="bfloat16"))
    with pytest.raises(UnsupportedError, match=r"stage 0.*precision\.reduce_dtype: param_dtype"):
        check(stage=0, precision=mixed)


def test_options_and_checks_of_strategies_need_no_torch() -> None:
    code = (
        "import sys; import anygauge.strategies, anygauge.strategies.zero_spec, "
        "anygauge.strategies.zero_options, anygauge.strategies.fsdp_spec, "
        "anygauge.strategies.fsdp_options; assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_devices_own_update_is_called_in_the_stages_that_were_tried() -> None:
    for stage in (1, 2, 3):
        assert ZERO.takes_update_kernel(ZeroOptions(stage=stage))
    assert "stage 0" in ZERO.takes_update_kernel(ZeroOptions(stage=0)).reason
    for options in (ZeroOptions(stage=2, offload="optimizer"), ZeroOptions(offload="both")):
        assert "host" in ZERO.takes_update_kernel(options).reason
    assert "clips" in ZERO.takes_clip_kernel(ZeroOptions()).reason


RECOMPUTED = Activations(every=1)
SELECTIVE = Activations(every=1, selective=True)
HOST = {"offload": "optimizer"}
NOBODY = {"reentrant_only": "nobody has tried the other"}
OTHER = {"reentrant": False, "activations": RECOMPUTED}
ROUTED = {"reentrant": True, "activations": RECOMPUTED, "router_aux_loss": True}


@pytest.mark.parametrize(
    ("version", "fields", "said"),
    [
        ("0.16.9", {"stage": 3, **HOST}, None),
        (
            "0.16.9",
            {"stage": 2, **HOST},
            r"stage 2, DeepSpeed 0\.16\.9 trains with other losses",
        ),
        ("0.19.8+cpu", {"stage": 3, **HOST}, None),
        ("0.19.8+cpu", {"stage": 2, **HOST}, None),
        ("0.16.9", {"activations": Activations(every=2)}, None),
        (
            "0.16.9",
            {"activations": SELECTIVE},
            r"DeepSpeed 0\.16\.9 needs .*no longer from 0\.19\.6.*Leave it out",
        ),
        ("0.19.6", {"activations": SELECTIVE}, None),
        (
            "0.19.8",
            {"reentrant": True, "activations": SELECTIVE},
            r"strategy\.reentrant asks for.*Leave strategy\.reentrant out",
        ),
        *((version, ROUTED, r"router_aux_loss_coef") for version in ("0.16.9", "0.19.8")),
        # A device that recomputes by one form alone gets no other.
        ("0.19.8", OTHER, None),
        (
            "0.19.8",
            {**OTHER, **NOBODY},
            r"reentrant: false: with DeepSpeed 0\.19\.8.*nobody has tried the other\. Set strat",
        ),
        ("0.19.8", {**OTHER, **NOBODY, "reentrant": True}, None),
        ("0.19.8", {**NOBODY, "reentrant": False}, None),
        ("0.19.5", {**OTHER, **NOBODY}, None),
        ("0.16.1+hpu.synapse.v1.21.0", {**OTHER, **NOBODY}, None),
    ],
)
def test_what_a_version_cannot_is_refused_with_who_asked_for_it(
    version: str, fields: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero_versions.metadata, "version", lambda package: version)
    if said is None:
        check(**fields)
        return
    with pytest.raises(UnsupportedError, match=said):
        check(**fields)
