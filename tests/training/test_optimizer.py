"""Optimizers: their groups, what is refused, their formulas, and steps that are undone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anygauge.config.schema import RunFile
from anygauge.interface import (
    Backend,
    NotAvailableError,
    OptimizerContext,
    RunFileError,
    UnsupportedError,
)
from anygauge.registry import Registry
from anygauge.strategies.shared.common import set_learning_rate
from anygauge.strategies.shared.finite import FiniteSteps, propagate_nonfinite
from anygauge.training import checks
from anygauge.training import optimizer as optimizers
from anygauge.training.build_strategy import check_strategy, state_bytes
from anygauge.training.optimizer import optimizer_factory, parameter_groups, with_found_inf
from anygauge.training.optimizers import takes_muon
from anygauge.training.optimizers.algorithms import MIN_PAGED_NUMEL as PAGED_FROM
from anygauge.training.optimizers.algorithms import DecoupledSGD, Lion, MuonAdamW
from anygauge_kernels.adamw import early_epsilon
from tests.helpers.build import optimizer_section
from tests.helpers.dispatched_operations import Operations


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
    section = optimizer_section(lr=0.5, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)
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


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "lion", "muon", "sgd"])
def test_b_factors_learn_faster_at_every_rate_that_is_set(name: str) -> None:
    parameters = named(
        "a.lora_A.default.weight",
        "a.lora_B.default.weight",
        "e.lora_embedding_A.default",
        "e.lora_embedding_B.default",
        "my_lora_Bias.weight",
    )
    section = optimizer_section(name=name, lr=0.5, loraplus_lr_ratio=16)
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
    groups = parameter_groups(optimizer_section(), [first, vector, second])
    assert [[id(p) for p in g["params"]] for g in groups] == [
        [id(first[1]), id(second[1])],
        [id(vector[1])],
    ]


def test_lora_plus_without_b_factors_is_refused() -> None:
    with pytest.raises(RunFileError, match="loraplus_lr_ratio: no trained parameter is a B factor"):
        parameter_groups(optimizer_section(loraplus_lr_ratio=2), named("x.weight"))
    section = {"optimizer": {"loraplus_lr_ratio": 2}}
    with pytest.raises(RunFileError, match=r"loraplus_lr_ratio: .* no adapter section"):
        checks.check_optimizer(run(train=section), Registry.load(), need_software=False)
    checks.check_optimizer(run(train=section, adapter={}), Registry.load(), need_software=False)


@pytest.mark.parametrize(
    ("optimizer", "torch_version", "said"),
    [
        ({"name": "adamw_8bit"}, "2.13", r"pip install 'anygauge\[8bit\]', or use adamw"),
        ({"paged": True}, "2.13", r"pip install 'anygauge\[8bit\]', or leave paged out"),
        ({"name": "muon"}, "2.6.0", r"torch 2\.6\.0 has no torch\.optim\.Muon; install torch 2\.9"),
        ({"name": "muon"}, "2.9.0", None),
        ({}, "2.6.0", None),
    ],
)
def test_missing_software_is_told_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch,
    optimizer: dict[str, Any],
    torch_version: str,
    said: str | None,
) -> None:
    asked, registry = run(train={"optimizer": optimizer}), Registry.load()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("anygauge.training.optimizers.installed_version", lambda _: torch_version)
    assert asked.may_use_bitsandbytes is bool(optimizer), "else its rank would not find it"
    checks.check_optimizer(asked, registry, need_software=False)
    with nullcontext() if said is None else pytest.raises(NotAvailableError, match=said):
        checks.check_optimizer(asked, registry, need_software=True)


def test_a_device_without_an_8_bit_update_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: object) -> None:
        raise NotImplementedError("no kernel of that name")

    monkeypatch.setattr("bitsandbytes.optim.AdamW8bit.step", step)
    with pytest.raises(UnsupportedError, match=r"(?s)update on cpu .*no kernel of.*name: adamw"):
        optimizer_factory(optimizer_section(name="adamw_8bit"))(named("x"))


class Unknown(Backend):
    """A device of which nothing is said."""

    name, device_type = "unknown", "cpu"


ADAFACTOR = {"name": "adafactor"}
EIGHT_BIT = {"name": "adamw_8bit"}
PAGED = {**EIGHT_BIT, "paged": True}
PAGED_32 = {"paged": True}
MUON = {"name": "muon"}
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
        (MUON, "cpu", {"name": "zero", "stage": 1}, r"muon updates whole.*stage 1.*single"),
        (MUON, "cpu", {"name": "fsdp"}, r"muon updates whole.*under strategy fsdp.*name: ddp"),
        (MUON, "cpu", {"name": "ddp", "tp": 2}, r"muon updates whole.*under strategy\.tp"),
        (MUON, "cpu", {"name": "ddp"}, None),
        (MUON, "cpu", {"name": "zero", "stage": 0}, None),
        # A trial of bitsandbytes would pass where the host computes what the device does not.
        (EIGHT_BIT, "cpu", SINGLE, None),
        (EIGHT_BIT, "cuda", SINGLE, None),
        (EIGHT_BIT, "hpu", SINGLE, NO_KERNEL.format("hpu", "no optimizer for these cards")),
        (EIGHT_BIT, "unknown", SINGLE, NO_KERNEL.format("unknown", "does not mention it")),
        (PAGED, "cpu", SINGLE, r"paged: backend 'cpu' lacks 'paged_memory': .*there is no dev"),
        (PAGED, "hpu", SINGLE, r"paged: backend 'hpu' lacks 'paged_memory': .*CUDA, ROCm"),
        (
            PAGED,
            "cuda",
            {"name": "zero"},
            r"paged: DeepSpeed moves the optimizer's state in its own way.*offload: optimizer",
        ),
        (PAGED, "cuda", {"name": "fsdp"}, r"paged: .*under strategy fsdp.*name: ddp or single"),
        (PAGED, "cuda", {"name": "ddp", "tp": 2}, r"paged: .*under strategy\.tp.*ddp or single"),
        (PAGED_32, "cpu", SINGLE, r"paged: backend 'cpu' lacks 'paged_memory': .*there is no dev"),
        (PAGED_32, "cuda", {"name": "fsdp"}, r"paged: .*under strategy fsdp.*name: ddp or single"),
        (PAGED, "cuda", SINGLE, None),
        (PAGED_32, "cuda", SINGLE, None),
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


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_paged_state_that_is_not_paged_is_refused(name: str) -> None:
    section = optimizer_section(name=name, paged=True)
    with (
        pytest.warns(UserWarning, match="not supported on CPU"),
        pytest.raises(UnsupportedError, match=r"paged: .*cannot page memory of cpu"),
    ):
        optimizer_factory(section)(named("x"))


@pytest.fixture
def pages_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own memory stands in for what the driver would move."""

    def buffer(self: object, p: Tensor, dtype: torch.dtype) -> Tensor:
        made = torch.zeros_like(p, dtype=dtype)
        made.is_paged = self.is_paged and p.numel() >= PAGED_FROM  # type: ignore[attr-defined]
        return made

    monkeypatch.setattr("bitsandbytes.optim.optimizer.Optimizer8bit.get_state_buffer", buffer)
    monkeypatch.setattr("bitsandbytes.functional.prefetch_tensor", lambda tensor: None)


