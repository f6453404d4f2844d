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


@pytest.mark.parametrize(("version", "sound"), [("0.16.9", False), ("0.19.8+cpu", True)])
def test_a_version_that_offloads_wrongly_is_refused(
    version: str, sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero_versions.metadata, "version", lambda name: version)
    check(stage=3, offload="optimizer")
    if sound:
        check(stage=2, offload="optimizer")
    else:
        said = r"in stage 2, DeepSpeed 0\.16\.9 trains with other losses"
        with pytest.raises(UnsupportedError, match=said):
            check(stage=2, offload="optimizer")


@pytest.mark.parametrize(("version", "can"), [("0.16.9", False), ("0.19.6", True)])
def test_a_version_that_recomputes_whole_layers_alone(
    version: str, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero_versions.metadata, "version", lambda name: version)
    check(activations=Activations(every=2))
    selective = Activations(every=1, selective=True)
    if can:
        check(activations=selective)
    else:
        with pytest.raises(UnsupportedError, match=r"0\.16\.9 needs .*no longer from 0\.19\.6"):
            check(activations=selective)


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


def test_this_needs_no_torch() -> None:
    code = (
        "import sys; import anygauge.strategies, anygauge.strategies.zero_options; "
        "assert 'torch' not in sys.modules"
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


@pytest.mark.parametrize(
    ("version", "reentrant", "every", "refused"),
    [
        ("0.19.8", False, 1, True),
        ("0.19.8", True, 1, False),
        ("0.19.8", False, 0, False),
        ("0.19.5", False, 1, False),
        ("0.16.1+hpu.synapse.v1.21.0", False, 1, False),
    ],
)
def test_a_device_that_recomputes_by_one_form_alone_gets_no_other(
    version: str, reentrant: bool, every: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero_versions.metadata, "version", lambda package: version)

    def asked() -> None:
        check(
            reentrant=reentrant,
            reentrant_only="nobody has tried the other",
            activations=Activations(every=every),
        )

    check(reentrant=reentrant, activations=Activations(every=every))
    if not refused:
        asked()
        return
    said = (
        r"reentrant: false: with DeepSpeed 0\.19\.8.*nobody has tried the other\. Set strategy\.r"
    )
    with pytest.raises(UnsupportedError, match=said):
        asked()


@pytest.mark.parametrize(
    ("version", "why", "remedy"),
    [
        ("0.19.8", "strategy.reentrant asks for", "Leave strategy.reentrant out"),
        ("0.16.9", "DeepSpeed 0.16.9 needs", "Leave it out"),
    ],
)
def test_what_the_reentrant_form_cannot_is_refused_with_who_asked_for_it(
    version: str, why: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero_versions.metadata, "version", lambda package: version)
    selective = Activations(every=1, selective=True)
    with pytest.raises(UnsupportedError) as error:
        check(reentrant=version == "0.19.8", activations=selective)
    assert why in str(error.value) and remedy in str(error.value)
    with pytest.raises(UnsupportedError, match=r"router_aux_loss_coef"):
        check(reentrant=True, activations=RECOMPUTED, router_aux_loss=True)
