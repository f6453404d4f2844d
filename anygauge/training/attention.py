"""The attention of a run: a kernel or the model library's, which it is and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anygauge.config.schema import RunFile
from anygauge.interface import AttentionKernel, Backend, PluginError, UnsupportedError
from anygauge.models.kernels import (
    drops_attention,
    head_size,
    library_serves,
    register_attention,
    takes_kernels,
)
from anygauge.registry import REFERENCE, KernelChoice, Registry
from anygauge.registry.kernels import load_kernel
from anygauge.training.kernels import check_attention

ATTENTION = "attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChoice:
    """What models are built with.

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


def choose_attention(
    run: RunFile,
    backend: Backend,
    registry: Registry,
    kernels: dict[str, KernelChoice],
    config: Any,
) -> AttentionChoice:
    """The attention that the model is built with; what cannot serve it gives way with a reason.

    Args:
        kernels: of the run; attention becomes the reference there if the model cannot have it.
        config: of the model.

    Raises:
        UnsupportedError: the run file asks for what cannot be.
    """
    asked = run.model.attention
    if asked != "auto":
        check_attention(run)
        kernels.pop(ATTENTION, None)
        return AttentionChoice(name=asked, why="asked for by name", masks_of=asked)
    kernel = load_kernel(kernels, ATTENTION)
    if kernel is not None and not isinstance(kernel, AttentionKernel):
        raise PluginError(
            f"kernel {kernels[ATTENTION].name!r} for attention is a {type(kernel).__name__}; its "
            "factory must return an AttentionKernel"
        )
    reason = None if kernel is None else _unfit(kernel, config)
    if kernel is not None and reason is None:
        return AttentionChoice(
            name=register_attention(kernel),
            why=kernels[ATTENTION].reason,
            masks_of=kernel.mask,
            kernel=kernel,
        )
    if kernel is not None:
        name = kernels[ATTENTION].name
        if run.kernels.get(ATTENTION, REFERENCE) != REFERENCE:
            raise UnsupportedError(
                f"kernels.attention: {name!r} cannot serve this model: {reason}. Leave it out: "
                f"the model's own attention is used then"
            )
        kernels[ATTENTION] = KernelChoice(
            operation=ATTENTION,
            name=REFERENCE,
            reason=f"{name} cannot serve this model: {reason}",
            rejected=((name, str(reason)),),
        )
    if not library_serves(config, backend.attention):
        why = f"this architecture has no {backend.attention}"
        return AttentionChoice(name="eager", why=why, masks_of="eager")
    return AttentionChoice(
        name=backend.attention, why=backend.attention_why, masks_of=backend.attention
    )


def _unfit(kernel: AttentionKernel, config: Any) -> str | None:
    served = takes_kernels(config, kernel.mask)
    if not served:
        return served.reason
    if not kernel.drops and drops_attention(config):
        return "it drops attention weights in training, which the kernel cannot"
    size = head_size(config)
    if size is not None and size < kernel.smallest_head:
        return f"its heads of {size} are below the {kernel.smallest_head} that the kernel serves"
    return None
