"""The portable core names no device: not in a string, not in an identifier. What DeepSpeed calls
its own stands in its strategy alone.

Docstrings and comments may name a vendor as an example; a string that the program uses may not,
since behaviour is asked for by property. Words are letters in one case: ``CUDA_VISIBLE_DEVICES``,
``cuda:0`` and ``CudaError`` each have the word ``cuda``, ``inputs`` has no ``npu``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.repository import CORE

FORBIDDEN = frozenset(
    [
        *("cuda", "hpu", "nccl", "hccl", "gloo", "habana", "gaudi", "nvidia"),
        *("xpu", "mps", "npu", "rocm", "mlu", "neuron", "tpu"),
    ]
)
HOST = "cpu"
"""Allowed in identifiers, where it means the host: ``os.cpu_count``, ``tensor.cpu()``."""
ENGINE = "zero"
"""How the modules of `anygauge/strategies` begin that may speak of DeepSpeed."""

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def words(text: str) -> set[str]:
    """The words of a text, in lower case."""
    return {word.lower() for word in WORD.findall(text)}


def find_names(source: str) -> list[tuple[int, str, str]]:
    """Line, word and the whole text of every forbidden word of a source, in order."""
    tree = ast.parse(source)
    return sorted(
        (line, word, text)
        for line, text, forbidden in (*_strings(tree), *_identifiers(tree))
        for word in words(text) & forbidden
    )


def engine_names(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and text of each attribute and string of DeepSpeed's."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return [
        *((node.lineno, node.attr) for node in attributes if node.attr.startswith("ds_")),
        *(
            (line, text)
            for line, text, _ in _strings(tree)
            if text.startswith("ds_") or text == ENGINE or "deepspeed" in text.lower()
        ),
    ]


def _strings(tree: ast.AST) -> Iterator[tuple[int, str, frozenset[str]]]:
    # A string that is a statement by itself documents what stands before it.
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in documentation:
            continue
        if isinstance(node.value, str):
            yield node.lineno, node.value, FORBIDDEN | {HOST}
        elif isinstance(node.value, bytes):
            yield node.lineno, node.value.decode("latin-1"), FORBIDDEN | {HOST}


def _identifiers(tree: ast.AST) -> Iterator[tuple[int, str, frozenset[str]]]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield node.lineno, name, FORBIDDEN
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name, FORBIDDEN
            case ast.keyword(arg=str(name)):
                yield node.lineno, name, FORBIDDEN
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, f"{alias.name} {alias.asname or ''}", FORBIDDEN
            case ast.ImportFrom(module=module, names=names):
                for alias in names:
                    text = f"{module or ''} {alias.name} {alias.asname or ''}"
                    yield node.lineno, text, FORBIDDEN


# Where torch's name for the host's memory is given a name of its own; everything else uses that.
HOST_DEVICE_HOME = CORE / "interface/placement.py"

WAIVERS = {
    (HOST_DEVICE_HOME, HOST): "the name itself",
    (
        CORE / "strategies/zero/deepspeed_config.py",
        "zero_force_ds_cpu_optimizer",
    ): "a field of DeepSpeed's",
    (CORE / "training/trackers/services.py", "auto_log_cpu"): "an option of Trackio's",
    (CORE / "interface/profiler.py", "self_cpu_memory_usage"): "a member of torch's profiler",
    (
        CORE / "launch/rank_environment.py",
        "sys/devices/system/cpu/cpu",
    ): "a path of the Linux kernel",
    (CORE / "data/rows.py", "/sys/fs/cgroup/cpu.max"): "likewise",
}
"""(file, the whole text) of what may stand, and why."""


OF_OTHER_TOOLS = CORE / "cli/imports"
"""Reads files of other tools, whose keys name devices and engines; nothing else imports it."""

SOURCES = {
    path: path.read_text(encoding="utf-8")
    for path in sorted(CORE.rglob("*.py"))
    if path.parent != OF_OTHER_TOOLS
}


def test_the_core_names_no_device_but_where_that_is_waived() -> None:
    found = {
        (path, text): f"{path}:{line}: {word!r} in {text!r}"
        for path, source in SOURCES.items()
        for line, word, text in find_names(source)
    }
    assert [told for key, told in found.items() if key not in WAIVERS] == []
    assert found.keys() >= WAIVERS.keys(), "a waiver that is not needed"


def test_the_core_knows_no_engine() -> None:
    of_engine = {path for path in SOURCES if path.parent == CORE / "strategies" / ENGINE}
    assert of_engine
    found = [
        f"{path}:{line}: {text!r}"
        for path in SOURCES.keys() - of_engine
        for line, text in engine_names(ast.parse(SOURCES[path]))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "count = parameter.ds_numel",
        'shape = getattr(parameter, "ds_shape", None)',
        'if run.strategy.name == "zero": ...',
        'packages = ["torch", "deepspeed"]',
        'text = f"DeepSpeed has {fields}"',
    ],
)
def test_a_planted_name_of_an_engine_is_found(source: str) -> None:
    assert len(engine_names(ast.parse(source))) == 1


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ('device = "cuda:0"', "cuda"),
        ('place = f"{kind} on Gaudi2"', "gaudi"),
        ('module = "habana_frameworks.torch"', "habana"),
        ('import os; os.environ["PT_HPU_LAZY_MODE"]', "hpu"),
        ('kind = "CudaError"', "cuda"),
        ('name = b"rocm"', "rocm"),
        ('text = "an NVIDIA card"', "nvidia"),
        ('where = "cpu"', "cpu"),
        ('def f(device="xpu"): ...', "xpu"),
        ('text = ("one "\n        "tpu")', "tpu"),
        ("torch.cuda.synchronize()", "cuda"),
        ("import torch.mps", "mps"),
        ("from transformers.utils import is_torch_npu_available", "npu"),
        ("use_cuda = True", "cuda"),
        ("make(with_neuron=True)", "neuron"),
    ],
)
def test_a_planted_name_is_found(source: str, word: str) -> None:
    assert [found for _, found, _ in find_names(source)] == [word]


def test_the_line_is_named() -> None:
    assert find_names('a = 1\n\n\nb = {"x": ["mlu"]}\n') == [(4, "mlu", "mlu")]


def test_documentation_and_longer_words_are_no_names() -> None:
    source = '''
"""The module: cuda, for instance."""
# hpu in a comment
LIMIT = 1
"""What the attribute means on an NVIDIA card."""


class A:
    def f(self):
        """nccl."""
        return "inputs", "dumps", "tpus", "cpus", "manipulate", "neurons"


host = tensor.cpu()
'''
    assert find_names(source) == []
