"""Rows of new tokens in the embeddings: what they begin with, and which of them are trained."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anygauge.config.schema import ModelSection
from anygauge.interface import ModelError, UnsupportedError
from anygauge.models.model_files import read_fields, read_header
from anygauge.models.tokenizer import token_names

if TYPE_CHECKING:
    from torch import Tensor, nn

    from anygauge.models.conversion import Value

_BLOCK = 8192
"""Rows of an embedding that are read at once."""


@dataclass(frozen=True, slots=True)
class EnlargedValue:
    """A value with some of its rows given anew, and with as many more as that takes.

    Args:
        old: (V, ...).
        rows: (n, ...).
        first: where they begin; at most V.
    """

    old: Value
    rows: Tensor
    first: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Value.shape`."""
        return (max(self.old.shape[0], self.first + len(self.rows)), *self.old.shape[1:])

    def read(self, part: tuple[Any, ...]) -> Tensor:
        """See `Value.read`."""
        whole = tuple(slice(0, size) for size in self.shape)
        rows, *others = whole if part == (...,) else (*part, *whole[len(part) :])
        start, end, _ = rows.indices(self.shape[0])
        there = self.old.shape[0]
        old = self.old.read((slice(min(start, there), min(end, there)), *others))
        found = old.new_empty(end - start, *old.shape[1:])
        found[: len(old)] = old
        first, last = max(start, self.first), min(end, self.first + len(self.rows))
        if first < last:
            new = self.rows[(slice(first - self.first, last - self.first), *others)]
            found[first - start : last - start] = new
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTokens:
    """Tokens that a run adds, and the rows that they have in a model.

    Attributes:
        first: number of the first one; the others follow.
        count: how many there are.
        rows_before: of the embedding, without them.
        start: what their rows begin with; see `start_rows`.
        seed: that ``normal`` draws from.
    """

    first: int
    count: int
    rows_before: int
    start: Literal["mean", "normal"]
    seed: int
    _known: dict[str, Tensor] = field(default_factory=dict)

    @property
    def ids(self) -> list[int]:
        """The new tokens' numbers."""
        return list(range(self.first, self.first + self.count))

    @property
    def rows(self) -> int:
        """Rows of the embedding, with the new tokens."""
        return max(self.rows_before, self.first + self.count)

    def __str__(self) -> str:
        last = self.first + self.count - 1
        which = f"{self.first} to {last}" if self.count > 1 else str(last)
        spare = min(last + 1, self.rows_before) - self.first
        taken = f", {spare} of them in spare rows of the embedding" if spare else ""
        return (
            f"vocabulary: {self.count} new tokens, numbers {which}{taken}; the embedding has "
            f"{self.rows} rows, {self.rows_before} before"
        )

    def enlarge_config(self, config: Any) -> None:
        """Have a model's configuration count them."""
        config.get_text_config().vocab_size = self.rows

    def enlarge_value(self, model: Any, name: str, value: Value) -> Value:
        """A parameter's value with the new tokens' rows, where it has a row for each token.

        Args:
            value: as it is stored.
        """
        owner = model.get_submodule(name.rpartition(".")[0])
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        if all(owner is not end for end in ends) or value.shape[0] != self.rows_before:
            return value  # a wrong shape is refused by whoever asked
        if name not in self._known:
            draw = zlib.crc32(f"{self.seed}:new rows of {name}".encode())
            self._known[name] = start_rows(value, self.first, self.count, self.start, draw)
        return EnlargedValue(value, self._known[name], self.first)


def start_rows(
    value: Value, before: int, count: int, start: Literal["mean", "normal"], seed: int
) -> Tensor:
    """Return what new rows begin with: (count, ...) float32, equal on every rank.

    ``mean`` is that of the rows that tokens had before. ``normal`` draws from a normal with their
    mean and covariance: for rows x of mean m and weights w from a standard normal,
    m + sum of w (x - m) / sqrt(n) is one, and takes no matrix of covariances. (transformers'
    ``mean_resizing`` multiplies that covariance by 1e-9: its rows are the mean.)

    Args:
        value: (V, ...), V at least `before`.
        before: tokens that there were.
        seed: of the weights.
    """
    import torch

    blocks = [slice(at, min(at + _BLOCK, before)) for at in range(0, before, _BLOCK)]
    rest = tuple(slice(0, size) for size in value.shape[1:])
    mean = torch.zeros(value.shape[1:], dtype=torch.float64)
    for block in blocks:
        mean += value.read((block, *rest)).double().sum(0)
    mean /= before
    rows = mean.repeat(count, *[1] * mean.ndim)
    if start == "normal":
        generator = torch.Generator().manual_seed(seed)
        for block in blocks:
            centred = value.read((block, *rest)).double() - mean
            weights = (
                torch.randn(count, len(centred), generator=generator, dtype=torch.float64)
                / before**0.5
            )
            rows += torch.tensordot(weights, centred, 1)
    return rows.float()


