"""The stand-in for CUDA and NCCL beside the arguments that the installed torch publishes."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from tests.helpers.child_processes import printed
from tests.helpers.nvidia import STANDIN, needs_cards, standin_site
from tests.standins.signatures import Function, arguments

TORCH = Path(importlib.util.find_spec("torch").origin).parent  # type: ignore[union-attr, arg-type]
SOURCE = (STANDIN / "site" / "cuda_standin.py").read_text(encoding="utf-8")

OWN = {
    # Made in C++ and called by torch.cuda, but in no published stub.
    "_cuda_isInBadFork": "torch/cuda/__init__.py",
    # Its stub leaves out that it takes the keywords by which torch.cuda names a stream.
    "_CudaStreamBase.__new__": "torch/cuda/__init__.py",
    # Their stubs name the type of the stream alone.
    "ProcessGroupNCCL.eager_connect_single_device": "torch/distributed/distributed_c10d.py",
    "ProcessGroupNCCL._set_sequence_number_for_group": "torch/distributed/distributed_c10d.py",
    "ProcessGroupNCCL.supports_splitting": "torch/distributed/distributed_c10d.py",
    "_CudaStreamBase.cuda_stream": "an attribute in the stub",
    "_CudaStreamBase.priority": "an attribute in the stub",
}
"""What no stub has as a function of these arguments -> where torch calls it so."""


def functions(text: str) -> dict[str, Function]:
    """Functions by name; those of classes by Class.name, the innermost class."""
    found: dict[str, Function] = {}

    def visit(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, Function):
                found.setdefault(owner + node.name, node)
                visit(node.body, owner)
            elif isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")

    visit(ast.parse(text).body, "")
    return found


def published() -> dict[str, Function]:
    stubs = (TORCH / "_C" / name for name in ("__init__.pyi", "_distributed_c10d.pyi"))
    texts = [stub.read_text(encoding="utf-8") for stub in stubs]
    # Both have a class Options; what is compared is NCCL's.
    nccl = texts[1].partition("class ProcessGroupNCCL(Backend):")[2].partition("\nclass ")[0]
    inner = functions("class ProcessGroupNCCL:" + nccl)
    backend = texts[1].partition("class Backend:")[2].partition("\nclass ")[0]
    base = functions("class ProcessGroupNCCL:" + backend)
    nvtx = (TORCH / "_C" / "_nvtx.pyi").read_text(encoding="utf-8")
    marks = {f"_Nvtx.{name}": function for name, function in functions(nvtx).items()}
    return {**functions(texts[0]), **base, **inner, **marks}


def differences(text: str) -> list[str]:
    """Where the stand-in's functions of torch._C take other arguments than the stubs say."""
    stubs, found = published(), []
    for name, function in functions(text).items():
        owner = name.partition(".")[0]
        of_torch = name.startswith("_cuda_") or owner in (
            *("_CudaStreamBase", "_CudaEventBase", "ProcessGroupNCCL", "Options", "_Nvtx"),
        )
        if not of_torch or name in OWN:
            continue
        if name not in stubs:
            found.append(f"{name}: torch has no such function")
        elif arguments(function) != arguments(stubs[name]):
            there = ", ".join(arguments(stubs[name]))
            found.append(f"{name}({', '.join(arguments(function))}), there ({there})")
    return found


def test_names_and_arguments_are_those_of_torch() -> None:
    assert differences(SOURCE) == []


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("def _cuda_setDevice(device: int)", "def _cuda_setDevice(index: int)", "_cuda_setDevice("),
        ("def _cuda_synchronize()", "def _cuda_synchronize(device=None)", "there ()"),
        ("def _cuda_emptyCache()", "def _cuda_clearCache()", "no such function"),
        ("rank: int, size: int, options: Options", "rank: int, options: Options", "there (self,"),
        ("is_high_priority_stream: bool = False", "high: bool = False", "Options.__init__("),
        ("blocking: bool = False, ", "", "_CudaEventBase.__new__("),
    ],
)
def test_a_difference_is_found(before: str, after: str, said: str) -> None:
    assert before in SOURCE
    assert any(said in line for line in differences(SOURCE.replace(before, after)))


@pytest.mark.parametrize("name", sorted(set(OWN.values()) - {"an attribute in the stub"}))
def test_what_no_stub_has_is_called_by_torch(name: str) -> None:
    text = (TORCH.parent / name).read_text(encoding="utf-8")
    for member, where in OWN.items():
        last = member.rpartition(".")[2]
        assert where != name or last == "__new__" or last in text


STRICT = """
import torch
assert torch.cuda.device_count() == {count}, torch.cuda.device_count()
for wrong, said in (
    (lambda: torch.cuda.set_device({count}), "invalid device ordinal"),
    (lambda: torch.cuda.set_device("cpu"), "Expected a cuda device"),
    (lambda: torch.cuda.get_device_name(device=7), "Invalid device"),
    (lambda: torch.cuda.synchronize(wait=True), "unexpected keyword"),
    (lambda: torch.cuda.CUDAGraph(), "dummy base class"),
    (lambda: torch.ones(2, device="cuda") + torch.ones(2), "same device"),
    (lambda: torch.distributed.init_process_group("nccl", rank=0, world_size=1,
        store=torch.distributed.HashStore(), pg_options=3), "ProcessGroupNCCL.Options"),
):
    try:
        wrong()
    except Exception as error:
        assert said in str(error), (said, error)
    else:
        raise AssertionError(said)
assert {{torch.cuda.get_device_properties(i).uuid for i in range({count})}} == {uuids}
"""


@needs_cards
@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, {"GPU-0", "GPU-1"}),
        ("1", {"GPU-1"}),
        ("1,0", {"GPU-0", "GPU-1"}),
        ("1,7,0", {"GPU-1"}),
    ],
)
def test_it_refuses_what_torch_and_cuda_refuse(
    visible: str | None, uuids: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    code = STRICT.format(count=len(uuids), uuids=uuids)
    printed(code, environment={"PYTHONPATH": str(standin_site(tmp_path))})
