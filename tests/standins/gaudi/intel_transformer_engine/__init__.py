"""A stand-in for Intel's Transformer Engine, whose source is not published.

Names, arguments and behaviour are those that Intel's page on FP8 training and the bridge's tests
show (gaudi-pytorch-bridge 1.19.0, tests/pytest_working/any_mode/test_hpu_fp8_te.py): with
`Format.HYBRID` forward multiplies in E4M3 and backward in E5M2; what is computed again must have
been announced. Numbers are rounded by a scale of each call's own: delayed scales, which change what
is computed and not what is called, are left out.
"""

from . import distributed, recipe
from .layers import Linear, fp8_autocast

__all__ = ["Linear", "distributed", "fp8_autocast", "recipe"]