def new_tokens(section: ModelSection, config: Any, tokenizer: Any, seed: int) -> NewTokens | None:
    """The tokens that a section adds to a model, None without any.

    Args:
        config: of the model as it is stored.
        tokenizer: that has them already, see `add_tokens`.

    Raises:
        ModelError: the tokenizer did not take them as they are, or had more tokens than the model
            has rows before.
        UnsupportedError: the model's configuration does not count its tokens.
    """
    names = [name for listed in token_names(section) for name in listed]
    if not names:
        return None
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if rows is None:
        raise UnsupportedError(
            f"model.new_tokens: {type(config).__name__} has no vocab_size, so anygauge cannot "
            "enlarge its embedding"
        )
    ids = [int(number) for number in tokenizer.convert_tokens_to_ids(names)]
    if ids != list(range(ids[0], ids[0] + len(ids))):
        raise ModelError(
            f"model.new_tokens: {type(tokenizer).__name__} did not give the new tokens consecutive "
            f"numbers ({ids[:8]}); add them to the tokenizer's files, and set model.tokenizer to "
            "these"
        )
    if ids[0] > rows:
        raise ModelError(
            f"model.new_tokens: the tokenizer has {ids[0]} tokens without the new ones, the model "
            f"only {rows} rows in its embedding; set model.tokenizer to the model's own"
        )
    return NewTokens(
        first=ids[0], count=len(ids), rows_before=rows, start=section.new_tokens_init, seed=seed
    )


def trained_rows(
    model: Any, new: NewTokens, layers: Collection[str], whole: Sequence[str] = ()
) -> dict[str, list[int]]:
    """peft's ``trainable_token_indices``: layer -> rows, a tied output layer left to peft.

    Args:
        layers: that carry factors.
        whole: ends of the names of modules that are trained whole.

    Raises:
        UnsupportedError: a layer has factors too, or the output layer has a bias.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    found: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        if module is not embedding and module is not output:
            continue
        if name in layers:
            raise UnsupportedError(
                f"adapter.targets: factors on {name} change the rows of all tokens, but "
                "model.new_tokens trains only the rows of the new tokens there. Leave it out of "
                "the targets"
            )
        if getattr(module, "bias", None) is not None:
            raise UnsupportedError(
                f"model.new_tokens: {name} has a bias, and peft drops it when it trains rows of an "
                "output layer. Train all weights (no adapter section)"
            )
        tied = module is not embedding and module.weight is embedding.weight
        if not tied and not name.endswith(tuple(whole)):
            found[name] = new.ids
    return found


def row_layers(adapted: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers of which peft trains rows, and their names."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for name, module in adapted.named_modules():
        if isinstance(module, TrainableTokensLayer):
            yield name, module


def listed_rows(indices: Any) -> list[int]:
    """The numbers in peft's ``trainable_token_indices``, for each layer or for the embedding."""
    lists = indices.values() if isinstance(indices, Mapping) else [indices or ()]
    return sorted({number for numbers in lists for number in numbers})


def fit_adapter(model: Any, folder: Path) -> None:
    """Give a base as many rows as a saved adapter has been trained with; no value of theirs stays.

    Raises:
        ModelError: the adapter's files cannot be read.
    """
    import torch

    shapes = read_header(folder / "adapter_model.safetensors")
    path = folder / "adapter_config.json"
    try:
        rows = max(listed_rows(read_fields(path).get("trainable_token_indices")), default=-1) + 1
    except TypeError as error:
        raise ModelError(f"{path}: trainable_token_indices cannot be read: {error}") from error
    embedding = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embedding)
    whole = shapes.get(f"base_model.model.{name}.weight", (0,))
    if (rows := max(rows, whole[0])) > embedding.weight.shape[0]:
        with torch.random.fork_rng(devices=[]):
            model.resize_token_embeddings(rows, mean_resizing=False)
