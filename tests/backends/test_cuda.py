"""The CUDA backend: what it finds in fake trees, asks for by what a node shows, and refuses."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.config.schema import PrecisionSection, resolve_precision
from anygauge.interface import Level, NotAvailableError, RdmaDevice, RunFileError, Skip
from anygauge.kernels.choose import choose_kernels
from anygauge.launch.rank_environment import inspect_node
from anygauge.registry import Registry
from anygauge_cuda.backend import CudaBackend
from anygauge_cuda.diagnostics import _compatibility, _surprises, checks, driver_serves
from anygauge_cuda.placement import CudaPlacement, published_peak, without_kernels
from anygauge_cuda.probe import driver_version, probe, torch_cuda_version
from tests.helpers.fake_files import write_tree
from tests.helpers.plans_from_options import backend_with
from tests.helpers.sample_machines import BRIDGE, ETH0, ETH1, LO, VIRTUAL, by_name, job, machine

PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
    "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n"
)
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build  (dvs@b)  "
    "Sat Jan 11\n"
)
REPOSITORY = Path(__file__).parents[2]

WITH_CUDA = "__version__ = '2.9.0+cu128'\ndebug = False\ncuda: Optional[str] = '12.8'\nhip = None\n"
WITHOUT_CUDA = "__version__ = '2.9.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.2'\n"

DRIVER = {"proc/driver/nvidia/version": PROPRIETARY}
FILES = {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""}
TORCH = {"torch/version.py": WITH_CUDA}

EFA = RdmaDevice(name="rdmap0", driver="efa", link_layer="Unspecified")
INFINIBAND = RdmaDevice(name="mlx5_0", driver="mlx5_core", link_layer="InfiniBand")


def pci(address: str, vendor: str, kind: str) -> dict[str, str]:
    base = f"sys/bus/pci/devices/{address}"
    return {f"{base}/vendor": f"{vendor}\n", f"{base}/class": f"{kind}\n"}


def look(root: Path, *parts: dict[str, str]) -> Any:
    for files in parts:
        write_tree(root, files)
    return probe(root, root / "torch")


# -- finding it ------------------------------------------------------------------------------

GVISOR = {"dev/nvidia0": "", "dev/nvidiactl": ""}
MACHINES: dict[str, tuple[list[dict[str, str]], bool, int | None, str]] = {
    "complete": ([FILES, DRIVER, TORCH], True, 2, "535.129.03.*CUDA 12.8"),
    "gVisor shows device files alone": ([GVISOR, TORCH], True, 1, "not shown"),
    "device files outlive a driver": (
        [GVISOR, TORCH, {"sys/module/ext4/version": ""}], False, 1, "driver is not loaded",
    ),
    "WSL": ([{"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""}, TORCH], True, None, ""),
    "WSL, the driver in its store": (
        [{"dev/dxg": "", "usr/lib/wsl/drivers/nv_dispi.inf_amd64_1/libcuda.so.1.1": ""}, TORCH],
        True, None, "",
    ),
    "WSL without the vendor's library": ([{"dev/dxg": ""}, TORCH], False, None, ""),
    "no GPU": (
        [TORCH, pci("0000:00:02.0", "0x8086", "0x030000")],
        False, None, "no NVIDIA GPU.*driver is not loaded",
    ),
    "no driver": ([TORCH, pci("0000:3b:00.0", "0x10de", "0x030200")], False, 1, "/dev/nvidia"),
    "a container that was given two of eight": (
        [*(pci(f"0000:{n}b:00.0", "0x10de", "0x030200") for n in range(8)), FILES, DRIVER],
        False, 2, "",
    ),
    "what only the driver lists": (
        [{"proc/driver/nvidia/gpus/0000:3b:00.0/information": "Model: \t\t NVIDIA A10\nIRQ: 34\n"}],
        False, 1, "cards=NVIDIA A10$",
    ),
    "torch without CUDA": (
        [FILES, DRIVER, {"torch/version.py": WITHOUT_CUDA}], False, 2, "without CUDA",
    ),
}  # fmt: skip
"""Files -> whether it can be used, how many GPUs there are, and what is said."""


@pytest.mark.parametrize("name", MACHINES)
def test_what_a_machine_shows(name: str, tmp_path: Path) -> None:
    files, available, count, said = MACHINES[name]
    found = look(tmp_path, *files)
    assert (found.available, found.device_count) == (available, count), found.reason
    assert found.has_hardware is (available or count is not None)
    parts = (found.reason, found.driver.detail, found.software.detail, *found.notes)
    shown = " ".join([*parts, f"cards={','.join(found.cards)}"])
    assert re.search(said, shown), shown


@pytest.mark.parametrize(
    ("vendor", "kind", "is_gpu"),
    [
        ("0x10de", "0x030000", True),  # a VGA controller
        ("0x10de", "0x030200", True),  # a 3D controller, as data centre cards are
        ("0x10de", "0x040300", False),  # the sound device on a graphics card
        ("0x10de", "0x068000", False),  # an NVSwitch
        ("0x1da3", "0x120000", False),  # another vendor's accelerator
        ("0x1002", "0x030000", False),  # another vendor's GPU
    ],
)
def test_gpus_on_the_bus(tmp_path: Path, vendor: str, kind: str, is_gpu: bool) -> None:
    found = look(tmp_path, pci("0000:3b:00.0", vendor, kind))
    assert found.has_hardware is is_gpu


@pytest.mark.parametrize(
    ("path", "text", "version"),
    [
        ("proc/driver/nvidia/version", PROPRIETARY, "535.129.03"),
        ("proc/driver/nvidia/version", OPEN, "570.86"),
        ("sys/module/nvidia/version", "550.54.15\n", "550.54.15"),
        ("proc/driver/nvidia/version", "", None),
    ],
)
def test_driver_version(tmp_path: Path, path: str, text: str, version: str | None) -> None:
    assert driver_version(write_tree(tmp_path, {path: text})) == version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (WITH_CUDA, "12.8"),
        (WITHOUT_CUDA, None),
        ("cuda = '11.8'\n", "11.8"),
        ('cuda: str | None = "13.0"\n', "13.0"),
        ("cuda = None\n", None),
        ("", None),
    ],
)
def test_the_build_of_torch_is_read_as_text(tmp_path: Path, text: str, version: str | None) -> None:
    assert torch_cuda_version(write_tree(tmp_path, {"version.py": text})) == version


# -- environment -----------------------------------------------------------------------------


def test_a_single_node_needs_no_fabric() -> None:
    node = machine(interfaces=(LO, ETH0, ETH1, BRIDGE), rdma_devices=(EFA, INFINIBAND))
    the_job = job(devices=4)
    found = by_name(CudaBackend().environment(the_job, node, 0))
    assert found["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"].value == the_job.collectives_record
    assert set(found) == {
        "CUDA_DEVICE_ORDER",
        "PYTORCH_CUDA_ALLOC_CONF",
        "GLOO_SOCKET_IFNAME",
        "OMP_NUM_THREADS",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    }
    assert found["GLOO_SOCKET_IFNAME"].value == "lo"
    assert found["OMP_NUM_THREADS"].value == "2"


EQUAL_BITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
MIG = "/proc/driver/nvidia/capabilities/gpu0/mig/gi1/access"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"texts": {MIG: "DeviceFileMinor: 12"}}, "MIG"),
        ({"variables": {"CUDA_VISIBLE_DEVICES": "MIG-3a1b"}}, "MIG"),
        ({"texts": {"/dev/dxg": ""}}, "WSL2"),
    ],
)
def test_segments_do_not_grow_where_that_fails(fields: dict[str, Any], why: str) -> None:
    decided = CudaBackend().explain_environment(job(), machine(**fields))
    (skipped,) = (d for rule, d in decided if rule.name == "PYTORCH_CUDA_ALLOC_CONF")
    assert isinstance(skipped, Skip) and why in skipped.reason


def test_the_devices_of_a_machine_reach_the_rules(tmp_path: Path) -> None:
    """Under WSL2 it is a device, not a regular file."""
    (tmp_path / "dev").mkdir()
    os.mkfifo(tmp_path / "dev/dxg")
    write_tree(tmp_path, {MIG.lstrip("/"): "x", "proc/driver/nvidia/version": PROPRIETARY})
    backend = CudaBackend()
    found = inspect_node(backend, {}, root=tmp_path).texts
    assert {"/dev/dxg", MIG, "/proc/driver/nvidia/version"} == set(found)


def cards(*names: str, driver: str = "545.23.08") -> dict[str, str]:
    folder = "/proc/driver/nvidia"
    listed = {f"{folder}/gpus/{n}/information": f"Model: \t {name}" for n, name in enumerate(names)}
    return {**listed, f"{folder}/version": f"NVRM version: NVIDIA Kernel Module  {driver}  x"}


RTX = "NVIDIA GeForce RTX 4090"
OLD, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
GROWING, SPLIT = "expandable_segments:True", "max_split_size_mb:512"
ETH0_ALONE = {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}
NO_PEERS = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
RECORDED = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/runs/run/logs/flight_rank_",
}
TWO_NODES, TWO_CARDS = {"nodes": 2}, {"devices": 2}


@pytest.mark.parametrize(
    ("of_job", "of_node", "names", "expected"),
    [
        # NCCL is pinned where it could choose wrongly.
        (TWO_NODES, {"interfaces": (LO, ETH0)}, "NCCL_", {}),
        (TWO_NODES, {"interfaces": (LO, VIRTUAL)}, "NCCL_", {}),
        (TWO_NODES, {"interfaces": (LO, BRIDGE, VIRTUAL)}, "NCCL_", {}),
        (TWO_NODES, {"interfaces": (LO, ETH0, ETH1)}, "NCCL_|GLOO_", ETH0_ALONE),
        (TWO_NODES, {"interfaces": (LO, BRIDGE, ETH0)}, "NCCL_|GLOO_", ETH0_ALONE),
        # No variable that current plugins do not want; the outdated lists do harm.
        (TWO_NODES, {}, "NCCL_|FI_|RDMAV_", {}),
        (TWO_NODES, {"rdma_devices": (INFINIBAND,)}, "NCCL_|FI_|RDMAV_", {}),
        (TWO_NODES, {"rdma_devices": (EFA,)}, "NCCL_|FI_|RDMAV_", {"FI_EFA_USE_HUGE_PAGE": "0"}),
        # The allocator's variable follows torch, and has no rival.
        ({}, {"libraries": {"torch": "2.6.0+cu124"}}, "PYTORCH_", {OLD: GROWING}),
        ({}, {"libraries": {"torch": "2.8.0a0+5228986c39"}}, "PYTORCH_", {OLD: GROWING}),
        ({}, {"libraries": {"torch": "2.9.0"}}, "PYTORCH_", {NEW: GROWING}),
        ({}, {"libraries": {"torch": "2.13.0+cu130"}}, "PYTORCH_", {NEW: GROWING}),
        ({}, {"libraries": {"torch": "odd"}}, "PYTORCH_", {OLD: GROWING}),
        ({"environment": {OLD: SPLIT}}, {}, "PYTORCH_", {}),
        ({"environment": {NEW: SPLIT}}, {}, "PYTORCH_", {}),
        # Consumer cards with old drivers get no access to their peers.
        (TWO_CARDS, {"texts": cards(RTX, RTX)}, ".*_DISABLE", NO_PEERS),
        (TWO_CARDS, {"texts": cards(RTX, RTX, driver="550.40")}, ".*_DISABLE", NO_PEERS),
        (TWO_CARDS, {"texts": cards(RTX, RTX, driver="550.40.07")}, ".*_DISABLE", {}),
        (TWO_CARDS, {"texts": cards(RTX)}, ".*_DISABLE", {}),
        (TWO_CARDS, {"texts": cards("NVIDIA L40S", "NVIDIA L40S")}, ".*_DISABLE", {}),
        (TWO_CARDS, {}, ".*_DISABLE", {}),
        # Collectives are recorded under the name that torch reads.
        (
            *(TWO_CARDS, {"libraries": {"torch": "2.7.1+cu126"}}, "TORCH_"),
            {"TORCH_NCCL_TRACE_BUFFER_SIZE": "20000", **RECORDED},
        ),
        (
            *(TWO_CARDS, {"libraries": {"torch": "2.8.0"}}, "TORCH_"),
            {"TORCH_FR_BUFFER_SIZE": "20000", **RECORDED},
        ),
        ({}, {}, "TORCH_", {}),
        # What torch asks for before it is deterministic.
        ({"deterministic": True}, {}, "CUBLAS_|FLASH_", EQUAL_BITS),
        ({}, {}, "CUBLAS_|FLASH_", {}),
    ],
)
def test_what_is_set_for_a_machine(
    of_job: dict[str, Any], of_node: dict[str, Any], names: str, expected: dict[str, str]
) -> None:
    found = by_name(CudaBackend().environment(job(**of_job), machine(**of_node), None))
    assert {name: s.value for name, s in found.items() if re.match(names, name)} == expected


# -- options, capabilities and peaks ---------------------------------------------------------


@pytest.mark.parametrize("value", [0, -64, "64", True, 1.5])
def test_widths_are_rounded_to_whole_tokens(value: Any) -> None:
    with pytest.raises(RunFileError, match=r"pad_to_multiple_of: .*: input should be"):
        backend_with("cuda", {"pad_to_multiple_of": value})


def test_rounded_widths_are_few() -> None:
    widths = range(1, 2049, 7)
    usual, exact = (
        {shapes.padded_length(width, 2048) for width in widths}
        for shapes in (
            CudaBackend().graph.shapes,
            backend_with("cuda", {"pad_to_multiple_of": 1}).graph.shapes,
        )
    )
    assert len(usual) == 2048 // 64
    assert len(exact) == len(widths)


def test_what_the_card_decides_is_open_until_one_is_opened() -> None:
    backend = CudaBackend()
    assert backend.sums_vary
    for capability in ("bfloat16", "float16"):
        assert backend.support(capability).level is Level.DEPENDS
    assert resolve_precision(PrecisionSection(), backend.support).param_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("types", "auto", "said"),
    [
        ({"float32", "bfloat16", "float16"}, "bfloat16", ""),
        ({"float32", "float16"}, "float16", "the opened card has float16, float32 only"),
        ({"float32"}, "float32", "the opened card has float32 only"),
    ],
)
def test_the_opened_card_settles_its_types(
    types: set[str], auto: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaPlacement, "open", lambda self, rank: torch.device("cuda", rank))
    monkeypatch.setattr("anygauge_cuda.backend.hardware_dtypes", lambda device: frozenset(types))
    backend = CudaBackend()
    backend.open(0)
    assert resolve_precision(PrecisionSection(), backend.support).param_dtype == auto
    assert said in str(backend.support("bfloat16"))
    for dtype in ("bfloat16", "float16"):
        assert bool(backend.support(dtype)) is (dtype in types)
    assert CudaBackend().support("bfloat16").level is Level.DEPENDS, "of another card"


@pytest.mark.parametrize(
    ("name", "dtype", "value"),
    [
        ("NVIDIA H200", "bfloat16", 989.4e12),
        ("NVIDIA H200 NVL", "bfloat16", 835.5e12),
        ("NVIDIA H100 80GB HBM3", "float16", 989.4e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5e12),
        ("NVIDIA L40S", "bfloat16", 362.05e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("Tesla V100-SXM2-32GB", "float16", 125e12),
        ("Tesla V100-SXM2-32GB", "bfloat16", None),
        ("Tesla T4", "float16", 65e12),
        ("NVIDIA B200", "float32", None),
        # Other cards, whose names merely resemble these.
        ("NVIDIA A10G", "bfloat16", None),
        ("NVIDIA H20", "bfloat16", None),
        ("NVIDIA L40", "bfloat16", None),
        # A slice of a card does not have the card's peak.
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("NVIDIA H200", "int8", None),
    ],
)
def test_peaks_are_known_for_whole_known_cards(name: str, dtype: str, value: float | None) -> None:
    peak = published_peak(name, dtype)
    assert (peak.value if peak else None) == value
    assert peak is None or "datasheet" in peak.source


@pytest.mark.parametrize(
    ("capability", "built", "index"),
    [
        ((8, 0), "sm_80 sm_90", ""),
        ((8, 9), "sm_80 sm_90", ""),
        ((9, 0), "sm_80 sm_90a", ""),
        ((12, 0), "sm_90 sm_120a", ""),
        ((12, 1), "sm_90 compute_90", ""),
        ((7, 0), "sm_75 sm_80 sm_90", "cu126"),
        ((6, 1), "sm_75 sm_80 compute_90", "cu126"),
        ((7, 5), "sm_80 sm_90", "cu130"),
        ((8, 0), "sm_86 sm_90", "cu130"),
        ((10, 0), "sm_50 sm_90", "cu130"),
    ],
)
def test_a_card_is_compared_with_the_kernels_of_torch(
    capability: tuple[int, int], built: str, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", built.split)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    said = without_kernels(0)
    assert (f"https://download.pytorch.org/whl/{index} " in said) if index else said == ""


@pytest.fixture
def matmul() -> Iterator[Any]:
    """Torch's switches, whose attributes monkeypatch cannot set back."""
    before = torch.backends.cuda.matmul.allow_tf32
    yield torch.backends.cuda.matmul
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(("allowed", "bits", "rate"), [(False, 24, 19.5e12), (True, 11, 156e12)])
def test_products_in_tf32_are_known_as_such(
    allowed: bool, bits: int, rate: float, matmul: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    placement = CudaBackend().placement
    placement._device = torch.device("cuda", 0)
    matmul.allow_tf32 = allowed
    assert placement.float32_product_bits == bits
    peak = placement.peak_flops("float32")
    assert peak is not None and peak.value == rate


# -- diagnostics -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "cuda", "serves"),
    [
        ("535.129.03", "12.8", True),
        ("520.61.05", "12.1", False),
        ("570.86", "13.0", False),
        ("580.65.06", "13.0", True),
        ("580.65.06", "12.8", True),
        ("580.65.06", "14.0", None),
    ],
)
def test_drivers_are_compared_with_the_build_of_torch(
    driver: str, cuda: str, serves: bool | None
) -> None:
    assert driver_serves(driver, cuda) is serves


