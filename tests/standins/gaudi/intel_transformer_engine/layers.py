"""The linear layer, and the context in which it multiplies in FP8."""

import contextlib
import io

import habana_standin
import torch
from torch import nn

from . import distributed
from .recipe import Format

_recipe = None
"""That of the open context; None outside of one."""
_FORWARD = ("input", "weight")
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
        self.fp8_meta = {}
        self._amax = {}
        self._calls = 0
        self._first_time = []
        habana_standin.record("te.Linear", in_features, out_features, bias, minimize_memory)

    def get_extra_state(self):
        state = io.BytesIO()
        torch.save({name: scale.cpu() for name, scale in self.fp8_meta.items()}, state)
        return state

    def set_extra_state(self, state):
        state.seek(0)
        self.fp8_meta = dict(torch.load(state))

    def forward(self, inp, weight=None, bias=None, is_first_microbatch=None):
        assert is_first_microbatch is None, "the stand-in converts a weight at each call"
        weight = self.weight if weight is None else weight
        bias = (self.bias if bias is None else bias) if self.use_bias else None
        again = torch._C._current_graph_task_id() != -1
        if _recipe is None:
            # Without its recipe, what is computed again is not what was computed.
            assert not (again and self._first_time), "recomputed outside of fp8_autocast"
            return nn.functional.linear(inp, weight, bias)
        assert not again or distributed.announced, "recomputed without activation_checkpointing"
        assert inp.device.type == weight.device.type == "hpu"
        measured = self._measured(inp, weight, again)
        habana_standin.record("fp8_gemm", list(inp.shape), again)
        return _Fp8Product.apply(inp, weight, bias, self, measured, _recipe)

    def _measured(self, inp, weight, again):
        """The scales of input and weight for this call; a later one may have others.

        As in test_amax_measure_interval: each call measures, and scales follow from the call before
        at the first call of each interval, so that those of the first interval are 1.
        """
        if again:
            return self._first_time.pop(0)
        self._calls += 1
        largest = dict.fromkeys(_FORWARD, _LARGEST[_forward_type(_recipe)])
        largest["gradient"] = _LARGEST[torch.float8_e5m2]
        if _recipe.interval == 1 or self._calls % _recipe.interval == 1:
            for name, amax in self._amax.items():
                self._follow(name, amax, largest[name])
        used = tuple(self._scale(name, inp.device) for name in _FORWARD)
        for name, tensor in zip(_FORWARD, (inp, weight), strict=True):
            self._measure(name, tensor)
        if distributed.announced:
            assert not torch.is_grad_enabled(), "shown with the reentrant form alone"
            self._first_time.append(used)
        return used

    def _scale(self, name, device):
        if name not in self.fp8_meta:
            self.fp8_meta[name] = torch.ones((), device=device)
        return self.fp8_meta[name]

    def _measure(self, name, tensor):
        with torch.no_grad(), habana_standin.census().whole("hpu::amax", [tensor]) as results:
            self._amax[name] = tensor.detach().abs().amax().float()
            results.append(self._amax[name])

    def _follow(self, name, amax, largest):
        before = self._scale(name, amax.device)
        with torch.no_grad(), habana_standin.census().whole("hpu::scale", [amax]) as results:
            # A power of two: with another scale, 109000 would not become 106496 in E4M3 and 114688
            # in E5M2, as it does in test_te_linear_out_of_scale.
            power = torch.exp2(torch.floor(torch.log2(largest / amax)) - _recipe.margin)
            self.fp8_meta[name] = torch.where(amax > 0, power, before)
            results.append(self.fp8_meta[name])


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inp, weight, bias, layer, scales, recipe):
        ctx.layer, ctx.scales = layer, scales
        ctx.biased = bias is not None
        census = habana_standin.census()
        kind = _forward_type(recipe)
        with census.whole("hpu::cast_to_fp8_hybrid", [inp, weight]) as results:
            x, w = (_rounded(each, kind, s) for each, s in zip((inp, weight), scales, strict=True))
            results += [x, w]
        with census.whole("hpu::fp8_gemm_v2", [x, w, bias]) as results:
            out = nn.functional.linear(x, w, bias)
            results.append(out)
        held = (_rounded(inp, torch.float8_e5m2, scales[0]),) if weight.requires_grad else ()
        if layer.minimize_memory:
            ctx.weight = weight
        else:
            held = (*held, _rounded(weight, torch.float8_e5m2, scales[1]))
        ctx.save_for_backward(*held)
        ctx.trains = weight.requires_grad
        return out

    @staticmethod
    def backward(ctx, grad):
        held = list(ctx.saved_tensors)
        x = held.pop(0) if ctx.trains else None
        w = (
            _rounded(ctx.weight, torch.float8_e5m2, ctx.scales[1])
            if ctx.layer.minimize_memory
            else held.pop(0)
        )
        layer = ctx.layer
        scale = layer._scale("gradient", grad.device)
        layer._measure("gradient", grad)
        census = habana_standin.census()
        with census.whole("hpu::fp8_gemm_v2_backward", [grad, w, x]) as results:
            g = _rounded(grad, torch.float8_e5m2, scale)
            back = g @ w
            of_weight = None if x is None else g.flatten(0, -2).T @ x.flatten(0, -2)
            results += [back] if of_weight is None else [back, of_weight]
        of_bias = grad.flatten(0, -2).sum(0) if ctx.biased else None
        return back, of_weight, of_bias, None, None, None


def _forward_type(recipe):
    return torch.float8_e5m2 if recipe.fp8_format is Format.E5M2 else torch.float8_e4m3fn


def _rounded(tensor, kind, scale):
    """As numbers of eight bits, in the tensor's own type."""
    scale = scale.to(tensor.dtype)
    largest = _LARGEST[kind]
    return (tensor.detach() * scale).clamp(-largest, largest).to(kind).to(tensor.dtype) / scale
