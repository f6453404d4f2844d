"""The stand-in for Gaudi's software beside the source that it was made from."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.child_processes import printed
from tests.helpers.gaudi import STANDIN, calls, needs_cards, standin_environment, standin_site
from tests.standins.signatures import differences

SOURCE = os.environ.get("ANYGAUGE_GAUDI_SOURCE")
"""A checkout of HabanaAI/gaudi-pytorch-bridge of release 1.19."""

OPTIMIZERS = """
import json, torch
import habana_frameworks.torch.hpu as hpu
import habana_standin
from torch.utils import _foreach_utils as lists
from anygauge.config.sections import OptimizerSection
from anygauge.training.optimizer import optimizer_factory
from anygauge.training.build_strategy import FUSED_ADAMW
from anygauge_hpu.backend import HpuBackend

hpu.init()
found = {
    "fused": "hpu" in lists._get_fused_kernels_supported_devices(),
    "several": "hpu" in lists._get_foreach_kernels_supported_devices(),
}

def left_to_the_host(make):
    before = habana_standin.census().fallbacks.copy()
    weight = torch.nn.Parameter(torch.ones(4, 4, device="hpu"))
    weight.grad = torch.ones_like(weight)
    optimizer = make(weight)
    optimizer.step()
    return dict(habana_standin.census().fallbacks - before), float(weight.detach()[0, 0])

fused = bool(HpuBackend().support(FUSED_ADAMW))
found["trial"], _ = left_to_the_host(lambda w: torch.optim.AdamW([w], lr=0.5, fused=True))
section = OptimizerSection.model_validate({"lr": 0.5})
found["ours"], found["weight"] = left_to_the_host(
    lambda w: optimizer_factory(section, fused=fused)([("weight", w)])
)
print(json.dumps(found))
"""

OVERWRITTEN = """
import torch
import habana_frameworks.torch.core
from habana_frameworks.torch.utils.internal import is_lazy

changed = [torch.manual_seed, torch.distributed.new_group, torch.distributed.init_process_group]
if is_lazy():
    changed += [torch.nn.Module.add_module, torch.nn.Module.__setattr__]
theirs = [torch.seed, torch.random.fork_rng, torch.Tensor.record_stream]
for functions in (changed, theirs):
    codes = [getattr(f, "__code__", None) for f in functions]
    print([getattr(code, "co_filename", "") for code in codes])
"""

MOVED = """
import json, torch
import habana_frameworks.torch.core
from torch import nn

model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
model[1].weight = model[0].weight
first = model[0].weight
model.to("hpu")
layer = nn.Linear(2, 2).to("cpu")
weight = layer.weight
weight.data = weight.data.to("hpu")  # what FSDP2 does with the parameters that it was given
found = {
    "class": type(first).__name__,
    "replaced": model[0].weight is not first,
    "shared": model[0].weight is model[1].weight,
    "device of the first": first.device.type,
    "replaced by its data": layer.weight is not weight,
    "order": list(layer._parameters),
    "devices": [weight.device.type, layer.weight.device.type],
    "a leaf": layer.weight.is_leaf,
}
try:
    never = nn.Linear(2, 2)
    never.bias.data = never.bias.data.to("hpu")
except Exception as error:
    found["of a module that never moved"] = type(error).__name__
print(json.dumps(found))
"""

PROFILED = """
import json, sys, torch
from pathlib import Path
from unittest import mock
from anygauge_hpu.backend import HpuBackend

folder = Path(FOLDER)
with HpuBackend() as backend:
    device = backend.open(0)
    with mock.patch("torch.profiler.profile", wraps=torch.profiler.profile) as made:
        with backend.placement.profile(folder):
            torch.ones(4, device=device).sum()
