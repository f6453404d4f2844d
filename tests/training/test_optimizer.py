"""Parameter groups: what is decayed, what learns faster, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anygauge.config.schema import RunFile
from anygauge.config.sections import OptimizerSection
from anygauge.interface import Backend, RunFileError, UnsupportedError
from anygauge.registry import Registry
from anygauge.strategies.shared.common import set_learning_rate
from anygauge.training import checks
from anygauge.training.optimizer import PAGED as PAGED_FROM
from anygauge.training.optimizer import optimizer_factory, parameter_groups
from anygauge.training.strategy import check_strategy
from tests.helpers.operations import Operations


def run(**fields: object) -> RunFile:
    base = {"model": {"name": "m"}, "data": {"train": {"path": "rows.jsonl"}}}
    return RunFile.model_validate({**base, **fields})


def named(*names: str) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.zeros(2, 2))) for name in names]


def test_vectors_are_not_decayed_also_where_they_are_sharded() -> None:
    layer = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    flat = nn.Parameter(torch.zeros(0))
    parameters = [*layer.named_parameters(), ("flat", flat)]
    shapes = {name: tuple(p.shape) for name, p in parameters} | {"flat": (5, 6)}
    section = OptimizerSection(lr=0.5, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)
    made = optimizer_factory(section)(parameters, shapes)
    decay = {id(p): g["weight_decay"] for g in made.param_groups for p in g["params"]}
    assert decay == {
        id(layer[0].weight): 0.1,
        id(layer[0].bias): 0.0,
        id(layer[1].weight): 0.0,
        id(layer[1].bias): 0.0,
        id(flat): 0.1,
    }
    for group in made.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.9), 1e-6)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "lion", "sgd"])
def test_b_factors_learn_faster_at_every_rate_that_is_set(name: str) -> None:
    parameters = named(
        "a.lora_A.default.weight",
        "a.lora_B.default.weight",
        "e.lora_embedding_A.default",
        "e.lora_embedding_B.default",
        "my_lora_Bias.weight",
    )
    section = OptimizerSection(name=name, lr=0.5, loraplus_lr_ratio=16)
    made = optimizer_factory(section)(parameters)
    names = {id(p): n for n, p in parameters}

    def rates() -> dict[str, float]:
        return {names[id(p)]: g["lr"] for g in made.param_groups for p in g["params"]}

    plain, fast = dict.fromkeys((n for n, _ in parameters), 1.0), 16.0
    expected = plain | {"a.lora_B.default.weight": fast, "e.lora_embedding_B.default": fast}
    assert rates() == {n: 0.5 * scale for n, scale in expected.items()}
    set_learning_rate(made, 0.25)
    assert rates() == {n: 0.25 * scale for n, scale in expected.items()}


def test_groups_keep_the_models_order() -> None:
    vector = ("norm", nn.Parameter(torch.zeros(2)))
    first, second = named("x", "y")
    groups = parameter_groups(OptimizerSection(), [first, vector, second])
    assert [[id(p) for p in g["params"]] for g in groups] == [
        [id(first[1]), id(second[1])],
        [id(vector[1])],
    ]


def test_lora_plus_without_b_factors_is_refused() -> None:
    with pytest.raises(RunFileError, match="loraplus_lr_ratio: no trained parameter is a B factor"):
        parameter_groups(OptimizerSection(loraplus_lr_ratio=2), named("x.weight"))
    section = {"optimizer": {"loraplus_lr_ratio": 2}}
    with pytest.raises(RunFileError, match=r"loraplus_lr_ratio: .* no adapter section"):
        checks.check_optimizer(run(train=section), need_software=False)
    checks.check_optimizer(run(train=section, adapter={}), need_software=False)


def test_adafactor_notices_flat_parameters_by_itself() -> None:
    made = optimizer_factory(OptimizerSection(name="adafactor"))(named("x"))
    flat = nn.Parameter(torch.zeros(4))
    flat.grad = torch.ones(4)
    made.param_groups[0]["params"] = [flat]
    with pytest.raises(UnsupportedError, match="flat vectors"):
        made.step()


def test_a_missing_package_is_told_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = run(train={"optimizer": {"name": "adamw_8bit"}})
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    checks.check_optimizer(asked, need_software=False)
    with pytest.raises(RunFileError, match=r"pip install 'anygauge\[8bit\]'"):
        checks.check_optimizer(asked, need_software=True)


def test_a_device_without_an_8_bit_update_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: object) -> None:
        raise NotImplementedError("no kernel of that name")

    monkeypatch.setattr("bitsandbytes.optim.AdamW8bit.step", step)
    with pytest.raises(UnsupportedError, match=r"(?s)update on cpu .*no kernel of.*name: adamw"):
        optimizer_factory(OptimizerSection(name="adamw_8bit"))(named("x"))


class Unknown(Backend):
    """A device of which nothing is said."""

    name, device_type = "unknown", "cpu"


ADAFACTOR = {"name": "adafactor"}
EIGHT_BIT = {"name": "adamw_8bit"}
PAGED = {**EIGHT_BIT, "paged": True}
SINGLE = {"name": "single"}
NO_KERNEL = "adamw_8bit: backend '{}' lacks.*{}"


@pytest.mark.parametrize(
    ("optimizer", "device", "strategy", "said"),
    [
        # Where matrices are flattened.
        (ADAFACTOR, "cpu", {"name": "zero", "stage": 3}, r"stage 3.*strategy\.name: single"),
        (ADAFACTOR, "cpu", {"name": "zero", "stage": 1}, r"stage 1.*strategy\.name: single"),
        (ADAFACTOR, "cpu", {"name": "zero", "stage": 0}, None),
        (ADAFACTOR, "cpu", SINGLE, None),
        # A trial of bitsandbytes would pass where the host computes what the device does not.
        (EIGHT_BIT, "cpu", SINGLE, None),
        (EIGHT_BIT, "cuda", SINGLE, None),
        (EIGHT_BIT, "hpu", SINGLE, NO_KERNEL.format("hpu", "no optimizer for these cards")),
        (EIGHT_BIT, "unknown", SINGLE, NO_KERNEL.format("unknown", "does not mention it")),
        (
            PAGED,
            "cpu",
            SINGLE,
            r"paged: backend 'cpu' lacks 'paged_memory': .*there is no dev",
        ),
        (PAGED, "hpu", SINGLE, r"paged: backend 'hpu' lacks 'paged_memory': .*CUDA, ROCm"),
        (
            PAGED,
            "cuda",
            {"name": "zero"},
            r"paged: DeepSpeed moves the optimizer's state in its own way.*offload: optimizer",
        ),
        (PAGED, "cuda", {"name": "fsdp"}, r"paged: .*under strategy fsdp.*name: ddp or single"),
        (PAGED, "cuda", {"name": "ddp", "tp": 2}, r"paged: .*under strategy\.tp.*ddp or single"),
        (PAGED, "cuda", SINGLE, None),
        (PAGED, "cuda", {"name": "ddp"}, None),
    ],
)
def test_what_a_strategy_or_a_device_cannot_update_is_refused(
    optimizer: dict[str, Any], device: str, strategy: dict[str, Any], said: str | None
) -> None:
    registry = Registry.load()
    asked = run(train={"optimizer": optimizer}, strategy=strategy)
    backend: Backend = Unknown() if device == "unknown" else registry.create_backend(device)
    ranks = 2 if strategy["name"] in ("ddp", "fsdp") else 1
    if said is None:
        check_strategy(asked, registry, backend, ranks)
        return
    with pytest.raises((RunFileError, UnsupportedError), match=said):
        check_strategy(asked, registry, backend, ranks)


def test_paged_is_a_setting_of_8_bits() -> None:
    with pytest.raises(ValueError, match=r"paged.*adamw_8bit alone, not of adamw"):
        run(train={"optimizer": {"paged": True}})


def test_paged_state_that_is_not_paged_is_refused() -> None:
    section = OptimizerSection(name="adamw_8bit", paged=True)
    with (
        pytest.warns(UserWarning, match="not supported on CPU"),
        pytest.raises(UnsupportedError, match=r"paged: .*cannot page memory of cpu"),
    ):
        optimizer_factory(section)(named("x"))


def test_paged_state_is_asked_of_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own memory stands in for what the driver would move."""

    def buffer(self: object, p: Tensor, dtype: torch.dtype) -> Tensor:
        made = torch.zeros_like(p, dtype=dtype)
        made.is_paged = self.is_paged and p.numel() >= PAGED_FROM  # type: ignore[attr-defined]
        return made

    monkeypatch.setattr("bitsandbytes.optim.optimizer.Optimizer8bit.get_state_buffer", buffer)
    monkeypatch.setattr("bitsandbytes.functional.prefetch_tensor", lambda tensor: None)
    for paged in (False, True):
        section = OptimizerSection(name="adamw_8bit", paged=paged)
        made: Any = optimizer_factory(section)(named("x"))
        assert made.is_paged is paged


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_is_fused_where_the_backend_says_so(fused: bool) -> None:
    """Without a trial, which passes where a device hands to the host what it cannot compute."""
    there = [("x", nn.Parameter(torch.empty(2, 3, device="meta")))]
    with Operations() as seen:
        made = optimizer_factory(OptimizerSection(), fused=fused)(there)
    assert bool(made.param_groups[0]["fused"]) is fused
    assert not seen.names(), "something was tried"


def test_the_hosts_own_tensors_have_a_fused_update_on_every_device() -> None:
    assert optimizer_factory(OptimizerSection(), fused=False)(named("x")).param_groups[0]["fused"]


def test_a_kernel_for_updates_comes_before_both() -> None:
    def kernel(groups: Any, *, lr: float, betas: Any, eps: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=lr)

    for fused in (False, True):
        made = optimizer_factory(OptimizerSection(), kernel, fused=fused)(named("x"))
        assert isinstance(made, torch.optim.SGD)
    other = optimizer_factory(OptimizerSection(name="lion"), kernel)(named("x"))
    assert not isinstance(other, torch.optim.SGD)
