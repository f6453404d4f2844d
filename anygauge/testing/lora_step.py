"""The operators of torch that the kit tries by OpInfo's samples.

docs/conformance/operators.txt lists what a LoRA step calls and what tests each operator; a test
records such a step, and fails where that list or this one lacks one. A backward's OpInfo is the
forward's, whose gradients are compared, too.
"""

_STEP = (
    "__getitem__ _softmax_backward_data abs add addmm all any arange bitwise_and bitwise_or bmm "
    "cat clamp clamp_min clone constant_pad_nd cos div eq exp expand fill full full_like gather ge "
    "gt index_add index_select isnan le linalg.vector_norm linspace logsumexp maximum mean mm mul "
    "native_dropout_backward ne neg new_ones new_zeros nn.functional.embedding "
    "nn.functional.scaled_dot_product_attention nn.functional.silu nonzero ones ones_like pow "
    "reciprocal rsqrt rsub scalar_tensor scatter select sin slice softmax sqrt squeeze stack sub "
    "sum t torch.ops.aten._safe_softmax.default transpose tril unsqueeze view where zero_ zeros "
    "zeros_like"
)
_OTHERS = (
    "addcdiv addcmul argmax baddbmm cumsum lerp log_softmax masked_fill matmul max minimum "
    "nn.functional.cross_entropy nn.functional.gelu nn.functional.layer_norm nn.functional.linear "
    "nn.functional.nll_loss nn.functional.relu nn.functional.rms_norm outer sigmoid sort tanh topk "
    "triu"
)
OPINFOS = sorted([*_STEP.split(), *_OTHERS.split()])
"""OpInfo's names of what a LoRA step calls, and of what other architectures, losses, kernels and
optimizers call beside it."""
