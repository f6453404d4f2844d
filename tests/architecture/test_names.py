"""The portable core names no device: not in a string, not in an identifier. What DeepSpeed calls
its own stands in its strategy alone."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from tests.architecture.names import ENGINE, HOST, Found, engine_names, find_names
from tests.architecture.repository import CORE

# Where torch's name for the host's memory is given a name of its own; everything else uses that.
HOST_DEVICE_HOME = CORE / "interface/placement.py"

WAIVERS = {
    (HOST_DEVICE_HOME, HOST): "the name itself",
    (CORE / "strategies/zero_settings.py", "zero_force_ds_cpu_optimizer"): "a field of DeepSpeed's",
    (CORE / "launch/environment.py", "sys/devices/system/cpu/cpu"): "a path of the Linux kernel",
    (CORE / "data/rows.py", "/sys/fs/cgroup/cpu.max"): "likewise",
}
"""(file, the whole text) of what may stand, and why."""


def core_names() -> list[Found]:
    sources = sorted(CORE.rglob("*.py"))
    assert HOST_DEVICE_HOME in sources
    return [one for path in sources for one in find_names(path)]


def test_the_core_names_no_device():
    found = [one for one in core_names() if (one.path, one.text) not in WAIVERS]
    assert not found, "\n".join(map(str, found))


def test_every_waiver_is_needed():
    assert {(one.path, one.text) for one in core_names()} >= set(WAIVERS)


def test_the_core_knows_no_engine() -> None:
    home = CORE / "strategies"
    assert list(home.glob(f"{ENGINE}*.py"))
    found = [
        f"{path}:{line}: {text!r}"
        for path in sorted(CORE.rglob("*.py"))
        if not (path.parent == home and path.name.startswith(ENGINE))
        for line, text in engine_names(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "count = parameter.ds_numel",
        'shape = getattr(parameter, "ds_shape", None)',
        'if run.strategy.name == "zero": ...',
        'packages = ["torch", "deepspeed"]',
        'text = f"DeepSpeed has {fields}"',
    ],
)
def test_a_planted_name_of_an_engine_is_found(source: str) -> None:
    assert len(engine_names(ast.parse(source))) == 1


@pytest.fixture
def find(tmp_path: Path):
    def found(source: str) -> list[tuple[int, str]]:
        path = tmp_path / "planted.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return [(one.line, one.word) for one in find_names(path)]

    return found


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ('device = "cuda"', "cuda"),
        ('device = "cuda:0"', "cuda"),
        ('place = f"hpu:{rank}"', "hpu"),
        ('place = f"{kind} on Gaudi2"', "gaudi"),
        ('table = {"nccl": 1}', "nccl"),
        ('module = "habana_frameworks.torch"', "habana"),
        ('import os; os.environ["PT_HPU_LAZY_MODE"]', "hpu"),
        ('name = "CUDA_VISIBLE_DEVICES"', "cuda"),
        ('name = "HCCL_OVER_TCP"', "hccl"),
        ('name = "GLOO_SOCKET_IFNAME"', "gloo"),
        ('kind = "CudaError"', "cuda"),
        ('name = b"rocm"', "rocm"),
        ('text = "an NVIDIA card"', "nvidia"),
        ('call(x, "mps")', "mps"),
        ('where = "cpu"', "cpu"),
        ('def f(device="xpu"): ...', "xpu"),
        ('text = ("one "\n        "tpu")', "tpu"),
        ("torch.cuda.synchronize()", "cuda"),
        ("import torch.mps", "mps"),
        ("from transformers.utils import is_torch_npu_available", "npu"),
        ("use_cuda = True", "cuda"),
        ("make(with_neuron=True)", "neuron"),
    ],
)
def test_a_planted_name_is_found(find, source, word):
    assert [found for _, found in find(source)] == [word]


def test_the_line_is_named(find):
    assert find('a = 1\n\n\nb = {"x": ["mlu"]}\n') == [(4, "mlu")]


def test_documentation_and_longer_words_are_no_names(find):
    source = '''
    """The module: cuda, for instance."""

    # hpu in a comment
    LIMIT = 1
    """What the attribute means on an NVIDIA card."""


    class A:
        """Gaudi."""

        def f(self):
            """nccl."""
            return "inputs", "dumps", "tpus", "cpus", "manipulate", "neurons"


    count = os.cpu_count()
    host = tensor.cpu()
    '''
    assert find(source) == []
