"""A stand-in for NVIDIA's driver, runtime and NCCL below torch's own Python, without any card.

Torch's modules ``torch.cuda`` and ``torch.distributed`` are the installed ones: what they
refuse is refused here. What they call in ``torch._C`` is absent from a torch that is built without
CUDA, and is made here, with the names and arguments that ``torch/_C/*.pyi`` publishes; whatever is
absent here raises. Tensors live on the simulated cards of `anygauge_sim`, under CUDA's own key, and
NCCL's part is done by the cards' collectives. A process sees the cards that CUDA_VISIBLE_DEVICES
names when it first asks for them, as CUDA does. Every call is written to the file that
``CUDA_STANDIN_RECORD`` names, one JSON list a line.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

RECORD = "CUDA_STANDIN_RECORD"
CARDS = "CUDA_STANDIN_CARDS"
"""Cards of the machine; 2 where it is not set."""
CUDA = "13.0"
NAME = "NVIDIA H100 80GB HBM3"
CAPABILITY = (9, 0)
MEMORY = 32 * 2**30
NCCL = (2, 28, 9)

_file: Any = None
_groups: list[Any] = []


def record(name: str, *values: Any) -> None:
    """Write a call down."""
    global _file
    path = os.environ.get(RECORD)
    if not path:
        return
    if _file is None:
        rank = os.environ.get("RANK", "none")
        _file = Path(f"{path}.{rank}").open("a", buffering=1)  # noqa: SIM115
    _file.write(json.dumps([name, *values]) + "\n")


# -- before torch and while it is imported -------------------------------------------------------


class _Before(MetaPathFinder):
    """Calls a function right before, and one right after, a module is executed."""

    def __init__(self, hooks: dict[str, tuple[Any, Any]]) -> None:
        self._hooks = hooks

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        if name not in self._hooks:
            return None
        before, after = self._hooks[name]
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            # Not before: others merely ask whether there is such a module.
            del self._hooks[name]
            before()
            execute(module)
            after()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def wait_for_torch() -> None:
    """Have the stand-in in place as soon as torch is imported."""

    def nothing() -> None:
        pass

    sys.meta_path.insert(
        0,
        _Before(
            {
                "torch": (_load_cards, _resize_storages),
                "torch.version": (nothing, _pretend_build),
                "torch.cuda": (_fill_torch, nothing),
                "torch.distributed.constants": (_set_timeout, nothing),
                "torch.distributed.distributed_c10d": (_fill_distributed, nothing),
            }
        ),
    )


def _load_cards() -> None:
    """Before torch asks whether it has CUDA, which it does once."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    libraries = Path(spec.origin).parent / "lib"
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
        ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)
    cards = importlib.util.find_spec("cuda_cards")
    assert cards is not None and cards.origin is not None
    ctypes.CDLL(cards.origin)


def _pretend_build() -> None:
    version = sys.modules["torch.version"]
    assert version.cuda is None, "the stand-in takes the place of CUDA in a torch without it"
    version.cuda = CUDA
    version.__version__ = version.__version__.partition("+")[0] + "+cu130"


# -- the cards -----------------------------------------------------------------------------------

_configured: list[int] = []


def cards() -> Any:
    """The module of the cards, which knows the visible ones from its first use on."""
    import cuda_cards

    if not _configured:
        _configured.extend(visible(os.environ.get("CUDA_VISIBLE_DEVICES")))
        cuda_cards.configure(
            cards=_configured, capacity=MEMORY, locks=os.environ.get("CUDA_STANDIN_LOCKS", ""),
            trace="",
        )  # fmt: skip
        cuda_cards.inject(allocations=set(), failing={}, hanging={}, slow={})
    return cuda_cards


def visible(named: str | None) -> list[int]:
    """Cards that CUDA shows: those named, up to the first that is not there."""
    machine = int(os.environ.get(CARDS, "2"))
    if named is None:
        return list(range(machine))
    found: list[int] = []
    for part in filter(None, (part.strip() for part in named.split(","))):
        if not part.isdigit() or int(part) >= machine or int(part) in found:
            break
        found.append(int(part))
    return found


def _count() -> int:
    # Without any, the cards' module cannot be configured at all.
    return len(_configured or visible(os.environ.get("CUDA_VISIBLE_DEVICES")))


def _checked(device: int) -> int:
    if not 0 <= device < _count():
        raise RuntimeError(
            "CUDA error: invalid device ordinal\nCUDA kernel errors might be asynchronously "
            "reported at some other API call"
        )
    return device


