"""What an optimizer asks of the rest of a run file, told before anything starts; no torch."""

from __future__ import annotations

import importlib.util

from anygauge.config.schema import RunFile
from anygauge.interface import RunFileError

EIGHT_BIT_MISSING = (
    "train.optimizer.name: adamw_8bit needs the package bitsandbytes, which is not installed; "
    "pip install 'anygauge[8bit]', or use adamw"
)


def check_optimizer(run: RunFile, *, need_software: bool) -> None:
    """Refuse what is known to fail.

    Args:
        need_software: ranks will be started on this machine, so packages must be there.

    Raises:
        RunFileError: says which field to change.
    """
    section = run.train.optimizer
    if section.loraplus_lr_ratio is not None and run.adapter is None:
        raise RunFileError(
            "train.optimizer.loraplus_lr_ratio: is for the B factors of an adapter, but the run "
            "has no adapter section; remove it, or add one"
        )
    if (
        section.name == "adamw_8bit"
        and need_software
        and importlib.util.find_spec("bitsandbytes") is None
    ):
        raise RunFileError(EIGHT_BIT_MISSING)