@pytest.mark.usefixtures("pages_on_the_host")
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_paged_state_is_asked_of_bitsandbytes(name: str) -> None:
    for paged in (False, True):
        made: Any = optimizer_factory(optimizer_section(name=name, paged=paged))(named("x"))
        assert getattr(made, "is_paged", False) is paged


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_is_fused_where_the_backend_says_so(fused: bool) -> None:
    """Without a trial, which passes where a device hands to the host what it cannot compute."""
    there = [("x", nn.Parameter(torch.empty(2, 3, device="meta")))]
    with Operations() as seen:
        made = optimizer_factory(optimizer_section(), fused=fused)(there)
    assert bool(made.param_groups[0]["fused"]) is fused
    assert not seen.names(), "something was tried"


def test_the_hosts_own_tensors_have_a_fused_update_on_every_device() -> None:
    assert optimizer_factory(optimizer_section(), fused=False)(named("x")).param_groups[0]["fused"]


def test_a_kernel_for_updates_comes_before_both() -> None:
    def kernel(groups: Any, *, lr: float, betas: Any, eps: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=lr)

    for fused in (False, True):
        made = optimizer_factory(optimizer_section(), kernel, fused=fused)(named("x"))
        assert isinstance(made, torch.optim.SGD)
    other = optimizer_factory(optimizer_section(name="lion"), kernel)(named("x"))
    assert not isinstance(other, torch.optim.SGD)


