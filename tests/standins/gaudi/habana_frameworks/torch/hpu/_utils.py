"""Module numbers from the environment."""

import os

import torch

HABANA_VISIBLE_MODULES_VAR = "HABANA_VISIBLE_MODULES"
HLS_MODULE_ID_VAR = "HLS_MODULE_ID"


def _get_device_index(device, optional=False, allow_cpu=False):
    import habana_frameworks.torch.hpu as hpu

    if isinstance(device, int):
        return device
    if isinstance(device, str):
        device = torch.device(device)
    index = None
    if isinstance(device, torch.device):
        if device.type != "hpu" and not (allow_cpu and device.type == "cpu"):
            raise ValueError(f"Expected a hpu device, but got: {device}")
        index = -1 if device.type == "cpu" else device.index
    if index is None:
        if not optional:
            raise ValueError(f"Expected a torch.device with a specified index, but got: {device}")
        index = hpu.current_device()
    return index


def _get_module_id_from_environ():
    value = os.getenv(HLS_MODULE_ID_VAR, -1)
    return int(value) if value else -1


def _get_available_modules_from_environ():
    text = os.getenv(HABANA_VISIBLE_MODULES_VAR, default="0,1,2,3,4,5,6,7")
    return [int(part) for part in text.split(",")]
