"""The linear layer, and the context in which it would multiply in FP8."""

import contextlib

import habana_standin
import torch
from torch import nn

from . import distributed

_recipe = None
"""That of the open context; None outside of one."""


class fp8_autocast(contextlib.ContextDecorator):
    """A context, or a decorator of a forward function."""

    def __init__(self, *, enabled, fp8_recipe=None, force_measurement=None):
        if force_measurement is not None:
            raise NotImplementedError("the stand-in measures by the recipe's interval alone")
        assert not enabled or fp8_recipe is not None
        self._given = fp8_recipe if enabled else None
        self._before = []

    def _recreate_cm(self):
        return fp8_autocast(enabled=self._given is not None, fp8_recipe=self._given)

    def __enter__(self):
        global _recipe
        self._before.append(_recipe)
        _recipe = self._given
        if self._given is not None:
            shown = {**vars(self._given), "fp8_format": self._given.fp8_format.value}
            habana_standin.record("fp8_autocast", torch.is_grad_enabled(), shown)

    def __exit__(self, *failed):
        global _recipe
        _recipe = self._before.pop()


class Linear(nn.Module):
    def __init__(
        self,
        in_features,
        out_features,
        *,
        bias=True,
        params_dtype=torch.float32,
        skip_weight_param_allocation=False,
        minimize_memory=False,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        if not skip_weight_param_allocation:
            raise NotImplementedError("the stand-in has layers over the weights of others alone")
        self.use_bias = bias
        self._to_repeat = 0
        habana_standin.record("te.Linear", in_features, out_features, bias, minimize_memory)

    def forward(self, inp, weight=None, bias=None, is_first_microbatch=None):
        assert is_first_microbatch is None, "the stand-in converts a weight at each call"
        weight = self.weight if weight is None else weight
        bias = (self.bias if bias is None else bias) if self.use_bias else None
        again = torch._C._current_graph_task_id() != -1
        if _recipe is None:
            # Without its recipe, what is computed again is not what was computed.
            assert not (again and self._to_repeat), "recomputed outside of fp8_autocast"
            return nn.functional.linear(inp, weight, bias)
        assert not again or distributed.announced, "recomputed without activation_checkpointing"
        assert inp.device.type == weight.device.type == "hpu"
        if again:
            self._to_repeat -= 1
        elif distributed.announced:
            assert not torch.is_grad_enabled(), "shown with the reentrant form alone"
            self._to_repeat += 1
        habana_standin.record("fp8_gemm", list(inp.shape), again)
        return nn.functional.linear(inp, weight, bias)
