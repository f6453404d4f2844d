"""Linear layers whose weights are bitsandbytes' codes, made while the weights are read.

Codes are parameters, which strategies divide, gather and count as any others. What belongs to
them, scales and their tables, are buffers, whole on each rank: about 1/16 byte for each weight, a
quarter of it with double quantization. A layer computes with what its module has when it is called,
also in backward: a strategy may replace its parameter, or free and gather it in between.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.config.sections import QuantizeSection
from anygauge.interface import UnsupportedError

BLOCK = 64
"""Weights that share a scale in nf4; transformers has no other."""
NESTED_BLOCK = 256
"""Scales that share one of their own, with double quantization."""
OUTLIERS = 6.0
"""Inputs above it are multiplied in 16 bits under int8, in evaluation on any device and in training
where bitsandbytes multiplies codes; transformers' default."""


class QuantizedLinear(nn.Linear):
    """A frozen linear layer; its `weight` holds codes.

    Attributes:
        plain_shape: of the weight: (outputs, inputs).
        W_q: what peft asks a layer for before it calls `dequantize`, as DoRA's norms need it.
    """

    def __init__(
        self,
        plain: nn.Linear,
        codes: Tensor,
        statistics: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Args:
        codes, statistics: shapes and types, on the meta device.
        dtype: the weight has it when it is quantized.
        """
        nn.Module.__init__(self)
        self._from = dtype
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias = plain.bias
        for name, tensor in statistics.items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def plain_shape(self) -> tuple[int, int]:
        """See the class."""
        return self.out_features, self.in_features

    @property
    def W_q(self) -> Tensor:
        """See the class."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), in the input's type."""
        return _Product.apply(x, self)

    def dequantize(self) -> Tensor:
        """The weight, (outputs, inputs), as the codes have it."""
        if self.weight.is_meta:
            return torch.empty(self.plain_shape, dtype=self._from, device="meta")
        return self._decode(self._from)

    @abstractmethod
    def encode(self, weight: Tensor) -> Tensor:
        """Codes of a weight on the host; what belongs to them becomes this layer's."""

    @abstractmethod
    def _decode(self, dtype: torch.dtype) -> Tensor: ...

    @abstractmethod
    def _multiply(self, x: Tensor) -> Tensor: ...


class _Product(torch.autograd.Function):
    """A product with codes, whose backward reads them anew from the layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        if x.is_meta:  # a plan's: kernels decode into a weight, too
            return nn.functional.linear(x, layer.dequantize().to(x.dtype), layer.bias)
        return layer._multiply(x).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        layer = ctx.layer
        if gradient.is_meta:
            return gradient @ layer.dequantize().to(gradient.dtype), None
        return gradient @ layer._decode(gradient.dtype), None


class Nf4Linear(QuantizedLinear):
    """Two codes in each byte: `weight` is (ceil(numbers / 2), 1) uint8."""

    absmax: Tensor
    offset: Tensor
    nested_absmax: Tensor
    quant_map: Tensor
    nested_quant_map: Tensor

    def __init__(self, plain: nn.Linear, section: QuantizeSection, dtype: torch.dtype) -> None:
        """Args: dtype: see `QuantizedLinear`."""
        numbers = math.prod(plain.weight.shape)
        blocks = -(-numbers // BLOCK)
        meta = functools.partial(torch.empty, device="meta")
        statistics = {"absmax": meta(blocks), "quant_map": meta(16)}
        if section.double_quantization:
            statistics |= {
                "absmax": meta(blocks, dtype=torch.uint8),
                "nested_absmax": meta(-(-blocks // NESTED_BLOCK)),
                "nested_quant_map": meta(256),
                "offset": meta(()),
            }
        codes = meta(-(-numbers // 2), 1, dtype=torch.uint8)
        super().__init__(plain, codes, statistics, dtype)
        self._double = section.double_quantization
        self._compute = _compute_dtype(section)

    def encode(self, weight: Tensor) -> Tensor:
        """See `QuantizedLinear.encode`."""
        from bitsandbytes.functional import quantize_4bit

        codes, state = quantize_4bit(
            weight.to(self._from).contiguous(),
            blocksize=BLOCK,
            compress_statistics=self._double,
            quant_type="nf4",
        )
        self.absmax, self.quant_map = state.absmax, state.code
        if self._double:
            self.offset, self.nested_absmax = state.offset, state.state2.absmax
            self.nested_quant_map = state.state2.code
        return codes

    def _quant_state(self) -> Any:
        from bitsandbytes.functional import QuantState

        nested = None
        if self._double:
            nested = QuantState(
                absmax=self.nested_absmax,
                code=self.nested_quant_map,
                blocksize=NESTED_BLOCK,
                dtype=torch.float32,
            )
        return QuantState(
            absmax=self.absmax,
            shape=torch.Size(self.plain_shape),
            code=self.quant_map,
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=self._from,
            offset=self.offset if self._double else None,
            state2=nested,
        )

    def _decode(self, dtype: torch.dtype) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.weight.data, self._quant_state()).to(dtype)

    def _multiply(self, x: Tensor) -> Tensor:
        from bitsandbytes import matmul_4bit

        dtype = self._compute or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return matmul_4bit(x.to(dtype), self.weight.data, self._quant_state(), bias=bias)


class Int8Linear(QuantizedLinear):
    """A code in each byte, a scale for each output: `weight` is (outputs, inputs) int8."""

    SCB: Tensor

    def __init__(self, plain: nn.Linear, section: QuantizeSection, dtype: torch.dtype) -> None:
        """Args: dtype: see `QuantizedLinear`."""
        codes = torch.empty(plain.weight.shape, dtype=torch.int8, device="meta")
        scales = torch.empty(plain.out_features, device="meta")
        super().__init__(plain, codes, {"SCB": scales}, dtype)

    def encode(self, weight: Tensor) -> Tensor:
        """See `QuantizedLinear.encode`."""
        from bitsandbytes.functional import int8_vectorwise_quant

        # float16 in between, as bitsandbytes' own layer does it.
        plain = weight.to(self._from).to(torch.float16)
        codes, self.SCB, _ = int8_vectorwise_quant(plain.contiguous())
        return codes

    def _decode(self, dtype: torch.dtype) -> Tensor:
        # Multiplied in float32 and rounded once, as bitsandbytes does it.
        return self.weight.data.to(dtype, copy=True).mul_(self.SCB.mul(1 / 127).unsqueeze(1))

    def _multiply(self, x: Tensor) -> Tensor:
        from bitsandbytes import MatmulLtState, matmul

        state = MatmulLtState()
        state.CB, state.SCB = self.weight.data, self.SCB
        state.has_fp16_weights, state.threshold = False, OUTLIERS
        state.is_training = self.training
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return matmul(x, self.weight.data, bias=bias, state=state)


def _compute_dtype(section: QuantizeSection) -> torch.dtype | None:
    name = section.compute_dtype
    return None if name == "param_dtype" else getattr(torch, name)


def quantize_layers(model: Any, section: QuantizeSection, dtype: torch.dtype) -> None:
    """Put layers for codes in place of a skeleton's linear ones, those that transformers quantizes.

    Raises:
        UnsupportedError: most weights are in no linear layer, or in layers that lie transposed.
    """
    fused = next((name for name, p in model.named_parameters() if p.dim() == 3), None)
    if fused is not None:
        raise UnsupportedError(
            f"model.quantize: {fused!r} holds a layer's experts as one tensor, but bitsandbytes "
            "quantizes only linear layers, so most of the model would stay unquantized. Leave "
            "model.quantize out"
        )
    kept = _left_alone(model)
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not kept(name)
    }
    if not layers:
        raise UnsupportedError(
            f"model.quantize: {type(model).__name__} has no torch.nn.Linear other than its output "
            "layer (Conv1D, as in GPT-2, is not quantized). Leave it out"
        )
    kind = Nf4Linear if section.type == "nf4" else Int8Linear
    for name, layer in layers.items():
        model.set_submodule(name, kind(layer, section, dtype))


def _left_alone(model: Any) -> Any:
    """(layer's name) -> whether transformers does not quantize it: output and tied layers."""
    fixed = list(getattr(model, "_keep_in_fp32_modules", None) or ())
    try:
        from transformers.quantizers.base import get_keys_to_not_convert
        from transformers.quantizers.quantizers_utils import should_convert_module
    except ImportError:  # before transformers 5
        from transformers.integrations import get_keys_to_not_convert

        names = [*get_keys_to_not_convert(model), *fixed]
        return lambda name: any(f"{key}." in f"{name}." for key in names)
    patterns = [*get_keys_to_not_convert(model), *fixed]
    return lambda name: not should_convert_module(name, patterns)


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Name of each weight that is codes -> its layer."""
    return {
        f"{name}.weight" if name else "weight": module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def transformers_config(section: QuantizeSection, dtype: torch.dtype) -> Any:
    """Return the same settings for `from_pretrained`.

    Args:
        dtype: the model's.
    """
    from transformers import BitsAndBytesConfig

    if section.type == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=OUTLIERS)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=section.type,
        bnb_4bit_use_double_quant=section.double_quantization,
        bnb_4bit_compute_dtype=_compute_dtype(section) or dtype,
    )


def keep_scales(model: nn.Module) -> None:
    """Have bitsandbytes answer on the host with the scales that it was trained with.

    In evaluation its layers of 4 bits would be packed for processors with AVX512-BF16, for good,
    and their scales rounded to bfloat16 (0.50, `_convert_weight_packed_for_cpu`): other logits, and
    an error where a layer has fewer than 64 inputs.
    """
    for module in model.modules():
        for name in [name for name in vars(module) if name.startswith("support_avx512bf16")]:
            setattr(module, name, False)


def dequantize(model: Any) -> Any:
    """A model of transformers' with plain linear layers in place of bitsandbytes' ones."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt
    from peft.utils.integrations import dequantize_bnb_weight

    for name, layer in list(model.named_modules()):
        if isinstance(layer, Linear4bit | Linear8bitLt):
            with torch.device("meta"):
                plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
            weight = dequantize_bnb_weight(layer.weight, getattr(layer, "state", None))
            plain.weight = nn.Parameter(weight, requires_grad=False)
            plain.bias = layer.bias
            model.set_submodule(name, plain)
    model.hf_quantizer.remove_quantization_config(model)
    for mark in ("is_loaded_in_4bit", "is_loaded_in_8bit"):
        if hasattr(model, mark):
            setattr(model, mark, False)
    return model
