"""Torch's entry point for backends: loads the device in eager mode, when torch is imported."""

import os

import habana_standin

is_loaded = False


def is_autoload_enabled():
    flag = os.getenv("PT_HPU_AUTOLOAD", "-1")
    if flag in ("0", "1"):
        return flag == "1"
    return os.getenv("PT_HPU_LAZY_MODE", "1") != "1"


def __autoload():
    import torch

    habana_standin.pretend_fork(torch)
    if is_loaded or not is_autoload_enabled():
        return
    import habana_frameworks.torch
