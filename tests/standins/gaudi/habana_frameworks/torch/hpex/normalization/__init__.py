"""Fused norms, by the arithmetic that their documentation gives."""

import habana_standin
import torch

from habana_frameworks.torch.core import step_closure as _step_closure


def _same(tensor):
    return tensor


class FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, data_in, gamma, eps, use_stages=True, bwd_mode=0, fast_math=False):
        habana_standin.record("FusedRMSNorm", list(data_in.shape))
        given = [data_in, gamma, eps, use_stages, bwd_mode, fast_math]
        census = habana_standin.census()
        hooks = torch.autograd.graph.saved_tensors_hooks(_same, _same)
        # A kernel keeps nothing inside, which a layer that recomputes would compute again.
        with census.whole("hpu::rms_norm", given) as results, torch.enable_grad(), hooks:
            x, weight = (each.detach().requires_grad_() for each in (data_in, gamma))
            wide = x.float()
            scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
            out = weight * scaled.to(x.dtype)
            results.append(out)
        ctx.inputs, ctx.out = (x, weight), out
        return out.detach()

    @staticmethod
    def backward(ctx, root_mean_square_norm_grad_in):
        given = [root_mean_square_norm_grad_in, *ctx.inputs, ctx.out]
        with habana_standin.census().whole("hpu::rms_norm_backward", given) as results:
            dx, dweight = torch.autograd.grad(ctx.out, ctx.inputs, root_mean_square_norm_grad_in)
            results += [dx, dweight]
        return dx, dweight, None, None, None, None


class FusedClipNorm:
    def __init__(self, parameters, max_norm):
        held = list(parameters)
        self.dtype = held[0].dtype if held else torch.float32
        self.max_norm_t = (torch.ones(1) * max_norm).to(self.dtype).to(torch.device("hpu"))

    def clip_norm(self, parameters):
        _step_closure._mark_step_if_lazy()
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return torch.tensor(0.0)
        habana_standin.record("FusedClipNorm", len(gradients))
        census = habana_standin.census()
        with (
            census.whole("hpu::fused_norm_", [*gradients, self.max_norm_t]) as results,
            torch.no_grad(),
        ):
            total = torch.stack([g.pow(2).sum() for g in gradients]).sum().sqrt().reshape(1)
            factor = (self.max_norm_t / (total + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(factor)
            results.append(total)
        _step_closure._mark_step_if_lazy()
        return total
