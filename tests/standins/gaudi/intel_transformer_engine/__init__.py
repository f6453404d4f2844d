"""A stand-in for Intel's Transformer Engine, whose source is not published.

Names, arguments and behaviour are those that Intel's page on FP8 training and the bridge's tests
show (gaudi-pytorch-bridge 1.19.0, tests/pytest_working/any_mode/test_hpu_fp8_te.py): scales begin
at 1 and follow what was measured; with `Format.HYBRID` forward multiplies in E4M3 and backward in
E5M2; what is computed again has the scales of the first time, where it was announced; the state of
a layer has its scales. How it is computed inside is the stand-in's own.
"""

from . import distributed, recipe
from .layers import Linear, fp8_autocast

__all__ = ["Linear", "distributed", "fp8_autocast", "recipe"]