def test_the_build_of_torch_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_tree(tmp_path, {"torch/version.py": WITH_CUDA})
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    line = {c.name: c for c in checks(tmp_path, tmp_path / "torch")}["torch and CUDA"]
    assert (line.outcome, line.seen) == ("pass", "torch 2.13.0+cu130 for CUDA 13.0")


def test_a_driver_that_is_too_old_is_told_which_image_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert _compatibility("580.65.06").outcome == "pass"
    old = _compatibility("550.54.15")
    assert old.outcome == "fail"
    assert old.remedy.endswith("anygauge image --release torch-2.13-cuda12.6")
    assert "anygauge image" not in _compatibility("450.80.02").remedy


def test_surprises_of_a_machine_name_their_variables(
    matmul: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    assert not _surprises()
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    matmul.allow_tf32 = True
    tf32, peers = _surprises()
    assert tf32.outcome == peers.outcome == "warn"
    assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE: '0'" in tf32.remedy
    assert "NCCL_CUMEM_HOST_ENABLE: '0'" in peers.remedy


def test_every_failed_step_has_a_remedy(tmp_path: Path) -> None:
    write_tree(tmp_path, {"torch/version.py": WITHOUT_CUDA})
    found = checks(tmp_path, tmp_path / "torch")
    assert [(c.name, c.outcome) for c in found] == [
        ("GPUs", "fail"),
        ("driver", "fail"),
        ("torch", "fail"),
        *((name, "skip") for name in ("torch and CUDA", "driver for this torch", "usable GPUs")),
    ]
    assert all(check.remedy for check in found)


# -- torch without and with a GPU ------------------------------------------------------------


def test_a_build_without_cuda_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(NotAvailableError, match=r"built without CUDA.*--backend cpu"):
        CudaBackend().open(0)


def test_torchs_own_complaint_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system")

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    with pytest.raises(NotAvailableError, match="Found no NVIDIA driver"):
        CudaBackend().open(0)


@pytest.mark.parametrize(
    ("said", "exhausted"),
    [
        ("CUDA error: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        (
            "NVML_SUCCESS == r INTERNAL ASSERT FAILED at "
            '"/pytorch/c10/cuda/CUDACachingAllocator.cpp":1165, please report a bug to PyTorch.',
            True,
        ),
        ("CUDA error: device-side assert triggered", False),
    ],
)
def test_exhausted_memory_is_recognized(said: str, exhausted: bool) -> None:
    placement = CudaBackend().placement
    assert placement.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert placement.is_out_of_memory(RuntimeError(said)) is exhausted


@pytest.mark.parametrize("packing", [False, True])
def test_defaults_are_the_kernels_that_a_card_has_run(
    packing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a machine where all of them could be built.
    monkeypatch.setattr("anygauge_kernels.why_no_triton", lambda: None)
    chosen = choose_kernels(Registry.load(), CudaBackend(), {}, packing=packing)
    assert {operation: choice.name for operation, choice in chosen.items()} == {
        "attention": "reference",
        "adamw": "reference",
        "clip_grad_norm": "reference",
        "linear_cross_entropy": "triton",
        "lora_linear": "reference",
        "rms_norm": "reference",
        "rope": "reference",
        "softmax": "triton",
    }
