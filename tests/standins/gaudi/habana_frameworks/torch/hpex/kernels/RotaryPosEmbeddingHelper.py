"""Rotary position embeddings by the formula of the original's documentation, from a table."""

import habana_standin
import torch


def _rotate(p, cos, sin, position_ids, sign=1.0):
    if cos.dim() != 4 or cos.shape[:2] != (1, 1) or cos.shape != sin.shape:
        raise RuntimeError(f"cos and sin must be (1, 1, S, D), not {tuple(cos.shape)}")
    if position_ids.dtype is not torch.long or position_ids.shape != (p.shape[0], p.shape[2]):
        raise RuntimeError(f"position_ids must be (B, T) int64, not {tuple(position_ids.shape)}")
    rows = [table.to(p.dtype)[0, 0][position_ids].unsqueeze(1) for table in (cos, sin)]
    first, second = p.chunk(2, dim=-1)
    if sign > 0:
        return p * rows[0] + torch.cat((-second, first), dim=-1) * rows[1]
    turned = p * rows[1]
    first, second = turned.chunk(2, dim=-1)
    return p * rows[0] + torch.cat((second, -first), dim=-1)


class RotaryPosEmbeddingHelperV2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, cos, sin, position_ids):
        habana_standin.record(
            "RotaryPosEmbeddingHelperV2", *(list(each.shape) for each in (p, cos, position_ids))
        )
        ctx.save_for_backward(cos, sin, position_ids)
        given = [p, sin, cos, position_ids]
        with habana_standin.census().whole("hpu::rotary_pos_embedding", given) as results:
            results.append(_rotate(p, cos, sin, position_ids))
        return results[0]

    @staticmethod
    def backward(ctx, p_grad_in):
        # Once: recomputation gives each saved tensor a single time.
        given = [p_grad_in, *ctx.saved_tensors]
        with habana_standin.census().whole("hpu::rotary_pos_embedding_backward", given) as results:
            results.append(_rotate(*given, sign=-1.0))
        return results[0], None, None, None
