"""Images, commands and launchers have their versions from one table for each backend."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from anygauge_cuda.backend import CudaBackend
from anygauge_hpu.backend import HpuBackend
from anygauge_hpu.software import RELEASES

ROOT = Path(__file__).parents[2]
BAKE = (ROOT / "docker/docker-bake.hcl").read_text()
BACKENDS = ("cpu", "cuda", "hpu")


def table(backend: str) -> list[dict[str, Any]]:
    record = json.loads((ROOT / f"backends/anygauge_{backend}/releases.json").read_text())
    return list(record["variable"][f"{backend.upper()}_RELEASES"]["default"])


def target(backend: str) -> str:
    """A target's block of the bake file."""
    found = re.search(rf'^target "{backend}" {{\n(.*?)^}}', BAKE, re.M | re.S)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bake_file_gives_a_dockerfile_what_it_asks_for(backend: str) -> None:
    block = target(backend)
    args = re.search(r"args = {\n(.*?)^  }", block, re.S | re.M)
    assert args is not None
    given = set(re.findall(r"^\s*(\w+)\s*=", args[1], re.M))
    asked = set(
        re.findall(r"^ARG (\w+)", (ROOT / f"docker/{backend}.Dockerfile").read_text(), re.M)
    )
    assert given == asked
    fields = set(re.findall(r"item\.(\w+)", block)) | set(re.findall(r"one\.(\w+)", block))
    assert fields <= set.intersection(*(set(row) for row in table(backend)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_row_cites_its_source(backend: str) -> None:
    assert all(row["source"] and row["release"] for row in table(backend))


def test_backends_have_their_images_from_the_table() -> None:
    assert CudaBackend.launch.image == table("cuda")[-1]["base"]
    verified = [row["base"] for row in table("hpu") if row["base"]]
    assert HpuBackend.launch.image == f"{verified[-1]}:latest"
    assert [release.version for release in RELEASES] == [
        "1.19", "1.20", "1.21", "1.22", "1.23", "1.24",
    ]  # fmt: skip
