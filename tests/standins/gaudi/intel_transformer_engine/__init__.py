"""A stand-in for Intel's Transformer Engine, whose source is not published.

Names, arguments and behaviour are those that Intel's page on FP8 training and the bridge's tests
show (gaudi-pytorch-bridge 1.19.0, tests/pytest_working/any_mode/test_hpu_fp8_te.py): what is
computed again must have been announced. Nothing is rounded: FP8 changes what is computed here, and
not what is called.
"""

from . import distributed, recipe
from .layers import Linear, fp8_autocast

__all__ = ["Linear", "distributed", "fp8_autocast", "recipe"]