Step = Callable[[Tensor, Tensor, dict[str, Any], int, float, float], Tensor]
"""(parameter, gradient, state, step from 1, lr, decay) -> new parameter, all float64."""


def adamw(p: Tensor, g: Tensor, s: dict[str, Any], t: int, lr: float, decay: float) -> Tensor:
    s["m"] = 0.9 * s.get("m", 0.0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0.0) + 0.001 * g * g
    mean, square = s["m"] / (1 - 0.9**t), s["v"] / (1 - 0.999**t)
    return p - lr * decay * p - lr * mean / (square.sqrt() + 1e-8)


def early_adamw(p: Tensor, g: Tensor, s: dict[str, Any], t: int, lr: float, decay: float) -> Tensor:
    """Epsilon is added before the second moment's bias is corrected; 1e-2, so that it shows."""
    s["m"] = 0.9 * s.get("m", 0.0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0.0) + 0.001 * g * g
    size = lr * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
    return p - lr * decay * p - size * s["m"] / (s["v"].sqrt() + 1e-2)


def lion(p: Tensor, g: Tensor, s: dict[str, Any], t: int, lr: float, decay: float) -> Tensor:
    m = s.get("m", torch.zeros_like(p))
    s["m"] = 0.99 * m + 0.01 * g
    return p - lr * (torch.sign(0.9 * m + 0.1 * g) + decay * p)


def sgd(p: Tensor, g: Tensor, s: dict[str, Any], t: int, lr: float, decay: float) -> Tensor:
    s["m"] = 0.9 * s.get("m", 0.0) + g
    return p - lr * (s["m"] + decay * p)


def muon(p: Tensor, g: Tensor, s: dict[str, Any], t: int, lr: float, decay: float) -> Tensor:
    """Of matrices: the iteration of https://kellerjordan.github.io/posts/muon/, in bfloat16."""
    if p.dim() == 1:
        return adamw(p, g, s, t, lr, decay)
    s["m"] = 0.95 * s.get("m", torch.zeros_like(g)) + 0.05 * g
    x = (0.05 * g + 0.95 * s["m"]).to(torch.bfloat16)
    x = x / x.norm()
    for _ in range(5):
        product = x @ x.T
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return p - lr * decay * p - 0.2 * max(p.shape) ** 0.5 * lr * x.double()


def adafactor(p: Tensor, g: Tensor, s: dict[str, Any], t: int, lr: float, decay: float) -> Tensor:
    keep, square = 1 - t**-0.8, g * g
    if p.dim() == 1:
        s["v"] = keep * s.get("v", 0.0) + (1 - keep) * square
        estimate = s["v"]
    else:
        s["r"] = keep * s.get("r", 0.0) + (1 - keep) * square.mean(1)
        s["c"] = keep * s.get("c", 0.0) + (1 - keep) * square.mean(0)
        estimate = torch.outer(s["r"], s["c"]) / s["r"].mean()
    update = g / estimate.sqrt()
    update = update / max(1.0, float(update.square().mean().sqrt()))
    size = max(1e-3, float(p.square().mean().sqrt())) * min(lr, 1 / math.sqrt(t))
    return p - lr * decay * p - size * update


