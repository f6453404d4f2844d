"""The CUDA backend: what it finds in fake trees, asks for by what a node shows, and refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from anygauge.agent.environment import inspect_node
from anygauge.config.schema import PrecisionSection, resolve_precision
from anygauge.interface import (
    Level,
    NotAvailableError,
    RdmaDevice,
    RunFileError,
    Skip,
)
from anygauge.kernels.choose import choose_kernels
from anygauge.registry import Registry
from anygauge_cuda.backend import CudaBackend
from anygauge_cuda.diagnostics import _compatibility, _surprises, checks
from anygauge_cuda.placement import CudaPlacement, published_peak, without_kernels
from anygauge_cuda.probe import driver_version, probe, torch_cuda_version
from anygauge_cuda.versions import driver_serves
from tests.helpers.machines import (
    BRIDGE,
    ETH0,
    ETH1,
    LO,
    VIRTUAL,
    by_name,
    job,
    machine,
)
from tests.helpers.options import backend_with
from tests.helpers.tree import write_tree

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


def test_a_complete_machine_is_available(tmp_path: Path) -> None:
    found = look(tmp_path, FILES, DRIVER, TORCH)
    assert found.available
    assert found.device_count == 2
    assert "535.129.03" in found.driver.detail
    assert "CUDA 12.8" in found.software.detail


def test_a_driver_under_gvisor_shows_its_device_files_alone(tmp_path: Path) -> None:
    found = look(tmp_path, {"dev/nvidia0": "", "dev/nvidiactl": ""}, TORCH)
    assert found.available, found.reason
    assert found.device_count == 1 and "not shown" in found.driver.detail
    stale = look(tmp_path, {"sys/module/ext4/version": ""})
    assert "driver is not loaded" in stale.reason, "device files outlive a driver"


def test_a_container_under_wsl_has_the_driver_in_its_store(tmp_path: Path) -> None:
    library = "usr/lib/wsl/drivers/nv_dispi.inf_amd64_1/libcuda.so.1.1"
    assert look(tmp_path, {"dev/dxg": "", library: ""}, TORCH).available


def test_a_machine_without_gpus_says_what_is_missing(tmp_path: Path) -> None:
    found = look(tmp_path, TORCH, pci("0000:00:02.0", "0x8086", "0x030000"))
    assert not found.available
    assert not found.has_hardware
    assert found.device_count is None
    assert "no NVIDIA GPU" in found.reason
    assert "driver is not loaded" in found.reason


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


def test_gpus_without_a_driver_are_still_hardware(tmp_path: Path) -> None:
    found = look(tmp_path, TORCH, pci("0000:3b:00.0", "0x10de", "0x030200"))
    assert found.has_hardware
    assert not found.available
    assert found.device_count == 1
    assert any("/dev/nvidia" in note for note in found.notes)


def test_a_container_counts_what_it_was_given(tmp_path: Path) -> None:
    bus = {}
    for slot in range(8):
        bus |= pci(f"0000:{slot}b:00.0", "0x10de", "0x030200")
    assert look(tmp_path, bus, FILES, DRIVER).device_count == 2


def test_gpus_that_only_the_driver_lists(tmp_path: Path) -> None:
    folder = "proc/driver/nvidia/gpus/0000:3b:00.0/information"
    found = look(tmp_path, {folder: "Model: \t\t NVIDIA A10\nIRQ:   \t\t 34\n"})
    assert found.has_hardware
    assert found.device_count == 1
    assert found.cards == ("NVIDIA A10",)


def test_wsl_needs_the_vendors_library(tmp_path: Path) -> None:
    assert not look(tmp_path, {"dev/dxg": ""}).has_hardware
    found = look(tmp_path, {"usr/lib/wsl/lib/libcuda.so.1": ""}, TORCH)
    assert found.available
    assert found.device_count is None


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


def test_torch_without_cuda_is_named_as_the_cause(tmp_path: Path) -> None:
    found = look(tmp_path, FILES, DRIVER, {"torch/version.py": WITHOUT_CUDA})
    assert not found.available
    assert "without CUDA" in found.reason


# -- environment -----------------------------------------------------------------------------


def test_a_single_node_needs_no_fabric() -> None:
    node = machine(interfaces=(LO, ETH0, ETH1, BRIDGE), rdma_devices=(EFA, INFINIBAND))
    found = by_name(CudaBackend().environment(job(devices=4), node, 0))
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


@pytest.mark.parametrize(
    ("interfaces", "value"),
    [
        ((LO, ETH0), None),
        ((LO, VIRTUAL), None),
        ((LO, ETH0, ETH1), "=eth0"),
        ((LO, BRIDGE, ETH0), "=eth0"),
        ((LO, BRIDGE, VIRTUAL), None),
    ],
)
def test_nccl_is_pinned_where_it_could_choose_wrongly(
    interfaces: tuple[Any, ...], value: str | None
) -> None:
    node = machine(interfaces=interfaces)
    found = by_name(CudaBackend().environment(job(nodes=2), node, None))
    assert ("NCCL_SOCKET_IFNAME" in found) is (value is not None)
    if value is not None:
        assert found["NCCL_SOCKET_IFNAME"].value == value
        assert found["GLOO_SOCKET_IFNAME"].value == value.removeprefix("=")


@pytest.mark.parametrize(
    ("devices", "huge_pages"), [((EFA,), "0"), ((INFINIBAND,), None), ((), None)]
)
def test_fabrics_are_left_to_themselves(
    devices: tuple[RdmaDevice, ...], huge_pages: str | None
) -> None:
    """No variable that current plugins do not want; the outdated lists do harm."""
    node = machine(rdma_devices=devices)
    found = by_name(CudaBackend().environment(job(nodes=2), node, None))
    fabric = {name: s.value for name, s in found.items() if name.startswith(("FI_", "RDMAV_"))}
    assert fabric == ({} if huge_pages is None else {"FI_EFA_USE_HUGE_PAGE": huge_pages})
    assert not any(name.startswith("NCCL_") for name in found)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.6.0+cu124", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.8.0a0+5228986c39", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.9.0", "PYTORCH_ALLOC_CONF"),
        ("2.13.0+cu130", "PYTORCH_ALLOC_CONF"),
        ("odd", "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_the_allocators_variable_follows_torch(version: str, name: str) -> None:
    node = machine(libraries={"torch": version})
    found = by_name(CudaBackend().environment(job(), node, None))
    assert [n for n in found if n.endswith("ALLOC_CONF")] == [name]
    assert found[name].value == "expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_allocator_of_the_run_file_has_no_rival(name: str) -> None:
    the_job = job(environment={name: "max_split_size_mb:512"})
    found = by_name(CudaBackend().environment(the_job, machine(), None))
    assert not any(n.endswith("ALLOC_CONF") for n in found)


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
    found = inspect_node(root=tmp_path, backend=backend, environ={}).texts
    assert {"/dev/dxg", MIG, "/proc/driver/nvidia/version"} == set(found)


def cards(*names: str, driver: str = "545.23.08") -> dict[str, str]:
    folder = "/proc/driver/nvidia"
    listed = {f"{folder}/gpus/{n}/information": f"Model: \t {name}" for n, name in enumerate(names)}
    return {**listed, f"{folder}/version": f"NVRM version: NVIDIA Kernel Module  {driver}  x"}


RTX = "NVIDIA GeForce RTX 4090"


@pytest.mark.parametrize(
    ("texts", "disabled"),
    [
        (cards(RTX, RTX), True),
        (cards(RTX, RTX, driver="550.40.07"), False),
        (cards(RTX, RTX, driver="550.40"), True),
        (cards(RTX), False),
        (cards("NVIDIA L40S", "NVIDIA L40S"), False),
        ({}, False),
    ],
)
def test_consumer_cards_with_old_drivers_get_no_peer_access(
    texts: dict[str, str], disabled: bool
) -> None:
    found = by_name(CudaBackend().environment(job(devices=2), machine(texts=texts), None))
    names = {name for name in found if name.endswith("_DISABLE")}
    assert names == ({"NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"} if disabled else set())


@pytest.mark.parametrize(
    ("torch", "name"),
    [("2.7.1+cu126", "TORCH_NCCL_TRACE_BUFFER_SIZE"), ("2.8.0", "TORCH_FR_BUFFER_SIZE")],
)
def test_collectives_are_recorded_under_the_name_that_torch_reads(torch: str, name: str) -> None:
    node, two = machine(libraries={"torch": torch}), job(devices=2)
    found = by_name(CudaBackend().environment(two, node, None))
    assert [each for each in found if each.endswith("BUFFER_SIZE")] == [name]
    assert found["TORCH_NCCL_DUMP_ON_TIMEOUT"].value == "1"
    prefix = found["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"].value
    assert prefix == two.collectives_record == "/runs/run/logs/flight_rank_"
    alone = by_name(CudaBackend().environment(job(), node, None))
    assert not any(each.startswith("TORCH_") for each in alone)


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


def test_its_sums_vary() -> None:
    assert CudaBackend().sums_vary


def test_what_the_card_decides_is_open_until_one_is_opened() -> None:
    backend = CudaBackend()
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
    import torch

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
    import torch

    monkeypatch.setattr(torch.cuda, "get_arch_list", built.split)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    said = without_kernels(0)
    assert (f"https://download.pytorch.org/whl/{index} " in said) if index else said == ""


@pytest.mark.parametrize(("allowed", "bits", "rate"), [(False, 24, 19.5e12), (True, 11, 156e12)])
def test_products_in_tf32_are_known_as_such(
    allowed: bool, bits: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    placement = CudaBackend().placement
    placement._device = torch.device("cuda", 0)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        assert placement.float32_product_bits == bits
        peak = placement.peak_flops("float32")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
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
    import torch

    write_tree(tmp_path, {"torch/version.py": WITH_CUDA})
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    line = {c.name: c for c in checks(tmp_path, tmp_path / "torch")}["torch and CUDA"]
    assert (line.outcome, line.seen) == ("pass", "torch 2.13.0+cu130 for CUDA 13.0")


def test_a_driver_that_is_too_old_is_told_which_image_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert _compatibility("580.65.06").outcome == "pass"
    old = _compatibility("550.54.15")
    assert old.outcome == "fail"
    assert old.remedy.endswith("anygauge image --release torch-2.13-cuda12.6")
    assert "anygauge image" not in _compatibility("450.80.02").remedy


def test_surprises_of_a_machine_name_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    assert not _surprises()
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        tf32, peers = _surprises()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
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
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(NotAvailableError, match=r"built without CUDA.*--backend cpu"):
        CudaBackend().open(0)


def test_torchs_own_complaint_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system")

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    with pytest.raises(NotAvailableError, match="Found no NVIDIA driver"):
        CudaBackend().open(0)


def test_exhausted_memory_is_recognised() -> None:
    import torch

    placement = CudaBackend().placement
    assert placement.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert placement.is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert placement.is_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    )
    assert placement.is_out_of_memory(
        RuntimeError(
            "NVML_SUCCESS == r INTERNAL ASSERT FAILED at "
            '"/pytorch/c10/cuda/CUDACachingAllocator.cpp":1165, please report a bug to PyTorch.'
        )
    )
    assert not placement.is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))


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
