"""torch.hpu: one card, of index 0. Names that the original lacks are absent here."""

import os

import habana_standin
import torch

from habana_frameworks.torch.utils.internal import is_lazy

from . import metrics, random
from ._utils import (
    HABANA_VISIBLE_MODULES_VAR,
    HLS_MODULE_ID_VAR,
    _get_available_modules_from_environ,
    _get_device_index,
    _get_module_id_from_environ,
)
from .events import Event
from .memory import (
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_peak_memory_stats,
)
from .random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from .streams import Stream, current_stream, default_stream, record_stream, set_stream, stream

_initialized = False


def init() -> None:
    """Takes the card, if that was not done."""
    global _initialized
    if not _initialized:
        try:
            habana_standin.cards().claim(0)
        except RuntimeError as error:
            raise RuntimeError(
                f"synStatus=8 [Device not found] Device acquire failed. ({error})"
            ) from error
        habana_standin.record("acquire", os.environ.get(HLS_MODULE_ID_VAR))
        _initialized = True
        # The thread that takes the card is the one that uses it, with its backward passes.
        habana_standin.census().__enter__()


def is_initialized() -> bool:
    return _initialized


# -- asked by torch of devices under the key that the simulated cards use; Gaudi's is another


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype():
    return [torch.bfloat16, torch.float16]


# -------------------------------------------------------------------------------------------


def is_available() -> bool:
    return device_count() > 0


def device_count():
    return habana_standin.cards_of_the_machine()


def current_device() -> int:
    init()
    return 0


def get_device_name(device=None) -> str:
    init()
    _checked(device)
    return "GAUDI2"


def synchronize() -> None:
    init()
    habana_standin.record("synchronize")
    habana_standin.census().cut("synchronize")  # the original marks a step before it waits


def set_device(device) -> None:
    index = _get_device_index(device, optional=True)
    available = _get_available_modules_from_environ()
    if index not in available and index > len(available):
        raise AssertionError(f"Trying to open device with idx={index} when only {available} are")
    current = _get_module_id_from_environ()
    if current >= 0:
        index = available.index(current)
    os.environ[HLS_MODULE_ID_VAR] = str(available[index])
    habana_standin.record("set_device", index)


def _checked(device):
    index = _get_device_index(device, optional=True)
    if index < 0 or index >= device_count():
        raise AssertionError("Invalid device id")
    return index


class device:
    """Selects the card, of which there is one."""

    def __init__(self, device):
        index = _get_device_index(device, optional=True)
        if index not in (0, _get_module_id_from_environ()):
            raise AssertionError(f"Requested device_id={index} is different")

    def __enter__(self):
        return None

    def __exit__(self, type, value, traceback):
        return False