EARLY, PAGED_ADAMW = "adamw, a device's own", "adamw, paged"
REFERENCES: dict[str, Step] = {
    "adamw": adamw,
    EARLY: early_adamw,
    PAGED_ADAMW: adamw,
    "adamw_8bit": adamw,
    "adafactor": adafactor,
    "lion": lion,
    "muon": muon,
    "sgd": sgd,
}


def made(name: str, parameters: Iterable[tuple[str, nn.Parameter]], **fields: Any) -> Any:
    """An optimizer; for a device's own, what stands in for its kernel elsewhere."""
    if name == EARLY:
        section = optimizer_section(name="adamw", eps=1e-2, **fields)
        return optimizer_factory(section, early_epsilon())(parameters)
    if name == PAGED_ADAMW:
        name, fields = "adamw", {**fields, "paged": True}
    return optimizer_factory(optimizer_section(name=name, **fields))(parameters)


RATES = (0.02, 0.03, 0.01, 0.02)


@pytest.mark.usefixtures("pages_on_the_host")
@pytest.mark.parametrize("name", REFERENCES)
def test_follows_its_formula(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    values = {
        "w": torch.randn(64, 80, generator=generator),
        "b": torch.randn(7, generator=generator),
    }
    parameters = {key: nn.Parameter(value.clone()) for key, value in values.items()}
    optimizer = made(name, parameters.items(), lr=RATES[0], weight_decay=0.3)
    expected = {key: value.double() for key, value in values.items()}
    states: dict[str, dict[str, Any]] = {"w": {}, "b": {}}
    for step, lr in enumerate(RATES, 1):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for key, parameter in parameters.items():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient
            expected[key] = REFERENCES[name](
                expected[key], gradient.double(), states[key], step, lr, 0.3 if key == "w" else 0.0
            )
        optimizer.step()
    moved = {key: (expected[key] - values[key]).abs().mean() for key in values}
    for key, parameter in parameters.items():
        error = (parameter.detach().double() - expected[key]).abs()
        # Codes of 8 bits are off by percents of their block's largest; the mean update by less.
        quantized = name == "adamw_8bit" and key == "w"
        # Muon's iteration is in bfloat16, whose roundings depend on how sums are ordered.
        rough = quantized or (name == "muon" and key == "w")
        assert error.mean() < (0.03 if rough else 1e-5) * moved[key], key
        assert not quantized or error.max() > 1e-6, "the moments were not quantized"


@pytest.mark.usefixtures("pages_on_the_host")
def test_state_is_of_the_parameters_shape() -> None:
    """What a checkpoint relies on."""
    shapes = {}
    for name in REFERENCES:
        parameter = nn.Parameter(torch.randn(64, 80))
        parameter.grad = torch.randn(64, 80)
        optimizer = made(name, [("w", parameter)])
        optimizer.step()
        shapes[name] = {
            key: tuple(value.shape) if isinstance(value, Tensor) else type(value)
            for key, value in optimizer.state[parameter].items()
        }
    whole = (64, 80)
    assert shapes == {
        **{key: {"step": (), "exp_avg": whole, "exp_avg_sq": whole} for key in ("adamw", EARLY)},
        PAGED_ADAMW: {"step": int, "exp_avg": whole, "exp_avg_sq": whole},
        "adamw_8bit": {
            "step": int,
            "state1": whole,
            "state2": whole,
            "absmax1": (20,),
            "absmax2": (20,),
            "qmap1": (256,),
            "qmap2": (256,),
        },
        "adafactor": {"step": (), "row_var": (64, 1), "col_var": (1, 80)},
        "lion": {"exp_avg": whole},
        "muon": {"momentum_buffer": whole},
        "sgd": {"momentum_buffer": whole},
    }


@pytest.mark.parametrize(
    ("name", "shape", "taken"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), True),
        ("model.layers.0.self_attn.q_proj.lora_A.default.weight", (2, 8), True),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 8), False),
        ("model.norm.weight", (8,), False),
        ("model.embed_tokens.weight", (9, 8), False),
        ("transformer.wte.weight", (9, 8), False),
        ("model.embed_tokens.lora_embedding_A.default", (2, 9), False),
        ("lm_head.weight", (9, 8), False),
    ],
)
def test_muon_takes_matrices_of_hidden_layers(
    name: str, shape: tuple[int, ...], taken: bool
) -> None:
    """And keeps one moment of them, of all else two: what a plan counts is what is kept."""
    assert takes_muon(name, shape) is taken
    parameter = nn.Parameter(torch.randn(shape))
    parameter.grad = torch.randn(shape)
    optimizer = made("muon", [(name, parameter)])
    optimizer.step()
    kept = [v for key, v in optimizer.state[parameter].items() if key != "step"]
    model: Any = SimpleNamespace(named_parameters=lambda: [(name, parameter)])
    planned = state_bytes(run(train={"optimizer": MUON}), Registry.load(), model)
    assert planned * parameter.numel() == sum(v.numel() * v.element_size() for v in kept)


