"""What an architecture does to its logits, found by trying its forward."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.interface import FULL, Level, Support
from anygauge.kernels.loss import LossKernel, base_of, replace_forward
from anygauge.util.text import first_line


@dataclass(frozen=True, slots=True)
class LogitsRule:
    """What an architecture does with its output layer's product: cap * tanh(scale * x / cap)."""

    scale: float = 1.0
    softcap: float | None = None

    def bind(self, kernel: LossKernel) -> LossKernel:
        """A kernel that does the same."""
        return functools.partial(kernel, scale=self.scale, softcap=self.softcap)

    def __call__(self, x: Tensor) -> Tensor:
        """The logits, of the product."""
        x = x * self.scale
        return x if self.softcap is None else torch.tanh(x / self.softcap) * self.softcap


class _NotServed(Exception):
    """Why an architecture's loss cannot be made by its output layer."""


def logits_rule(model: Any) -> tuple[LogitsRule, Support]:
    """What the model's forward does between its decoder and its logits, seen by running it.

    The decoder and the output layer are stood in for while it runs: parameters may be on the meta
    device. Only what is found to be one of the known rules is served.

    Args:
        model: with its adapter, before anything is put into it.

    Returns:
        The rule, and whether `return_loss` can make the loss in the output layer; the reason if
        not.
    """
    try:
        return _find_rule(base_of(model)), FULL
    except _NotServed as error:
        return LogitsRule(), Support(Level.NOT_WRITTEN_YET, str(error))


def _find_rule(model: Any) -> LogitsRule:
    name = type(model).__name__
    head: Any = model.get_output_embeddings()
    _check_head(head, name)
    if "forward" in vars(model) or "forward" in vars(head):
        raise _NotServed(f"the forward of this {name} was replaced by something else")
    decoder = _find_decoder(model, head, name)
    hidden = torch.linspace(-1.0, 1.0, 2 * 8).reshape(1, 2, 8)
    product = torch.linspace(-90.0, 90.0, 2 * 32).reshape(1, 2, 32)
    given: list[Tensor] = []

    def head_forward(_: Any, x: Tensor) -> Tensor:
        given.append(x)
        return product.clone()

    replace_forward(head, head_forward)
    replace_forward(decoder, lambda *_, **__: _decoder_output(hidden))
    try:
        ids = torch.zeros(1, 2, dtype=torch.long)
        with torch.no_grad():
            logits = model.forward(input_ids=ids, use_cache=False).logits
    except Exception as error:
        reason = first_line(error)
        raise _NotServed(f"the forward of {name} could not be followed: {reason}") from error
    finally:
        del head.forward, decoder.forward
    if len(given) != 1 or given[0].shape != hidden.shape:
        raise _NotServed(f"{name} does not give its last hidden state to its output layer once")
    if logits.shape != product.shape:
        raise _NotServed(f"{name} returns logits of another shape than its output layer's")
    for rule in _candidate_rules(model.config):
        if torch.allclose(logits.float(), rule(product), rtol=1e-5, atol=1e-6):
            return rule
    raise _NotServed(f"{name} changes its logits in a way that is not known here")


def _check_head(head: Any, name: str) -> None:
    if type(head) is nn.Linear:
        return
    from peft.tuners.lora import Linear

    if not isinstance(head, Linear) or type(head.base_layer) is not nn.Linear:
        kind = "none" if head is None else f"a {type(head).__name__}"
        raise _NotServed(f"the output layer of {name} is {kind}, not a torch.nn.Linear")
    if head.use_dora[head.active_adapters[0]]:
        raise _NotServed("DoRA on the output layer normalizes its whole weight")


def _find_decoder(model: Any, head: Any, name: str) -> Any:
    found = model.get_decoder() if hasattr(model, "get_decoder") else model
    if found is model or found is head or found is None:  # some call their output layer decoder
        names = (model.base_model_prefix, "model")
        found = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if not isinstance(found, nn.Module) or "forward" in vars(found):
        raise _NotServed(f"the decoder of {name} was not found")
    return found


def _decoder_output(hidden: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Decoded(BaseModelOutputWithPast):
        """A decoder's output; fields that only some kinds of it have are None."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return Decoded(last_hidden_state=hidden)


def _candidate_rules(config: Any) -> list[LogitsRule]:
    """Rules by what configurations call their numbers; each is tried, none is believed."""
    text = config.get_text_config()

    def number(name: str) -> float | None:
        value = getattr(text, name, None)
        return float(value) if isinstance(value, int | float) and value else None

    factor, divisor = number("logit_scale"), number("logits_scaling")
    scales = [1.0]
    scales += [] if factor is None else [factor]
    scales += [] if divisor is None else [1.0 / divisor, divisor]
    caps = [None, number("final_logit_softcapping")]
    return [LogitsRule(scale, cap) for cap in dict.fromkeys(caps) for scale in scales]
