"""An environment beside the machine's torch: which interpreters do, what stays, what is taken."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu import install


@pytest.mark.parametrize(
    ("version", "torch", "reported"),
    [
        ((3, 10), "2.13.0", "Python 3.10 is not of 3.11 to 3.14"),
        ((3, 15), "2.13.0", "Python 3.15 is not"),
        ((3, 12), None, "has no torch"),
        ((3, 12), "2.10.0+cu128", "2.11 or newer"),
        ((3, 11, 1), "2.11.0a0+git1234", ""),
        ((3, 14, 1), "2.13.0", ""),
    ],
)
def test_interpreters_that_can_be_used(
    version: tuple[int, ...], torch: str | None, reported: str
) -> None:
    if not reported:
        install.check_interpreter(version, torch)
        return
    with pytest.raises(install.InstallError, match=reported):
        install.check_interpreter(version, torch)


def test_torch_and_what_it_brought_stay_as_they_are() -> None:
    found = "torch 2.13.0+cu130,nvidia_nccl_cu13 2.28.9,numpy 2.1,triton 3.9.0,torchvision 0.28"
    pairs = [(name, version) for name, _, version in (x.partition(" ") for x in found.split(","))]
    assert install.constraints([*pairs, pairs[0]]).splitlines() == [
        "nvidia-nccl-cu13==2.28.9",
        "torch==2.13.0+cu130",
        "triton==3.9.0",
    ]


def test_extras_are_those_whose_needs_are_in_the_folder() -> None:
    assert install.extras(["torch"]) == ["testing"]
    files = ["deepspeed-0.19.8.tar.gz", "trl-1.16.0-py3-none-any.whl", "nvidia_ml_py-13.whl"]
    names = [install.normal(file) for file in files]
    assert names == ["deepspeed", "trl", "nvidia-ml-py"]
    assert install.extras(names) == ["testing", "zero", "bench"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(install.InstallError, match="is not a folder"):
        install.main(tmp_path / "absent", tmp_path / "environment")
    assert not (tmp_path / "environment").exists()


@pytest.mark.parametrize("ensured", [True, False])
def test_a_python_without_ensurepip_uses_its_own_pip(
    ensured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    built: list[Any] = []

    def run(argv: list[str], check: bool, env: Any = None) -> Any:
        ran.append(argv)
        built.append(env)
        if "venv" in argv:
            (tmp_path / "venv/lib/python3.12/site-packages").mkdir(parents=True)
        return SimpleNamespace(returncode=0)

    found = {"pip": True, "ensurepip": ensured}
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: found[name] or None)
    monkeypatch.setattr(install.subprocess, "run", run)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    install.main(wheels, tmp_path / "venv")
    python = str(tmp_path / "venv/bin/python")
    venv, *pips = ran
    assert ("--without-pip" in venv) is not ensured
    for pip in pips:
        wanted = [python, "-m", "pip"] if ensured else [sys.executable, "-m", "pip", "--python"]
        assert pip[: len(wanted)] == wanted and python in pip
    # DeepSpeed's build looks for a compiler of CUDA's where it finds a card.
    assert all(env["DS_ACCELERATOR"] == "cpu" and env["DS_BUILD_OPS"] == "0" for env in built[1:])


OF_THE_MACHINE = {"torch", "pyarrow", "numpy", "pandas"}
"""An image for training has them."""
BROUGHT_ALONG = {"pluggy"}
"""By pytest."""


def test_the_recipe_of_the_docs_has_all_that_is_installed_and_nothing_heavy() -> None:
    """pip download brings torch and NVIDIA's libraries, 2.9 GiB, for whatever needs torch."""
    page = (install.ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if re.search(r"--(wheel-dir|dest) wheels ", line)]
    assert ["--no-deps" in line for line in lines] == [False, *[True] * 4]
    words = [word for line in lines for word in shlex.split(line.partition(" wheels ")[2])]
    named = {install.normal(Requirement(word).name) for word in words if word[0] != "-"}
    assert not named & OF_THE_MACHINE
    text = (install.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["testing"], *extras["zero"], *extras["bench"]]
    missing = {install.normal(Requirement(each).name) for each in wanted} - named
    assert missing - OF_THE_MACHINE == BROUGHT_ALONG
