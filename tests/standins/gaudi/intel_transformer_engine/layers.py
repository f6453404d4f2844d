"""The linear layer, and the context in which it multiplies in FP8."""

import contextlib

import habana_standin
import torch
from torch import nn

from . import distributed
from .recipe import Format

_recipe = None
"""That of the open context; None outside of one."""
_LARGEST = {torch.float8_e4m3fn: 240.0, torch.float8_e5m2: 57344.0}
"""Of E4M3, what Intel's Neural Compressor has for Gaudi 2."""


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
        self.minimize_memory = minimize_memory
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
        return _Fp8Product.apply(inp, weight, bias, _forward_type(_recipe), self.minimize_memory)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inp, weight, bias, kind, minimize_memory):
        census = habana_standin.census()
        with census.whole("hpu::cast_to_fp8_hybrid", [inp, weight]) as results:
            x, w = (_rounded(each, kind) for each in (inp, weight))
            results += [x, w]
        with census.whole("hpu::fp8_gemm_v2", [x, w, bias]) as results:
            out = nn.functional.linear(x, w, bias)
            results.append(out)
        ctx.trains, ctx.biased = weight.requires_grad, bias is not None
        ctx.weight = weight if minimize_memory else None
        held = [_rounded(inp)] if ctx.trains else []
        ctx.save_for_backward(*held, *([] if minimize_memory else [_rounded(weight)]))
        return out

    @staticmethod
    def backward(ctx, grad):
        held = list(ctx.saved_tensors)
        x = held.pop(0) if ctx.trains else None
        w = held.pop(0) if ctx.weight is None else _rounded(ctx.weight)
        with habana_standin.census().whole("hpu::fp8_gemm_v2_backward", [grad, w, x]) as results:
            g = _rounded(grad)
            back = g @ w
            of_weight = None if x is None else g.flatten(0, -2).T @ x.flatten(0, -2)
            results += [back] if of_weight is None else [back, of_weight]
        of_bias = grad.flatten(0, -2).sum(0) if ctx.biased else None
        return back, of_weight, of_bias, None, None


def _forward_type(recipe):
    return torch.float8_e5m2 if recipe.fp8_format is Format.E5M2 else torch.float8_e4m3fn


def _rounded(tensor, kind=torch.float8_e5m2):
    """As numbers of eight bits, of which the largest is the tensor's own; in the tensor's type."""
    held = tensor.detach()
    scale = _LARGEST[kind] / held.abs().amax().clamp(min=1e-30)
    return (held * scale).to(kind).to(tensor.dtype) / scale
