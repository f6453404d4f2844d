"""The model factory: a causal language model from a folder, a hub name or a bare configuration."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from anygauge.config.schema import AdapterSection, ModelSection, RunFile
from anygauge.config.sections import CheckpointingSection, recomputation
from anygauge.interface import HOST_DEVICE, ModelError, Objective, PartFunction, UnsupportedError
from anygauge.kernels.install_kernels import ModelKernels, install
from anygauge.models.adaptable_layers import freeze
from anygauge.models.adapter import add_adapter, external_parameters, saved_modules
from anygauge.models.conversion import Value, Weights, in_published_form, stored_buffers
from anygauge.models.factors import changes_base
from anygauge.models.model_files import LazyTensors, WeightFiles, check_shape, not_finite
from anygauge.models.pair_loss import objective_of, return_pair_loss
from anygauge.models.quantization import dequantizer, quantization
from anygauge.models.quantized import QuantizedLinear, quantize_layers, quantized_layers
from anygauge.models.recompute import recompute
from anygauge.models.routers import add_router_loss
from anygauge.models.source import load_config, local_folder
from anygauge.models.tokenizer import load_tokenizer
from anygauge.models.vocabulary import NewTokens, new_tokens, row_layers
from anygauge.util.text import first_line

NO_KERNELS = ModelKernels()


class CausalModelFactory:
    """Makes one causal language model; implements what strategies call a `ModelFactory`."""

    def __init__(
        self,
        section: ModelSection,
        adapter: AdapterSection | None,
        *,
        attention: str = "eager",
        kernels: ModelKernels | None = NO_KERNELS,
        dtype: torch.dtype,
        seed: int,
        gradient_checkpointing: bool | CheckpointingSection,
        router_aux_loss_coef: float = 0.0,
        trainable: Sequence[str] = (),
        frozen: Sequence[str] = (),
        objective: Objective | None = None,
        reference: bool = False,
    ) -> None:
        """Args:
        attention: a resolved implementation.
        kernels: those that the model can have, see `plan_kernels`; None puts nothing into it,
            not even what makes its loss.
        dtype: type of the adapter's factors.
        router_aux_loss_coef: of the loss that a mixture's routers have; 0: none.
        trainable, frozen: see `freeze`; where there is no adapter.
        objective, reference: see `return_pair_loss`; None: the loss is that of tokens.
        """
        self.section = section
        self.adapter = adapter
        self.config = load_config(section)
        self._quantizer = dequantizer(self.config, quantize=section.quantize is not None)
        self._stored_config = copy.deepcopy(self.config)
        self.new_tokens: NewTokens | None = None
        if section.new_tokens or section.new_special_tokens:
            self.new_tokens = new_tokens(section, self.config, load_tokenizer(section), seed)
            if self.new_tokens is not None:
                self.new_tokens.enlarge_config(self.config)
        self._attention = attention
        self.dtype = dtype
        self._kernels = kernels
        self._seed = seed
        self.trainable, self.frozen = trainable, frozen
        self.activations = recomputation(gradient_checkpointing)
        self._router_aux_loss_coef = router_aux_loss_coef
        self._objective, self._reference = objective, reference
        self._weights: Weights | None = None
        self.first_factors: Mapping[str, Tensor] = {}

    @classmethod
    def of(cls, run: RunFile, dtype: torch.dtype, *, attention: str = "eager") -> Self:
        """Return a run's factory. Args: dtype, attention: see the class."""
        return cls(
            run.model,
            run.adapter,
            attention=attention,
            dtype=dtype,
            seed=run.train.seed,
            gradient_checkpointing=run.train.gradient_checkpointing,
            router_aux_loss_coef=run.train.router_aux_loss_coef,
            trainable=run.train.trainable,
            frozen=run.train.frozen,
            objective=objective_of(run),
            reference=run.objective_spec.reference,
        )

    def with_kernels(self, attention: str, kernels: ModelKernels | None) -> Self:
        """Return a factory of the same model, built with these kernels."""
        other = copy.copy(self)
        other._attention, other._kernels = attention, kernels
        return other

    def skeleton(self) -> nn.Module:
        """See `ModelFactory.skeleton`; buffers are float32, as the architecture computes them."""
        model = self._build(self.config)
        section = quantization(self.section)
        if section is not None:
            quantize_layers(model, section, self.dtype)
        return model

    def _build(self, config: Any) -> nn.Module:
        from transformers import AutoModelForCausalLM

        try:
            with _parameters_without_values(), _no_initialization():
                model = AutoModelForCausalLM.from_config(
                    copy.deepcopy(config),  # what is set on the model is not the user's
                    attn_implementation=self._attention,
                    trust_remote_code=self.section.trust_remote_code,
                    **{dtype_name(): torch.float32},
                )
        except Exception as error:
            raise ModelError(
                f"model: {type(self.config).__name__} with attention {self._attention!r} cannot "
                f"be built: {first_line(error)}"
            ) from error
        model.tie_weights()
        model.config.use_cache = False
        return model

    def fill_buffers(self, model: nn.Module) -> None:
        """See `ModelFactory.fill_buffers`."""
        here = dict(stored_buffers(model))
        if not here or self.section.name is None:
            return
        weights = self.weights()
        for name, value in weights.values(here).items():
            check_shape(weights.files.folder, name, value.shape, tuple(here[name].shape))
            here[name].copy_(value.read((...,)))

    def weights(self) -> Weights:
        """What the model's files have for its parameters; they are opened at the first call.

        Raises:
            ModelError: they do not fit the model, or cannot be read.
        """
        # Only now: a dry run needs the configuration, not gigabytes of weights.
        if self._weights is None:
            files = WeightFiles(local_folder(self.section))
            self._weights = Weights(self._build(self._stored_config), files, self._quantizer)
        return self._weights

    def check_numbers(self) -> None:
        """Look at every stored tensor: on large models, this reads for minutes.

        Raises:
            ModelError: one holds values that are not numbers; names it.
        """
        if self.section.name is None:
            return
        files = self.weights().files
        name = not_finite((name, files.read(name)) for name in sorted(files.names()))
        if name is not None:
            raise ModelError(
                f"{files.folder / files.index[name]}: tensor {name!r} of the base holds values "
                "that are not numbers, so no loss can be computed; fetch the model again"
            )

    def export(self, state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """A trained model's tensors, and its stored buffers, in the form that it is published in.

        Args:
            state: parameters, by the model's own names.
            dtype: of the parameters that are returned.
        """
        model = self.skeleton()
        self.fill_buffers(model)
        files = None if self.section.name is None else self.weights().files
        return in_published_form(model, state, files, dtype)

    def values(
        self, model: nn.Module, unit: str, part: PartFunction | None = None
    ) -> Mapping[str, Tensor]:
        """See `ModelFactory.values`."""
        module = model.get_submodule(unit)
        names = [name for name, p in module.named_parameters() if p.is_meta]
        prefix = f"{unit}." if unit else ""
        layers = quantized_layers(module)
        if self.section.name is None:
            drawn = self._draw(model, unit, names)
            if part is None:
                return drawn
            pieces = {
                name: part(prefix + name, tuple(value.shape)) for name, value in drawn.items()
            }
            return {
                name: drawn[name][piece].contiguous()
                for name, piece in pieces.items()
                if piece is not None
            }
        weights = self.weights()
        found = {}
        for full, value in weights.values(prefix + name for name in names).items():
            name = full.removeprefix(prefix)
            expected = tuple(module.get_parameter(name).shape)
            if self.new_tokens is not None:
                value = self.new_tokens.enlarge_value(model, full, value)
            plain = layers[name].plain_shape if name in layers else expected
            check_shape(weights.files.folder, full, value.shape, plain)
            wanted = (...,) if part is None else part(full, expected)
            read = value.read
            if name in layers:
                read = functools.partial(_encode, layers[name], value)
                if wanted is None:
                    layers[name].encode(value.read((...,)))  # this rank needs its scales
            if wanted is not None:
                found[name] = functools.partial(read, wanted)
        return LazyTensors(found)

    def _draw(self, model: Any, unit: str, names: list[str]) -> dict[str, Tensor]:
        """Initial values by the architecture's own rule, from a generator of this unit's own.

        A function of seed and unit: equal on every strategy, device and number of ranks.
        """
        module = model.get_submodule(unit)
        # A parent with parameters of its own comes after its children, which are real by then.
        whole = all(p.is_meta for p in module.parameters())
        layers = quantized_layers(module)
        twins: dict[int, nn.Parameter] = {}
        found: dict[str, Tensor] = {}
        for name in names:
            path, _, key = name.rpartition(".")
            owner = module.get_submodule(path)
            meta = owner._parameters[key]
            assert meta is not None
            # NaN shows what the architecture's rule leaves out.
            shape = layers[name].plain_shape if name in layers else meta.shape
            twin = twins.setdefault(id(meta), nn.Parameter(torch.full(shape, torch.nan)))
            owner._parameters[key] = twin
            found[name] = twin.detach()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            # The host's generator alone: torch.manual_seed would reset the devices' as well.
            torch.default_generator.manual_seed(zlib.crc32(f"{self._seed}:{unit}".encode()))
            if whole:
                nn.Module.apply(module, model._init_weights)
            else:
                model._init_weights(module)
        for name, value in found.items():
            if value.isnan().any():
                raise ModelError(
                    f"model.config: {type(model).__name__} gives no initial value to "
                    f"{unit}.{name}; start from existing weights (model.name)"
                )
            if name in layers:
                found[name] = layers[name].encode(value)
        return found

    def adapt(self, model: nn.Module) -> nn.Module:
        """See `ModelFactory.adapt`."""
        if self.adapter is not None:
            model = add_adapter(
                model,
                self.adapter,
                dtype=self.dtype,
                seed=self._seed,
                new_tokens=self.new_tokens,
            )
            if changes_base(self.adapter.init) and not any(p.is_meta for p in model.parameters()):
                self.first_factors = {
                    name: parameter.detach().to(HOST_DEVICE, copy=True)
                    for name, parameter in model.named_parameters()
                    if parameter.requires_grad
                }
        elif self.trainable or self.frozen:
            freeze(model, self.trainable, self.frozen)
        if self._kernels is not None:
            install(model, self._kernels, by_sequence=self._objective is not None)
            if self._objective is not None:
                return_pair_loss(model, self._objective, reference=self._reference)
            if self._router_aux_loss_coef:
                add_router_loss(model, self._router_aux_loss_coef)
        return model

    def adapted_on_meta(self) -> tuple[nn.Module, Mapping[str, str]]:
        """See `ModelFactory.adapted_on_meta`."""
        model = self.skeleton()
        if self.adapter is not None and (self.adapter.dora or changes_base(self.adapter.init)):
            field = "dora" if self.adapter.dora else "init"
            raise UnsupportedError(
                f"adapter.{field}: its initial values are computed from the base's whole weights, "
                "but this strategy shards the weights before it reads them. Leave it out, or use a "
                "strategy that reads them first (zero, ddp, single)"
            )
        self.fill_buffers(model)
        inner = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
        kept = _with_zeros(model)
        adapted = self.adapt(model)
        found: dict[str, str] = {}
        for path, module in adapted.named_modules():
            for key in list(module._parameters):
                meta = kept.get((id(module), key))
                if meta is not None:
                    meta.requires_grad_(module._parameters[key].requires_grad)
                    module._parameters[key] = meta
                    found[f"{path}.{key}" if path else key] = inner[id(module)] + key
        # A saved adapter has the values of what follows.
        if self.adapter is not None and self.adapter.start_from is None:
            self._fill_rows(adapted, inner)
            self._fill_saved_modules(adapted, inner)
        return adapted, found

    def _fill_rows(self, adapted: nn.Module, inner: Mapping[int, str]) -> None:
        """Give trained rows of a base without values what they have there.

        Args:
            inner: prefixes of the base's parameters, by their module's identity.
        """
        if self.new_tokens is None:
            return
        rows = slice(self.new_tokens.first, self.new_tokens.first + self.new_tokens.count)
        for _, layer in row_layers(adapted):
            if layer.tied_adapter is not None:
                continue
            values = self.values(
                self.skeleton(),
                inner[id(layer.base_layer)].removesuffix("."),
                lambda _, shape: (rows, *(slice(0, size) for size in shape[1:])),
            )
            for delta in layer.trainable_tokens_delta.values():
                delta.data.copy_(values["weight"])

    def _fill_saved_modules(self, adapted: nn.Module, inner: Mapping[int, str]) -> None:
        """Fill modules that are trained whole, in the same way."""
        for original, trained in saved_modules(adapted):
            prefix = inner[id(original)]
            # Drawn values are a function of the whole layer.
            layer = re.match(r".*?\.\d+(?=\.)", prefix)
            unit = prefix.removesuffix(".") if layer is None else layer[0]
            values = self.values(self.skeleton(), unit)
            for key, parameter in trained.named_parameters():
                value = values[f"{prefix}{key}".removeprefix(f"{unit}.")]
                parameter.data = value.to(parameter.dtype)

    def external_parameters(self, model: nn.Module) -> Sequence[tuple[nn.Module, nn.Parameter]]:
        """See `ModelFactory.external_parameters`."""
        return () if self.adapter is None else external_parameters(model)

    def checkpoint_activations(self, model: nn.Module, *, reentrant: bool = False) -> None:
        """See `ModelFactory.checkpoint_activations`."""
        recompute(model, self.activations, reentrant=reentrant)
        frozen = self.adapter is not None or self.trainable or self.frozen
        if reentrant and self.activations.every and frozen:
            # A reentrant region passes no gradient unless an input of it asks for one.
            adapted: Any = model
            adapted.enable_input_require_grads()


def _with_zeros(model: nn.Module) -> dict[tuple[int, str], nn.Parameter]:
    """Put zeros without memory in place of meta parameters; returns these by owner and name.

    An adapter's factors are drawn where the weight lies that they are for.
    """
    metas: dict[tuple[int, str], nn.Parameter] = {}
    zeros: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, meta in list(module._parameters.items()):
            if meta is not None and meta.is_meta:
                metas[id(module), key] = meta
                flat = torch.zeros((), dtype=meta.dtype).expand(meta.shape)
                zero = zeros.setdefault(id(meta), nn.Parameter(flat, meta.requires_grad))
                module._parameters[key] = zero
    return metas


def _encode(layer: QuantizedLinear, value: Value, part: tuple[Any, ...]) -> Tensor:
    """A part of a layer's codes, made of its weight; what belongs to them becomes the layer's."""
    return layer.encode(value.read((...,)))[part].clone()


def dtype_name() -> str:
    """What the installed transformers calls a model's type, as a keyword and in configurations."""
    import transformers
    from packaging.version import Version

    # 4.56 renamed it, and warns of the old name.
    return "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"


@contextlib.contextmanager
def _parameters_without_values() -> Iterator[None]:
    """Parameters that modules get meanwhile are on the meta device; buffers keep their values."""

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        made = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        return made

    # torch's annotation leaves out that a hook may give another parameter.
    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def _no_initialization() -> Any:
    """Construct without drawing values: they come from files or from `_draw`."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # before transformers 5
        from transformers.modeling_utils import no_init_weights
    return no_init_weights()
