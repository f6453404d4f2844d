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
from tests.helpers.tree import add_distribution

Install = Callable[..., None]

SHIPPED = tuple(sorted({e.dist.name for e in metadata.entry_points(group="anygauge") if e.dist}))
"""Distributions with plugins that are installed here; these tests are about others."""


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
def backend_source() -> Callable[..., str]:
    """Source of a plugin module with one backend; `devices`, ... are answers of its probe."""

    def source(
        name: str,
        *,
        module: str | None = None,
        priority: int = 10,
        devices: str = "yes",
        driver: str = "yes",
        software: str = "yes",
        probe: str | None = None,
        api_version: str = "API_VERSION",
        factory: str | None = None,
        more: str = "",
    ) -> str:
        module = module or f"fake_{name}"
        body = probe or (
            f"return Probe(devices={finding(devices, 'card')}, "
            f"driver={finding(driver, 'driver')}, software={finding(software, 'library')})"
        )
        return f"""\
from anygauge.interface import *
from anygauge.interface import API_VERSION, hookimpl

def probe():
    {body}

class Fake(Backend):
    name = {name!r}
    device_type = "meta"
    kernels = {{"softmax": "fast"}}

class FakeOptions(Options):
    threads: int = 1

class Impostor:
    def __init__(self, options):
        self.name = {name!r}

class Renamed(Backend):
    name = "another"
    device_type = "meta"

class Promising(Backend):
    name = "host"
    device_type = "meta"
    capabilities = {{"bfloat16": True}}

def broken(options):
    raise RuntimeError("no such card")

def impostor(options):
    return Impostor(options)

@hookimpl
def anygauge_provide_backends():
    return [BackendSpec(
        name={name!r},
        factory={(factory or module + ":Fake")!r},
        probe=probe,
        api_version={api_version},
        priority={priority},
        options={module + ":FakeOptions"!r},
    )]
{more}
"""

    return source


@pytest.fixture
def have(install: Install, backend_source: Callable[..., str]) -> Callable[..., None]:
    """``have("name", ...)`` installs one backend by that name, as version 1.0 of name-dist."""

    def put(name: str, plugin: str = "", version: str = "1.0", **answers: Any) -> None:
        plugin = plugin or name
        module = f"fake_{plugin}"
        source = backend_source(name, module=module, **answers)
        install(f"{plugin}-dist", version, {plugin: module}, **{module: source})

    return put


def finding(answer: str, what: str) -> str:
    """Source of a `Finding` of the answer yes, no or not_needed."""
    if answer == "not_needed":
        return "Finding.not_needed()"
    return f"Finding.{answer}('{what} {answer}', '/fake/{what}')"