given = made.call_args.kwargs
found = {
    "activities": [each.name for each in given["activities"]],
    "allocations": given["profile_memory"],
    "files": sorted(each.name for each in folder.iterdir()),
    "table": (folder / "memory.txt").read_text().splitlines()[0],
}
print(json.dumps(found))
"""

CHANGES = {
    "a method's argument": (
        "torch/hpex/normalization/__init__.py",
        "gamma, eps",
        "weight, eps",
        "FusedRMSNorm.forward: (ctx, data_in, weight, eps,",
    ),
    "a function that is absent there": (
        "torch/hpu/memory.py",
        "def mem_get_info(",
        "def empty_cache(",
        "habana_frameworks.torch.hpu.memory.empty_cache: there is no such function",
    ),
}


@pytest.fixture(scope="module")
def source() -> Path:
    if SOURCE is None:
        pytest.skip("ANYGAUGE_GAUDI_SOURCE names no checkout of gaudi-pytorch-bridge")
    return Path(SOURCE) / "python_packages"


@pytest.fixture(params=["model", "bridge"])
def by(request: pytest.FixtureRequest) -> str:
    """Who replaces functions and classes of torch: the stand-in, or the bridge's own files."""
    if request.param == "bridge" and not SOURCE:
        pytest.skip("ANYGAUGE_GAUDI_SOURCE names no checkout of gaudi-pytorch-bridge")
    return str(request.param)


def test_names_and_arguments_are_those_of_the_source(source: Path) -> None:
    assert differences(STANDIN, source) == []


@pytest.mark.parametrize("case", CHANGES)
def test_a_difference_is_found(source: Path, tmp_path: Path, case: str) -> None:
    name, before, after, said = CHANGES[case]
    shutil.copytree(STANDIN, tmp_path / "changed")
    file = tmp_path / "changed/habana_frameworks" / name
    text = file.read_text(encoding="utf-8")
    assert before in text
    file.write_text(text.replace(before, after), encoding="utf-8")
    found = differences(tmp_path / "changed", source)
    assert [line for line in found if said in line], found


def on_standin(script: str, folder: Path, **variables: str) -> list[str]:
    """The lines that a process with the stand-in prints; its calls are in ``folder/record.0``."""
    environment = standin_environment(standin_site(folder), folder / "record")
    return printed(script, environment={**environment, "PT_HPU_LAZY_MODE": "1", **variables})


@needs_cards
def test_a_trial_of_the_fused_optimizer_cannot_fail_and_none_is_made(tmp_path: Path) -> None:
    """torch lists the device and the host computes what it has no kernel for: only the backend's
    word tells that the update would leave the card."""
    found: dict[str, Any] = json.loads(on_standin(OPTIMIZERS, tmp_path)[-1])
    assert found["fused"] and not found["several"]
    assert found["trial"] == {"_fused_adamw_": 1}
    assert found["ours"] == {}
    assert found["weight"] == pytest.approx(0.5)


@needs_cards
@pytest.mark.parametrize("mode", ["1", "0"])
def test_functions_of_torch_are_replaced(tmp_path: Path, by: str, mode: str) -> None:
    given = {"ANYGAUGE_GAUDI_SOURCE": SOURCE or "" if by == "bridge" else ""}
    lines = on_standin(OVERWRITTEN, tmp_path, PT_HPU_LAZY_MODE=mode, **given)
    changed, theirs = map(json.loads, (line.replace("'", '"') for line in lines[-2:]))
    end = "habana_frameworks/torch/core/torch_overwrites.py"
    place = Path(SOURCE or "", "python_packages") if by == "bridge" else tmp_path
    assert all(name.startswith(str(place)) and name.endswith(end) for name in changed)
    assert all(name.startswith(str(place)) == (by == "bridge") for name in theirs)
    assert ["overwrites", by] in calls(tmp_path / "record", 0)


@needs_cards
def test_a_parameter_that_moves_is_replaced_and_stays_shared(tmp_path: Path, by: str) -> None:
    given = {"ANYGAUGE_GAUDI_SOURCE": SOURCE or "" if by == "bridge" else ""}
    assert json.loads(on_standin(MOVED, tmp_path, **given)[-1]) == {
        "class": "HabanaParameterWrapper",
        "replaced": True,
        "shared": True,
        "device of the first": "hpu",
        "replaced by its data": True,
        "order": ["bias", "weight"],
        "devices": ["hpu", "hpu"],
        "a leaf": False,
        "of a module that never moved": "AttributeError",
    }


@needs_cards
def test_a_profile_names_gaudis_own_profiler_and_has_its_allocators_table(tmp_path: Path) -> None:
    (folder := tmp_path / "profile").mkdir()
    script = PROFILED.replace("FOLDER", repr(str(folder)))
    found = json.loads(on_standin(script, tmp_path)[-1])
    assert found == {
        "activities": ["CPU", "HPU"],
        "allocations": False,
        "files": ["memory.json", "memory.txt", "trace.json.gz"],
        "table": "PyTorch HPU memory summary",
    }