# -- torch._C ------------------------------------------------------------------------------------


def _cuda_init() -> None:
    import torch

    if not _count():
        raise RuntimeError("No CUDA GPUs are available")
    record("init", {n: v for n, v in sorted(os.environ.items()) if _is_told(n)})
    # The original puts these two into torch's module, too.
    torch.cuda._get_device_properties = lambda device: _CudaDeviceProperties(_checked(device))
    torch.cuda.default_generators = tuple(cards().default_generator(i) for i in range(_count()))


def _is_told(name: str) -> bool:
    return name.startswith(("CUDA_", "NCCL_", "PYTORCH_", "TORCH_NCCL_", "GLOO_", "FI_")) and (
        not name.startswith("CUDA_STANDIN")
    )


def _cuda_getDeviceCount() -> int:
    return _count()


def _initialized() -> None:
    """As the original does at its first use (torch::utils::device_lazy_init)."""
    import torch

    torch.cuda._lazy_init()


def _cuda_setDevice(device: int) -> None:
    _initialized()
    record("set_device", device)
    cards().set_device(_checked(device))


def _cuda_getDevice() -> int:
    _initialized()
    return int(cards().current_device())


def _cuda_exchangeDevice(device: int) -> int:
    before = _cuda_getDevice()
    if device >= 0:
        cards().set_device(_checked(device))
    return before


def _cuda_maybeExchangeDevice(device: int) -> int:
    return _cuda_exchangeDevice(device)


def _cuda_canDeviceAccessPeer(device: int, peer_device: int) -> bool:
    return _checked(device) != _checked(peer_device)


def _cuda_isInBadFork() -> bool:
    return False


def _cuda_getArchFlags() -> str | None:
    return "sm_80 sm_90"


def _cuda_getCompiledVersion() -> int:
    return 13000


def _cuda_synchronize() -> None:
    record("synchronize")


def _cuda_set_sync_debug_mode(warn_level: int) -> None:
    record("set_sync_debug_mode", warn_level)


def _cuda_emptyCache() -> None:
    record("empty_cache")


def _cuda_memoryStats(device: int) -> dict[str, Any]:
    found = cards().memory(_checked(device))
    bytes_ = {
        "current": found["in_use"],
        "peak": found["peak"],
        "allocated": found["allocated"],
        "freed": found["freed"],
    }
    names = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
    return {
        **{name: {"all": dict(bytes_)} for name in names},
        "num_alloc_retries": 0,
        "num_ooms": found["out_of_memory"],
    }


def _cuda_resetPeakMemoryStats(device: int) -> None:
    cards().reset_peak(_checked(device))


def _cuda_getCurrentStream(device: int) -> tuple[int, int, int]:
    return _stream_of(device)


def _cuda_getCurrentRawStream(device: int) -> int:
    return _stream_of(device)[0]


def _cuda_getDefaultStream(device: int) -> tuple[int, int, int]:
    return (0, _checked(device), 1)


def _cuda_setStream(stream_id: int, device_index: int, device_type: int) -> None:
    import torch

    stream = torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
    torch._C._accelerator_setStream(stream)


def _cuda_isCurrentStreamCapturing() -> bool:
    return False


def _cuda_cudaCachingAllocator_is_enabled() -> bool:
    return True


def _nccl_version() -> int:
    major, minor, patch = NCCL
    return major << 32 | minor << 16 | patch


def _nccl_version_suffix() -> bytes:
    return b""


def _set_cached_tensors_enabled(enabled: bool) -> None:
    assert not enabled, "graphs of CUDA cache tensors, and there are none"


def _stream_of(device: int) -> tuple[int, int, int]:
    import torch

    found = torch._C._accelerator_getStream(_checked(device))
    return (found.stream_id, found.device_index, found.device_type)


class _CudaDeviceProperties:
    """Of a card of the machine."""

    def __init__(self, device: int) -> None:
        self.name = NAME
        self.major, self.minor = CAPABILITY
        self.multi_processor_count = 132
        self.total_memory = MEMORY
        self.warp_size = 32
        self.uuid = f"GPU-{_configured[device] if _configured else device}"
        self.gcnArchName = ""


class _Runtime:
    """CUDA's runtime, as far as torch's Python calls it."""

    @staticmethod
    def cudaMemGetInfo(device: int) -> tuple[int, int]:
        return MEMORY - cards().memory(_checked(device))["in_use"], MEMORY

    @staticmethod
    def cudaError(code: int) -> int:
        return code

    @staticmethod
    def cudaGetErrorString(error: int) -> str:
        return f"CUDA error {error}"