def test_momentum_zero_keeps_no_state() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.full((2, 2), 0.5)
    section = optimizer_section(name="sgd", lr=0.1, momentum=0.0)
    optimizer = optimizer_factory(section)([("w", parameter)])
    optimizer.step()
    assert torch.allclose(parameter.detach(), torch.full((2, 2), 0.95))
    assert not optimizer.state[parameter]


Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "several tensors at once": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "one after another": lambda groups: torch.optim.AdamW(groups, foreach=False),
    "fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "lion": lambda groups: Lion(groups, lr=1e-2, betas=(0.9, 0.99)),
    "sgd": lambda groups: DecoupledSGD(groups, lr=1e-2, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "muon": lambda groups: MuonAdamW(
        OptimizerContext(
            groups=groups,
            names={p: "weight" for group in groups for p in group["params"]},
            options=optimizer_section(name="muon"),
            adamw=torch.optim.AdamW,
        )
    ),
}


def trained(make: Make) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Matrices and vectors, of which one has never a gradient."""
    torch.manual_seed(0)
    shapes = [(7, 5), (9,), (30, 40), (3,), (2, 2)]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    groups = [
        {
            "params": [p for p in parameters if (p.dim() == 2) is matrices],
            "weight_decay": 0.1 * matrices,
            "lr": 1e-2,
        }
        for matrices in (True, False)
    ]
    return parameters, make(groups)


def gradients(parameters: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in parameters[:-1]:
        parameter.grad = torch.randn_like(parameter)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("at_once", [1, 50, 10**6])
def test_finite_steps_are_the_optimizers_own_until_one_is_not(
    make: Make, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "UPDATED_AT_ONCE", at_once)
    wanted, plain = trained(make)
    found, optimizer = trained(make)
    steps = FiniteSteps(with_found_inf(optimizer))
    for seed in range(3):
        gradients(wanted, seed)
        plain.step()
        gradients(found, seed)
        steps.step(torch.tensor(1.0))
    assert all(map(torch.equal, found, wanted))
    assert not hasattr(optimizer, "found_inf")
    for norm in (torch.nan, 1.0, torch.inf):
        gradients(found, 7)
        if norm != 1.0:
            found[2].grad[3, 4] = norm
        steps.step(torch.tensor(norm))
        assert all(map(torch.equal, found, wanted)), "also after the one that was not finite"


def test_an_optimizer_that_cannot_is_refused() -> None:
    _, optimizer = trained(MAKERS["several tensors at once"])
    with pytest.raises(TypeError, match="AdamW does not take found_inf"):
        FiniteSteps(optimizer)


@pytest.mark.parametrize("factor", [1.0, 0.3, 2.0**16 / 7])
def test_a_finite_loss_has_the_gradient_that_it_would_have(factor: float) -> None:
    x = torch.linspace(-3, 5, 9, requires_grad=True)
    (gradient,) = torch.autograd.grad(propagate_nonfinite((x**3).sum(), factor), x)
    (wanted,) = torch.autograd.grad((x**3).sum() * factor, x)
    assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_loss_that_is_not_finite_makes_its_gradient_so(bad: float) -> None:
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(propagate_nonfinite(x.sum() + bad, 0.5), x)
    assert not gradient.isfinite().any()
