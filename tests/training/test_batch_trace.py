"""The way of one micro-batch, counted: the files that it passes and the classes that carry it.

It is as short as docs/architecture.md says; `python -m tests.training.test_batch_trace` prints it.

A chat is all the rows of a run of one step, in one process, on the CPU. A profiler looks at each
call of a function of anygauge and of its plugins, in every thread, from the first read of the row
to its line in metrics.jsonl. It looks for the row's text, for its tokens, and for what the step
made of them: activations, the loss, gradients, their norm.

A *file* counts if one of these is an argument, a local variable or the result of a function in it;
an optimizer's groups do not count, which have all gradients all the time.
A *carrier* is a class of anygauge. It counts if an object of it was made on the way and has one of
these in its own fields: directly, in lists or mappings, or as a list of other carriers. Objects
that are there before the way begins (the engine's sums of gradients, the run's history) add up what
passes, and carry nothing on.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from anygauge.training import loop, setup
from tests.docs.pages import ROOT, section, table_names
from tests.helpers.chats import make_chat_tokenizer, template
from tests.helpers.runs import Run, run_file, trained_here

MOST_FILES, MOST_CARRIERS = 25, 9
PLACES = tuple(f"{ROOT / each}/" for each in ("anygauge", "backends", "kernels"))
MARK = "quokka"
"""A word that the row holds, and nothing else."""
ROW = {
    "messages": [
        {"role": "user", "content": "Which animal smiles?"},
        {"role": "assistant", "content": f"The {MARK} does."},
    ]
}
DEEPEST, MOST = 8, 64
"""How far is looked into containers, and at how many items."""


@dataclass(kw_only=True)
class BatchTrace:
    """A profiler's function, and what it saw.

    Attributes:
        ids: the tokens of `MARK`.
        numbers: the step's loss, summed and per token, and the norm of its gradient.
        metrics: the file in which the way ends, once it is known.
        gradients: the memory of the step's gradients.
        files: name -> the first function that had something of the batch; in their order.
        carriers: name -> the file in which one was first seen; in their order.
    """

    ids: list[int]
    numbers: Sequence[float]
    metrics: Path | None = None
    gradients: dict[int, Tensor] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    carriers: dict[str, str] = field(default_factory=dict)
    _there: dict[int, Any] = field(default_factory=dict)
    _looking: threading.local = field(default_factory=threading.local)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Look while this lasts."""
        self._there = {id(each): each for each in gc.get_objects() if _is_own(type(each))}
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PLACES):
            return
        written = self.metrics is not None and self.metrics.stat().st_size
        if written or getattr(self._looking, "on", False):
            return
        self._looking.on = True
        name = str(Path(code.co_filename).relative_to(ROOT))
        try:
            seen = [*frame.f_locals.values(), *([result] if event == "return" else [])]
            if any([self._holds(value, name) for value in seen]):
                self.files.setdefault(name, code.co_qualname)
        finally:
            self._looking.on = False

    def _holds(self, value: Any, where: str, depth: int = 0) -> bool:
        """Whether a value is something of the batch, or has it."""
        if isinstance(value, str):
            return MARK in value
        if isinstance(value, bytes):
            return MARK.encode() in value
        if isinstance(value, float):
            return any(math.isclose(value, each, rel_tol=1e-5) for each in self.numbers)
        if isinstance(value, np.ndarray):
            return value.dtype.kind == "i" and self._has_ids(value.ravel().tolist())
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, pa.Table | pa.RecordBatch):
            return "ids" in value.schema.names and self._holds(value.column("ids"), where, depth)
        if isinstance(value, pa.Array | pa.ChunkedArray | pa.Scalar):
            return self._holds(
                value.as_py() if isinstance(value, pa.Scalar) else value.to_pylist(), where, depth
            )
        if depth == DEEPEST or isinstance(value, torch.nn.Module):
            return False
        if _is_own(type(value)):
            return self._carries(value, where, depth)
        if isinstance(value, Mapping):
            value = [] if "params" in value else list(value.values())
        if not isinstance(value, list | tuple):
            return False
        if all(type(each) is int for each in value):
            return self._has_ids(list(value))
        return any([self._holds(each, where, depth + 1) for each in value[:MOST]])

    def _carries(self, value: Any, where: str, depth: int) -> bool:
        fields = list(value) if isinstance(value, tuple) else []
        fields += getattr(value, "__dict__", {}).values()
        for base in type(value).__mro__:
            fields += [getattr(value, name, None) for name in getattr(base, "__slots__", ())]
        # What an object of anygauge holds is its own, and not that of who holds the object.
        held = [each for each in fields if not _is_own(type(each))]
        if not any([self._holds(each, where, depth + 1) for each in held]):
            return False
        if id(value) not in self._there:
            self.carriers.setdefault(type(value).__qualname__, where)
        return True

    def _tensor(self, value: Tensor) -> bool:
        if value.is_meta:
            return False
        if value.dtype is torch.int64:
            return self._has_ids(value.flatten().tolist())
        if isinstance(value, torch.nn.Parameter):
            return value.grad is not None and self._tensor(value.grad)
        if value.untyped_storage().data_ptr() in self.gradients or value.requires_grad:
            return True
        if value.is_floating_point() and value.numel() == 1:
            return self._holds(float(value.detach()), "")
        return False

    def _has_ids(self, values: list[int]) -> bool:
        count = len(self.ids)
        starts = range(len(values) - count + 1)
        return any(values[at : at + count] == self.ids for at in starts)


