"""The attention of a model: a kernel behind the model library's registry, or one of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from anygauge.interface import AttentionKernel, Backend, PluginError


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChoice:
    """The attention that models are built with.

    Attributes:
        name: for the model library.
        why: in words.
        masks_of: the library's attention whose masks it takes.
        kernel: behind the name, if it is one.
    """

    name: str
    why: str
    masks_of: str
    kernel: AttentionKernel | None = None

    def describe(self) -> str:
        """For the terminal: what computes it, and why that."""
        return f"{self.name} ({self.kernel.describe if self.kernel else self.why})"


def library_attention(backend: Backend, config: Any) -> AttentionChoice:
    """The library's own: the backend's, or what the architecture has."""
    name, why = backend.attention, backend.attention_why
    flag = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}.get(name)
    if flag is not None and not getattr(model_class(config), flag, True):
        name, why = "eager", f"this architecture has no {name}"
    elif name == "sdpa" and config_value(config.get_text_config(), "attn_logit_softcapping"):
        # Versions before 5 of the library compute such models without their cap there.
        name, why = "eager", "sdpa would leave out the cap of this architecture's scores"
    return AttentionChoice(name=name, why=why, masks_of=name)


def register_attention(kernel: AttentionKernel) -> str:
    """Make the model library know an attention kernel; returns the name to build models with.

    Raises:
        PluginError: the library has no masks of the kind that the kernel takes.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    if kernel.mask not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise PluginError(
            f"attention kernel {kernel.name!r} takes masks as for {kernel.mask!r}, which the "
            "installed transformers does not make"
        )
    AttentionInterface.register(kernel.name, kernel.forward)
    # With a name in the first registry alone, models would get no mask: padding would be seen.
    AttentionMaskInterface.register(kernel.name, ALL_MASK_ATTENTION_FUNCTIONS[kernel.mask])
    return kernel.name


def unfit_attention(kernel: AttentionKernel, config: Any) -> str | None:
    """Why a kernel cannot serve a model of this configuration, or None."""
    if reason := never_called(model_class(config), kernel.mask):
        return reason
    dropouts = (
        config_value(config, name) for name in ("attention_dropout", "attn_pdrop", "attn_dropout")
    )
    if not kernel.drops and any(isinstance(p, int | float) and p > 0 for p in dropouts):
        return "it drops attention weights in training, which the kernel cannot"
    heads, hidden = (config_value(config, n) for n in ("num_attention_heads", "hidden_size"))
    size = config_value(config, "head_dim") or (hidden // heads if hidden and heads else None)
    if size is not None and size < kernel.smallest_head:
        return f"its heads of {size} are below the {kernel.smallest_head} that the kernel serves"
    return None


def never_called(kind: type | None, mask: str = "eager") -> str | None:
    """Why a class of models does not call attention through the library's registry, or None.

    Args:
        kind: None, where it is not known yet, raises no objection.
        mask: of the kernel; see `AttentionKernel`.
    """
    if kind is None:
        return None
    module = sys.modules[kind.__module__]
    # The library's own flag is not set on all that do.
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return (
            f"{kind.__name__} computes attention itself and not through the library's interface, "
            "so that a kernel would never be called"
        )
    # Some architectures are in the first registry and make masks of all positions themselves.
    if mask == "flex_attention" and not hasattr(module, "create_causal_mask"):
        return f"{kind.__name__} makes no masks by blocks"
    return None


def config_value(config: Any, name: str) -> Any:
    """A field of a configuration; None where it has none, or one for each layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers 5.23 and newer refuse to give what layers differ in
        return None


def model_class(config: Any) -> type | None:
    """The library's class for a configuration; None for one that comes with a model's files."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    kind: type | None = found[0] if isinstance(found, tuple) else found
    return kind
