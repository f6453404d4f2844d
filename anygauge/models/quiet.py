"""Keeps the model library's own progress bars and notices off the terminal."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """Errors still come through; a command's output is then anygauge's alone."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("torch", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
