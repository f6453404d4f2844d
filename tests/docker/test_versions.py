"""Images, commands and launchers have their versions from one table for each backend."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from anygauge.interface import own_image
from anygauge_cpu.backend import CpuBackend
from anygauge_cuda.backend import CudaBackend
from anygauge_hpu.backend import HpuBackend
from tests.docker.bake import BACKENDS, ROOT, bake_file, table, targets
from tests.helpers.runs import anygauge

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROFILES = {"cpu": CpuBackend.launch, "cuda": CudaBackend.launch, "hpu": HpuBackend.launch}


def arguments(backend: str, *, needed: bool = False) -> set[str]:
    """What a Dockerfile lets be given; `needed`: has no value else."""
    text = (ROOT / f"docker/{backend}.Dockerfile").read_text()
    return set(re.findall(r"^ARG (\w+)$" if needed else r"^ARG (\w+)", text, re.M))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_release_with_an_image_is_a_target(backend: str) -> None:
    rendered = targets(backend)
    rows = [row for row in table(backend) if row["built"]]
    assert len(rendered) == len(rows) > 0
    for (name, target), row in zip(rendered.items(), rows, strict=True):
        assert re.fullmatch(r"[a-zA-Z0-9_-]+", name)
        assert target["dockerfile"] == f"docker/{backend}.Dockerfile"
        assert arguments(backend, needed=True) <= set(target["args"]) <= arguments(backend)
        assert target["tags"] == [f"anygauge:{PROJECT['version']}-{backend}-{row['name']}"]
        assert target["args"]["BASE"] == row["base"]
        assert target["labels"]["org.opencontainers.image.base.name"] == row["base"]
        assert target["tags"][0].endswith(target["labels"]["org.opencontainers.image.ref.name"])
        assert target["args"]["TORCH_VERSION"] == row["versions"]["torch"]
        assert target["args"]["VERSION"] == PROJECT["version"] == version("anygauge")


def test_further_arguments() -> None:
    assert targets("cpu")["cpu-torch-2-13"]["args"]["TORCH_INDEX"].endswith("/whl/cpu")
    for name, target in targets("cuda").items():
        base, build = target["args"]["BASE"], target["args"]["BUILD_BASE"]
        assert base.replace("-runtime", "-devel") == build != base
        assert name.replace("cuda-torch-2-13-", "").replace("-", ".") in base
        assert re.fullmatch(r"\d+\.\d(;\d+\.\d)+", target["args"]["ARCHITECTURES"])
    for target, row in zip(targets("hpu").values(), table("hpu")[1:], strict=True):
        assert target["args"]["DEEPSPEED"] == row["versions"]["deepspeed"]
        assert target["args"]["TRANSFORMERS"] == row["versions"]["transformers"]
        assert target["args"]["OPTIMUM_HABANA"] == row["versions"].get("optimum-habana", "")
        pins = (ROOT / "docker" / target["args"]["CONSTRAINTS"]).read_text().splitlines()
        assert f"transformers=={row['versions']['transformers']}" in pins


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_row_cites_its_source_and_pins_its_bases(backend: str) -> None:
    for row in table(backend):
        assert row["source"] and row["name"]
        assert row["built"] or row.get("note"), "why is there no image of it?"
        for base in (row["base"], row["arguments"].get("build_base", row["base"])):
            tag = base.rpartition(":")[2]
            assert re.search(r"\d+\.\d+", tag) and "latest" not in tag, base


@pytest.mark.parametrize("row", table("hpu"), ids=lambda row: row["name"])
def test_gaudis_rows_agree_with_themselves(row: dict[str, Any]) -> None:
    release, torch = row["name"], row["versions"]["torch"]
    # Ubuntu 22.04 has Python 3.10, which anygauge does not run on.
    assert row["base"].startswith(
        f"vault.habana.ai/gaudi-docker/{release}/ubuntu24.04/habanalabs/pytorch-installer-{torch}:"
    )
    assert row["built"] is (Requirement(requirement("torch")).specifier.contains(torch))
    own = Requirement(requirement("transformers")).specifier
    if row["built"]:
        assert own.contains(row["versions"]["transformers"])
    if "optimum-habana" in row["versions"]:
        assert row["versions"]["optimum-habana"] == row["goes_with"]["optimum-habana"]
        wanted = Requirement(f"transformers{row['goes_with']['transformers']}").specifier
        assert wanted.contains(row["versions"]["transformers"])


def test_a_mirror_that_pip_is_told_of_has_torch_too() -> None:
    told = targets("cpu", {"PIP_SETTINGS": "pip.conf"})["cpu-torch-2-13"]["args"]
    assert told["TORCH_INDEX"] == ""


def test_a_compiler_for_any_processor(tmp_path: Path) -> None:
    # What DeepSpeed asks for where it is built, and what it gets.
    (tmp_path / "c++").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "c++").chmod(0o755)
    done = subprocess.run(
        [ROOT / "docker/portable-c++", "-march=native", "-D__AVX512__", "-DX=a b", "-O0"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["-march=x86-64-v3", "-D__AVX256__", "-DX=a b", "-O0"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (["DS_BUILD_AIO=1", "DS_BUILD_CPU_ADAM=1"], None),
        (["DS_BUILD_OPS=0"], None),
        (["DS_BUILD_FUSED_ADAM=1"], "or without fused_adam"),
    ],
)
@pytest.mark.parametrize("accelerator", ["cuda", "cpu"])
def test_operations_that_would_not_be_loaded_fail_the_build(
    tmp_path: Path, wanted: list[str], said: str | None, accelerator: str
) -> None:
    wheel = tmp_path / "deepspeed.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(
            "deepspeed/git_version_info_installed.py",
            "installed_ops={'async_io': True, 'cpu_adam': True, 'fused_adam': False}\n"
            f"accelerator_name={accelerator!r}\n",
        )
    done = subprocess.run(
        [sys.executable, ROOT / "docker/built_operations.py", wheel, "cuda", *wanted],
        capture_output=True,
        text=True,
    )
    if accelerator == "cuda" and said is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 1 and (said or "built for cpu, not for cuda") in done.stderr


def test_gaudis_releases_are_all_there() -> None:
    known = [*(f"1.{n}.0" for n in range(19, 25)), "1.24.1"]
    assert [row["name"] for row in table("hpu")] == known


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_command_and_the_launchers_name_what_the_bake_file_builds(backend: str) -> None:
    rendered = targets(backend)
    newest = list(rendered)[-1]
    told = json.loads(anygauge(["image", "--backend", backend, "--json"]).stdout)
    assert told["image"] == rendered[newest]["tags"][0] == PROFILES[backend].image
    assert told["build"][-1] == newest
    assert told["release"]["base"] == rendered[newest]["args"]["BASE"]
    assert set(told["releases"]) == {row["name"] for row in table(backend)}


def test_one_variable_names_the_repository_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = [n for n in bake_file()["variable"] if "REPOSITORY" in n]
    monkeypatch.setenv(name, "registry.example.com/team/anygauge")
    variables = {name: "registry.example.com/team/anygauge"}
    assert (
        own_image("hpu", PROFILES["hpu"].releases)
        == (targets("hpu", variables)["hpu-1-24-1"]["tags"][0])
    )


def requirement(name: str) -> str:
    """A direct dependency as pyproject.toml states it."""
    return next(r for r in PROJECT["dependencies"] if Requirement(r).name == name)


@pytest.mark.parametrize(
    ("file", "extras", "given"),
    [
        ("constraints.txt", ("cuda", "hpu"), {"torch"}),
        # By their own arguments of the build.
        ("constraints-hpu-lazy.txt", ("hpu-lazy",), {"torch", "deepspeed", "optimum-habana"}),
    ],
)
def test_all_that_is_installed_is_pinned_within_its_range(
    file: str, extras: tuple[str, ...], given: set[str]
) -> None:
    lines = (ROOT / "docker" / file).read_text().splitlines()
    pins = dict(line.split("==") for line in lines)
    optional = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(r for e in extras for r in optional[e]), "hatchling"]
    for one in map(Requirement, wanted):
        if one.name not in given:
            assert one.specifier.contains(pins[one.name]), one
    assert not given & set(pins)
