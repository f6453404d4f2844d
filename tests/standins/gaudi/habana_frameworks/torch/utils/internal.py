"""The mode: read once from the environment, and kept."""

import logging
import os

logger = logging.getLogger(__name__)


def is_lazy():
    if is_lazy._is_lazy is None:
        is_lazy._is_lazy = os.getenv("PT_HPU_LAZY_MODE", "1") != "0"
    return is_lazy._is_lazy


is_lazy._is_lazy = None


def lazy_only(func):
    import habana_standin

    def lazy_wrapper(*args, **kwargs):
        func(*args, **kwargs)

    def non_lazy_wrapper(*args, **kwargs):
        # The original warns once and does nothing; who calls it has the mode wrong.
        habana_standin.record("refused", func.__name__)

    return lazy_wrapper if is_lazy() else non_lazy_wrapper
