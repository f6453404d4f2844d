"""New tokens: their names, their rows in the embeddings, and what those rows begin with."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anygauge.config.schema import ModelSection
from anygauge.interface import ModelError, UnsupportedError
from anygauge.models.files import read_fields

if TYPE_CHECKING:
    from torch import Tensor, nn

    from anygauge.models.conversion import Value

_BLOCK = 8192
"""Rows of an embedding that are read at once."""


@dataclass(frozen=True, slots=True)
class Enlarged:
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
        import torch

        whole = tuple(slice(0, size) for size in self.shape)
        rows, *others = whole if part == (...,) else (*part, *whole[len(part) :])
        start, end, _ = rows.indices(self.shape[0])
        first, last = self.first, self.first + len(self.rows)
        found = []
        for begin, stop in ((start, min(end, first)), (max(start, last), end)):
            if begin < stop:
                found.append(self.old.read((slice(begin, stop), *others)))
        new = self.rows[(slice(max(start - first, 0), max(end - first, 0)), *others)]
        dtype = found[0].dtype if found else self.old.read((slice(0, 1), *others)).dtype
        found.insert(int(start < first), new.to(dtype))
        return torch.cat(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTokens:
    """Tokens that a run adds, and the rows that they have in a model.

    Attributes:
        first: number of the first one; the others follow.
        count: how many there are.
        rows_before: of the embedding, without them.
        start: what their rows begin with.
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
        """Their numbers."""
        return list(range(self.first, self.first + self.count))

    @property
    def rows(self) -> int:
        """Of the embedding, with them."""
        return max(self.rows_before, self.first + self.count)

    def enlarged(self, model: Any, name: str, value: Value) -> Value:
        """A parameter's value with the new tokens' rows, where it has a row for each token.

        Args:
            value: as it is stored.
        """
        if name not in vocabulary_names(model) or value.shape[0] != self.rows_before:
            return value  # a wrong shape is refused by whoever asked
        if name not in self._known:
            draw = zlib.crc32(f"{self.seed}:new rows of {name}".encode())
            rows = start_rows(value, self.first, self.count, self.start, draw)
            self._known[name] = rows
        return Enlarged(value, self._known[name], self.first)


def start_rows(
    value: Value, before: int, count: int, start: Literal["mean", "normal"], seed: int
) -> Tensor:
    """What new rows begin with: (count, ...) float32, equal wherever it is asked.

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


def vocabulary_names(model: Any) -> frozenset[str]:
    """Names of the parameters that have a row for each token: of both embeddings."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    return frozenset(
        f"{path}.{key}"
        for path, module in model.named_modules()
        if any(module is end for end in ends)
        for key in module._parameters
    )


def token_names(section: ModelSection) -> tuple[list[str], list[str]]:
    """The tokens that a section adds, and the special ones among all that it adds.

    Raises:
        ModelError: one is empty or stands there twice, or a file cannot be read.
    """
    plain = _listed(section.new_tokens, "model.new_tokens")
    special = _listed(section.new_special_tokens, "model.new_special_tokens")
    seen: set[str] = set()
    for token in (*plain, *special):
        if token in seen:
            raise ModelError(f"model.new_tokens: {token!r} is listed twice; list each token once")
        seen.add(token)
    return plain, special


def _listed(given: str | list[str], where: str) -> list[str]:
    if isinstance(given, str):
        where = f"{where}: {given}"
        try:
            tokens = Path(given).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{where} cannot be read as lines of text: {error}") from None
        if not tokens:
            raise ModelError(f"{where} is empty; write one token a line")
    else:
        tokens = given
    for number, token in enumerate(tokens, 1):
        if not token.strip():
            raise ModelError(
                f"{where}: token {number} is {token!r}; a token needs at least one character that "
                "is not white space: remove it"
            )
    return tokens


def add_tokens(tokenizer: Any, section: ModelSection) -> None:
    """Give a tokenizer the tokens that a section adds; special ones last.

    Raises:
        ModelError: one is there already, or the tokenizer did not take them as they are.
    """
    plain, special = token_names(section)
    known = tokenizer.get_vocab()
    for name in (*plain, *special):
        if name in known:
            raise ModelError(
                f"model.new_tokens: {name!r} is already token {known[name]} of the tokenizer; "
                "remove it from the list"
            )
    for names, is_special in ((plain, False), (special, True)):
        if names:
            tokenizer.add_tokens(names, special_tokens=is_special)
    if plain or special:
        _numbers(tokenizer, [*plain, *special])


