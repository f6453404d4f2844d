"""Fused attention, by the arithmetic that its documentation gives."""

import math

import habana_standin
import torch

from .RotaryPosEmbeddingHelper import RotaryPosEmbeddingHelperV2


def _same(tensor):
    return tensor


class FusedSDPA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        softmax_mode="None",
        recompute_mode=None,
        valid_seq_len=None,
        seq_padding_type="left",
        return_dropout_mask=False,
        return_attn_probs=False,
    ):
        softmax_mode = softmax_mode.lower()
        habana_standin.record(
            "FusedSDPA",
            list(q.shape),
            attn_mask is not None,
            dropout_p,
            is_causal,
            softmax_mode,
            recompute_mode,
        )
        if recompute_mode and q.requires_grad and softmax_mode == "fast":
            assert is_causal
        if scale is None:
            scale = 1.0 / math.sqrt(q.size(-1))
        ctx.set_materialize_grads(False)
        given = [q, k, v, attn_mask, dropout_p, is_causal, scale, softmax_mode, recompute_mode]
        census = habana_standin.census()
        hooks = torch.autograd.graph.saved_tensors_hooks(_same, _same)
        # A kernel keeps nothing inside, which a layer that recomputes would compute again.
        with census.whole("hpu::sdpa_fwd", given) as results, torch.enable_grad(), hooks:
            inputs = [each.detach().requires_grad_() for each in (q, k, v)]
            groups = q.shape[1] // k.shape[1]
            keys, values = (each.repeat_interleave(groups, dim=1) for each in inputs[1:])
            scores = torch.matmul(inputs[0], keys.transpose(2, 3)) * scale
            if attn_mask is not None:
                scores = scores + attn_mask
            elif is_causal:
                length = scores.shape[-1]
                later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
                scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
            weights = torch.softmax(scores, dim=-1)
            weights = torch.nn.functional.dropout(weights, dropout_p)
            out = torch.matmul(weights, values)
            results.append(out)
        ctx.inputs, ctx.out = inputs, out
        return out.detach()

    @staticmethod
    def backward(ctx, dout, *args):
        census = habana_standin.census()
        with census.whole("hpu::sdpa_bwd", [dout, *ctx.inputs, ctx.out]) as results:
            grads = torch.autograd.grad(ctx.out, ctx.inputs, dout)
            results += grads
        return (*grads, *([None] * 10))