class _Nvtx:
    """Marks for NVIDIA's profiler, which DeepSpeed sets."""

    @staticmethod
    def rangePushA(message: str) -> int:
        return 0

    @staticmethod
    def rangePop() -> int:
        return 0


def _streams() -> dict[str, type]:
    import torch

    class _CudaStreamBase(torch.Stream):
        def __new__(
            cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, stream_ptr: int = 0,
            **device: Any,
        ) -> Any:  # fmt: skip
            if stream_id or device:  # of one that is there
                return super().__new__(
                    cls, stream_id=stream_id, device_index=device_index, device_type=1
                )
            cards()
            return super().__new__(cls, device="cuda", priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        @property
        def priority(self) -> int:
            return 0

    class _CudaEventBase(torch.Event):
        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False,
            external: bool = False,
        ) -> Any:  # fmt: skip
            cards()
            record("event", enable_timing, blocking)
            return super().__new__(cls, device="cuda", enable_timing=enable_timing)

        def record(self, stream: Any) -> None:
            self._moment = time.perf_counter()
            super().record(stream)

        def elapsed_time(self, other: Any) -> float:
            # Torch's own takes no class but its own.
            return 1e3 * (other._moment - self._moment)

    return {"_CudaStreamBase": _CudaStreamBase, "_CudaEventBase": _CudaEventBase}


FUNCTIONS = tuple(
    value
    for name, value in list(globals().items())
    if name.startswith("_cuda_") and callable(value)
)


ABSENT = ("_CUDAGraph", "_graph_pool_handle", "_cuda_CUDAAllocator_AllocatorState")
"""What torch.cuda imports by name, and nothing here has: graphs of CUDA."""


def _fill_torch() -> None:
    """What torch.cuda looks for in torch._C, before it is imported."""
    import torch

    for function in FUNCTIONS:
        setattr(torch._C, function.__name__, function)
    for name, base in _streams().items():
        setattr(torch._C, name, base)
    from torch._utils import _dummy_type

    for name in ABSENT:  # as torch itself has them in a build without CUDA: to call one raises
        setattr(torch._C, name, _dummy_type(name))
    torch._C._nccl_version = _nccl_version
    torch._C._nccl_version_suffix = _nccl_version_suffix
    torch._C._set_cached_tensors_enabled = _set_cached_tensors_enabled
    torch._C._CudaDeviceProperties = _CudaDeviceProperties
    torch._C._cudart = _Runtime()
    torch._C._nvtx = _Nvtx()
    torch._C._has_cuda = True


def _resize_storages() -> None:
    """Torch's own way to resize a storage asks for a build with CUDA."""
    import torch

    resize = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        cards().resize_storage(whole, size)
        return self

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]


# -- NCCL ----------------------------------------------------------------------------------------


def _set_timeout() -> None:
    from torch._C import _distributed_c10d as c10d

    # Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp.
    c10d._DEFAULT_PG_NCCL_TIMEOUT = datetime.timedelta(minutes=10)


def _fill_distributed() -> None:
    """NCCL's process group, before torch.distributed looks for it."""
    from torch._C import _distributed_c10d as c10d

    class Options(c10d.Backend.Options):
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__("nccl")
            self.is_high_priority_stream = is_high_priority_stream

    Simulated = _simulated()

    class ProcessGroupNCCL(Simulated):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
            if not isinstance(options, Options):
                raise TypeError(f"options: {type(options)} is not ProcessGroupNCCL.Options")
            if not _count():
                raise ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!")
            split = getattr(options, "split_from", None)
            record(
                "nccl",
                rank,
                size,
                options._timeout.total_seconds(),
                list(options.global_ranks_in_group),
                "split" if split is not None else "new",
            )
            inner = c10d.ProcessGroupGloo(store, rank, size, options._timeout)
            super().__init__(inner, options._timeout)
            _groups.append(self)  # torch keeps the C++ part alone alive

        @property
        def supports_splitting(self) -> bool:
            return True

        def eager_connect_single_device(self, device: Any) -> None:
            record("connect", str(device))

        def perform_nocolor_split(self, device: Any) -> None:
            record("nocolor_split", str(device))

        def _set_sequence_number_for_group(self) -> None:
            pass

    ProcessGroupNCCL.Options = Options
    c10d.ProcessGroupNCCL = ProcessGroupNCCL


def _simulated() -> Any:
    import cuda_cards

    return cuda_cards.SimCCL
