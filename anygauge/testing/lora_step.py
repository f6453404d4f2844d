"""The operators of aten that a LoRA step calls, and what tests each: docs/plugins.md has the table.

A test records what the kit's step calls and fails where this list, or the page's, lacks it.
"""

from __future__ import annotations

from collections.abc import Mapping

from anygauge.interface import HOST_DEVICE

OWN = "our own case"
"""`anygauge.testing.real_sizes`, `chance` or `copies` tests it."""
LOOP = "only through the loop"
"""It has no values to compare, or runs on the host."""

_IN_LOOP = (
    "_has_compatible_shallow_copy_type _local_scalar_dense _pin_memory _record_function_enter_new "
    "_record_function_exit alias allclose detach empty empty_like equal is_pinned lift_fresh "
    "promote_types set_"
)
_OWN = (
    "_foreach_add_ _foreach_addcdiv_ _foreach_addcmul_ _foreach_copy_ _foreach_div_ "
    "_foreach_lerp_ _foreach_mul_ _foreach_norm _foreach_sqrt _foreach_sub_ _fused_adamw_ "
    "_to_copy bernoulli_ copy_ native_dropout normal_ randint uniform_"
)
_OPINFO = (
    "_softmax_backward_data abs add addmm all any arange bitwise_and bitwise_or bmm cat clamp "
    "clamp_min clone constant_pad_nd cos div eq exp expand fill full full_like gather "
    "ge gt index_add index_select isnan le linspace logsumexp maximum mean mm mul "
    "native_dropout_backward ne neg new_ones new_zeros nonzero ones ones_like pow reciprocal rsqrt "
    "rsub scalar_tensor scatter select sin slice sqrt squeeze stack sub sum t transpose tril "
    "unsqueeze view where zero_ zeros zeros_like"
)
_IN_PLACE = "add_ div_ exp_ fill_ mul_ scatter_ sub_"
_ATTENTION = "nn.functional.scaled_dot_product_attention"
_OTHER_NAMES = {
    "_safe_softmax": "torch.ops.aten._safe_softmax.default",
    f"_scaled_dot_product_flash_attention_for_{HOST_DEVICE}": _ATTENTION,
    f"_scaled_dot_product_flash_attention_for_{HOST_DEVICE}_backward": _ATTENTION,
    "_softmax": "softmax",
    "_unsafe_view": "view",
    "embedding": "nn.functional.embedding",
    "index": "__getitem__",
    "linalg_vector_norm": "linalg.vector_norm",
    "silu": "nn.functional.silu",
    "silu_backward": "nn.functional.silu",
    "slice_backward": "slice",
}
LORA_STEP: Mapping[str, str] = dict(
    sorted(
        {
            **dict.fromkeys(_IN_LOOP.split(), LOOP),
            **dict.fromkeys(_OWN.split(), OWN),
            **{name: name for name in _OPINFO.split()},
            **{name: name.removesuffix("_") for name in _IN_PLACE.split()},
            **_OTHER_NAMES,
        }.items()
    )
)
"""Operator -> OpInfo's name, `OWN` or `LOOP`. A backward's OpInfo is the forward's, whose gradients
are compared, too."""
_OF_OTHERS = (
    "addcdiv addcmul argmax baddbmm cumsum lerp linalg.vector_norm log_softmax masked_fill matmul "
    "max minimum nn.functional.cross_entropy nn.functional.gelu nn.functional.layer_norm "
    "nn.functional.linear nn.functional.nll_loss nn.functional.relu nn.functional.rms_norm outer "
    "sigmoid sort tanh topk triu"
)
OTHER_STEPS = tuple(_OF_OTHERS.split())
"""OpInfo's names of what other architectures, losses, kernels and optimizers call beside it."""
OPINFOS = tuple(sorted({*LORA_STEP.values(), *OTHER_STEPS} - {OWN, LOOP}))
"""OpInfo's names, each once."""
