"""Rows of tensors, chunk by chunk: as views, or as copies where each new shape is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


class Views:
    """Chunks of rows as views, which cost nothing where each operation runs as it comes.

    The last may have fewer rows.
    """

    def __init__(self, count: int, rows: int) -> None:
        self._count, self._rows = count, rows
        self._part = slice(0)

    def __iter__(self) -> Iterator[None]:
        """Go from chunk to chunk; the other methods are about the one at hand."""
        for start in range(0, self._count, self._rows):
            self._part = slice(start, start + self._rows)
            yield

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor's rows."""
        return tensor[self._part]

    def targets(self, tensor: Tensor, ignore_index: int) -> Tensor:
        """Targets of the rows."""
        return tensor[self._part]

    def begin(self, like: Tensor) -> list[Tensor]:
        """What keeps results of the size of `like`, chunk by chunk."""
        return [torch.empty_like(like)]

    def keep(self, results: list[Tensor], rows: Tensor) -> None:
        """Add the results of this chunk."""
        # Not by a product's `out`: what a view is given may be lost where tensors are lazy.
        results[0][self._part] = rows

    def whole(self, results: list[Tensor]) -> Tensor:
        """The results of all chunks."""
        return results[0]


class Copies(Views):
    """Chunks of equally many rows, copied by number: the same operations on the same shapes.

    Where a view begins and ends would be part of a graph: each chunk's were another, and compiled.
    The last chunk is filled up with copies of the last row, which do not count.
    """

    def __init__(
        self, count: int, rows: int, device: torch.device, mark_step: Callable[[], None]
    ) -> None:
        super().__init__(count, rows)
        self._mark_step = mark_step
        self._numbers = torch.arange(rows, device=device)
        self._even = count % rows == 0
        self._last = count - 1

    def __iter__(self) -> Iterator[None]:
        for _ in range(0, self._count, self._rows):
            self._mark_step()
            yield
            self._numbers = self._numbers + self._rows
        self._mark_step()

    def rows(self, tensor: Tensor) -> Tensor:
        """See `Views`."""
        numbers = self._numbers if self._even else self._numbers.clamp(max=self._last)
        return tensor.index_select(0, numbers)

    def targets(self, tensor: Tensor, ignore_index: int) -> Tensor:
        """See `Views`."""
        found = self.rows(tensor)
        if self._even:
            return found
        return found.where(self._numbers <= self._last, found.new_full((), ignore_index))

    def begin(self, like: Tensor) -> list[Tensor]:
        """See `Views`."""
        return []

    def keep(self, results: list[Tensor], rows: Tensor) -> None:
        """See `Views`."""
        results.append(rows)

    def whole(self, results: list[Tensor]) -> Tensor:
        """See `Views`."""
        joined = torch.cat(results)
        return joined if self._even else joined[: self._count]
