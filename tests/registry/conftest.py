"""Fake installed distributions: real metadata on a real path, found as any other."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from anygauge.registry import BLOCK_VARIABLE, Registry
from tests.helpers.fake_files import add_distribution

Install = Callable[..., None]

SHIPPED = tuple(sorted({e.dist.name for e in metadata.entry_points(group="anygauge") if e.dist}))
"""Distributions with plugins that are installed here; these tests are about others."""

BACKEND = """\
from anygauge.interface import *
from anygauge.interface import API_VERSION, hookimpl

def probe():
    {probe}

class Fake(Backend):
    name = {name!r}
    device_type = "meta"
    kernels = {{"softmax": "fast"}}

class FakeOptions(Options):
    threads: int = 1

class Renamed(Backend):
    name = "another"
    device_type = "meta"

class Promising(Backend):
    name = "host"
    device_type = "meta"
    capabilities = {{"bfloat16": True}}

def broken(options):
    raise RuntimeError("no such card")

@hookimpl
def anygauge_provide_backends():
    return [BackendSpec(
        name={name!r},
        factory="{factory}",
        probe=probe,
        api_version={api_version},
        priority={priority},
        options="{options}",
    )]
{more}
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install("dist", "1.0", {"entry": "module"}, module=source)`` puts a plugin on the path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)

    def put(
        distribution: str, version: str, entry_points: Mapping[str, str], **modules: str
    ) -> None:
        lines = "".join(f"{name} = {value}\n" for name, value in entry_points.items())
        add_distribution(site, distribution, version, f"[anygauge]\n{lines}")
        for name, source in modules.items():
            (site / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()  # a folder may have been listed within the same tick

    yield put
    for name in set(sys.modules) - before:
        if str(site) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def load() -> Callable[..., Registry]:
    """Load the registry without the plugins that anygauge itself ships."""

    def loaded(*blocked: str) -> Registry:
        found = Registry.load({**os.environ, BLOCK_VARIABLE: ",".join((*SHIPPED, *blocked))})
        print(*found.failures, sep="\n")  # which pytest shows with a test that fails
        return found

    return loaded


@pytest.fixture
def have(install: Install) -> Callable[..., None]:
    """``have("name", ...)`` installs one backend by that name, as version 1.0 of name-dist.

    ``devices``, ``driver`` and ``software`` are answers of its probe: yes, no or not_needed.
    """

    def put(name: str, plugin: str = "", version: str = "1.0", **fields: Any) -> None:
        plugin = plugin or name
        module = f"fake_{plugin}"
        questions = {"devices": "card", "driver": "driver", "software": "library"}
        found = [f"{q}={_finding(fields.pop(q, 'yes'), what)}" for q, what in questions.items()]
        defaults = {
            "name": name, "probe": f"return Probe({', '.join(found)})", "priority": 10,
            "factory": f"{module}:Fake", "options": f"{module}:FakeOptions",
            "api_version": "API_VERSION", "more": "",
        }  # fmt: skip
        source = BACKEND.format(**{**defaults, **fields})
        install(f"{plugin}-dist", version, {plugin: module}, **{module: source})

    return put


def _finding(answer: str, what: str) -> str:
    shown = "" if answer == "not_needed" else f"'{what} {answer}', '/fake/{what}'"
    return f"Finding.{answer}({shown})"