def _is_own(kind: type) -> bool:
    return str(kind.__module__).startswith("anygauge")


def batch_trace(folder: Path) -> BatchTrace:
    """The trace of a run; another one before it tells what the step's numbers are."""
    rows, chatml = folder / "rows.jsonl", folder / "chatml.jinja"
    rows.write_text(json.dumps(ROW) + "\n")
    chatml.write_text(template("chatml"))
    tokenizer = make_chat_tokenizer(folder / "tokenizer")

    def run(name: str) -> Run:
        data = {"train": {"path": str(rows)}, "chat_template": str(chatml)}
        return trained_here(
            run_file(
                folder,
                name=name,
                strategy={"name": "single"},
                data={**data, "cache": str(folder / f"cache-{name}")},
                train={"steps": 1, "global_batch_size": 1, "micro_batch_size": 1},
            )
        )

    (record,) = (record for record in run("first").records if "loss" in record)
    loss, tokens = record["loss"], record["num_loss_tokens"]
    trace = BatchTrace(
        ids=tokenizer(MARK, add_special_tokens=False)["input_ids"],
        numbers=(loss, loss * tokens, record["grad_norm"]),
    )
    prepare_run, train = setup.prepare_run, loop.Loop.run

    def note(parameter: Any) -> None:
        trace.gradients[parameter.grad.untyped_storage().data_ptr()] = parameter.grad

    def preparing(*given: Any) -> Any:
        with trace.on():
            prepared = prepare_run(*given)
        for parameter in prepared.engine.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(note)
        return prepared

    def training(self: Any) -> Any:
        trace.metrics = self.logger.path
        with trace.on():
            return train(self)

    with (
        mock.patch.object(setup, "prepare_run", preparing),
        mock.patch.object(loop.Loop, "run", training),
    ):
        run("second")
    return trace


def test_a_micro_batch_passes_the_files_and_carriers_that_the_page_lists(tmp_path: Path) -> None:
    trace = batch_trace(tmp_path)
    assert len(trace.files) <= MOST_FILES, trace.files
    assert len(trace.carriers) <= MOST_CARRIERS, trace.carriers
    page = section(ROOT / "docs/architecture.md", "### The path of a batch, counted")
    assert table_names(page) == {*trace.files, *trace.carriers}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        found = batch_trace(Path(made))
    for seen in (found.files, found.carriers):
        print(len(seen), *(f"{name}: {where}" for name, where in seen.items()), "", sep="\n")
