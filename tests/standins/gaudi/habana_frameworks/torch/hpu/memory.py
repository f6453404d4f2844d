"""The allocator's numbers. It reserves the whole card: what is reserved is the limit."""

import warnings

import habana_standin

import habana_frameworks.torch.hpu as hpu


def _stats(device):
    from ._utils import _get_device_index

    hpu.init()
    index = _get_device_index(device, optional=True)
    if index < 0 or index >= hpu.device_count():
        raise AssertionError("Invalid device id")
    _C = habana_standin.cards()
    found = _C.memory(_C.current_device())
    return {
        "Limit": _C.capacity(),
        "InUse": found["in_use"],
        "MaxInUse": found["peak"],
        "NumAllocs": 0,
        "NumFrees": 0,
        "ActiveAllocs": 0,
        "MaxAllocSize": 0,
        "TotalSystemAllocs": 0,
        "TotalSystemFrees": 0,
        "TotalActiveAllocs": 0,
    }


def memory_stats(device=None):
    return _stats(device)


def memory_summary(device=None):
    lines = (f"| {name} | {value} |" for name, value in _stats(device).items())
    return "PyTorch HPU memory summary\n" + "\n".join(lines) + "\n"


def memory_allocated(device=None):
    return _stats(device)["InUse"]


def max_memory_allocated(device=None):
    return _stats(device)["MaxInUse"]


def memory_reserved(device=None):
    return _stats(device)["Limit"]


def max_memory_reserved(device=None):
    return _stats(device)["Limit"]


def memory_cached(device=None):
    warnings.warn("renamed to torch.hpu.memory_reserved", FutureWarning, stacklevel=2)
    return memory_reserved(device)


def max_memory_cached(device=None):
    warnings.warn("renamed to torch.hpu.max_memory_reserved", FutureWarning, stacklevel=2)
    return max_memory_reserved(device)


def mem_get_info(device=None):
    found = _stats(device)
    return (found["Limit"] - found["InUse"], found["Limit"])


def reset_peak_memory_stats(device=None):
    _stats(device)
    _C = habana_standin.cards()
    _C.reset_peak(_C.current_device())