def _numbers(tokenizer: Any, names: Sequence[str]) -> list[int]:
    ids = [int(number) for number in tokenizer.convert_tokens_to_ids(list(names))]
    if ids != list(range(ids[0], ids[0] + len(ids))):
        raise ModelError(
            f"model.new_tokens: {type(tokenizer).__name__} did not give the new tokens consecutive "
            f"numbers ({ids[:8]}); add them to the tokenizer's files, and set model.tokenizer to "
            "these"
        )
    return ids


def new_tokens(section: ModelSection, config: Any, tokenizer: Any, seed: int) -> NewTokens | None:
    """The tokens that a section adds to a model, None without any.

    Args:
        config: of the model as it is stored.
        tokenizer: that has them already, see `add_tokens`.

    Raises:
        ModelError: the tokenizer had more tokens than the model has rows before.
        UnsupportedError: the model's configuration does not count its tokens.
    """
    plain, special = token_names(section)
    if not plain and not special:
        return None
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if rows is None:
        raise UnsupportedError(
            f"model.new_tokens: {type(config).__name__} has no vocab_size, so anygauge cannot "
            "enlarge its embedding"
        )
    ids = _numbers(tokenizer, [*plain, *special])
    if ids[0] > rows:
        raise ModelError(
            f"model.new_tokens: the tokenizer has {ids[0]} tokens without the new ones, the model "
            f"only {rows} rows in its embedding; set model.tokenizer to the model's own"
        )
    return NewTokens(
        first=ids[0],
        count=len(ids),
        rows_before=rows,
        start=section.new_tokens_init,
        seed=seed,
    )


def enlarge(config: Any, new: NewTokens | None) -> None:
    """Have a configuration count the new tokens."""
    if new is not None:
        config.get_text_config().vocab_size = new.rows


def described(new: NewTokens) -> str:
    """A line for the user."""
    took = min(new.first + new.count, new.rows_before) - new.first
    last = new.first + new.count - 1
    which = f"{new.first} to {last}" if new.count > 1 else str(last)
    spare = f", {took} of them in spare rows of the embedding" if took else ""
    grown = (
        f"; the embedding has {new.rows} rows, {new.rows_before} before"
        if new.rows > new.rows_before
        else f"; the embedding keeps its {new.rows} rows"
    )
    return f"vocabulary: {new.count} new tokens, numbers {which}{spare}{grown}"


def trained_rows(
    model: Any, new: NewTokens, layers: Iterator[str], whole: Sequence[str] = ()
) -> dict[str, list[int]]:
    """peft's ``trainable_token_indices``: layer -> rows, a tied output layer left to peft.

    Args:
        layers: that carry factors.
        whole: ends of the names of modules that are trained whole.

    Raises:
        UnsupportedError: a layer has factors too, or the output layer has a bias.
    """
    ends = {
        "embedding": model.get_input_embeddings(),
        "output layer": model.get_output_embeddings(),
    }
    names = {id(module): name for name, module in model.named_modules()}
    carried = set(layers)
    found: dict[str, list[int]] = {}
    embedding = ends["embedding"]
    for what, module in ends.items():
        if module is None:
            continue
        name = names[id(module)]
        if name in carried:
            raise UnsupportedError(
                f"adapter.targets: factors on {name}, the {what}, change the rows of all tokens, "
                f"but model.new_tokens trains only the rows of the new tokens there. Leave {name} "
                "out of the targets"
            )
        if getattr(module, "bias", None) is not None:
            raise UnsupportedError(
                f"model.new_tokens: {name} has a bias, and peft drops it when it trains rows of an "
                "output layer. Train all weights (no adapter section)"
            )
        if any(name.endswith(saved) for saved in whole):
            continue
        if module is embedding or module.weight is not embedding.weight:
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
    from safetensors import safe_open

    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    embedding = model.get_input_embeddings()
    try:
        rows = max(listed_rows(read_fields(config).get("trainable_token_indices")), default=-1) + 1
        if rows <= embedding.weight.shape[0]:
            names = {id(m): n for n, m in model.named_modules()}
            key = f"base_model.model.{names[id(embedding)]}.weight"
            with safe_open(weights, framework="pt") as file:
                if key in file.keys():  # noqa: SIM118 - it is not a mapping
                    rows = file.get_slice(key).get_shape()[0]
    except Exception as error:
        raise ModelError(
            f"the adapter in {folder} cannot be read: {str(error).splitlines()[0]}"
        ) from error
    if rows > embedding.weight.shape[0]:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model.resize_token_embeddings(rows, mean_resizing=False)
