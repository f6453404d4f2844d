"""An environment for the benchmark from a folder of wheels, beside the torch of an interpreter.

    python3.12 benchmarks/gpu/install.py WHEELS .venv-gpu

Run by the interpreter that has torch, of which nothing is replaced: the environment reads its
packages, pip is held to its versions of torch and what torch brought along, and fetches nothing.
Imports only what comes with Python.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ((3, 11), (3, 14))
OLDEST_TORCH = (2, 11)
KEPT = re.compile(r"(torch|triton|pytorch-triton|nvidia-.*|cuda-.*)$")
"""Distributions that stay as the machine has them."""
BUILDERS = ("setuptools", "wheel", "hatchling", "editables", "packaging")
OPTIONAL = {"deepspeed": "zero", "trl": "bench"}
"""Distribution -> the extra that wants it: contenders that need it are left out without."""
WITHOUT_OPERATIONS = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
"""For DeepSpeed's build, which would look for CUDA's compiler where it finds a card."""
ASIDE = ("liger-kernel", "nvidia-ml-py")
"""Taken along where the folder has them."""


class InstallError(Exception):
    """The environment cannot be made; says what to do."""


def normal(name: str) -> str:
    """The normal form of a distribution's name; of a file's, that of what it holds."""
    return re.sub(r"[-_.]+", "-", re.split(r"-\d", name, maxsplit=1)[0]).lower()


def check_interpreter(version: Sequence[int], torch: str | None) -> None:
    """Whether this interpreter and its torch can be used."""
    if not PYTHONS[0] <= tuple(version[:2]) <= PYTHONS[1]:
        raise InstallError(
            f"Python {version[0]}.{version[1]} is not of 3.11 to 3.14: PYTHON=python3.12 names "
            "another, which must have torch"
        )
    if torch is None:
        raise InstallError(
            f"{sys.executable} has no torch: PYTHON= names the interpreter that has it, such as "
            "that of the environment in which torch was installed"
        )
    if tuple(map(int, torch.split(".")[:2])) < OLDEST_TORCH:
        raise InstallError(f"torch {torch} is installed, and 2.11 or newer is needed")


def constraints(found: Iterable[tuple[str, str]]) -> str:
    """What pip must leave as it is, one line each.

    Args:
        found: (name, version) of all distributions of the machine.
    """
    named = {(normal(name), version) for name, version in found}
    return "".join(f"{name}=={version}\n" for name, version in sorted(named) if KEPT.match(name))


def extras(available: Iterable[str]) -> list[str]:
    """Extras of anygauge whose needs are there."""
    there = set(available)
    return ["testing", *(extra for name, extra in OPTIONAL.items() if name in there)]


def link_packages(environment: Path) -> None:
    """Let the environment's interpreter find this one's packages, after its own."""
    folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    own = next((environment / "lib").glob("python3.*/site-packages"))
    lines = (f"import site; site.addsitedir({folder!r})\n" for folder in folders)
    (own / "machine.pth").write_text("".join(lines), encoding="utf-8")


def main(wheels: Path, environment: Path) -> None:
    """Make the environment."""
    all_here = [(d.name, d.version) for d in metadata.distributions()]
    check_interpreter(sys.version_info, next((v for name, v in all_here if name == "torch"), None))
    if not wheels.is_dir():
        raise InstallError(f"WHEELS={wheels} is not a folder")
    files = {normal(path.name) for path in wheels.iterdir()}
    own = bool(importlib.util.find_spec("ensurepip"))
    if not own and not importlib.util.find_spec("pip"):
        raise InstallError(
            f"{sys.executable} has neither ensurepip (Debian, Ubuntu: python3-venv) nor pip"
        )
    venv = [sys.executable, "-m", "venv", "--clear", *([] if own else ["--without-pip"])]
    if subprocess.run([*venv, str(environment)], check=False).returncode:
        raise InstallError(f"{' '.join(venv)} failed: the lines above say why")
    link_packages(environment)
    kept = environment / "machine.txt"
    kept.write_text(constraints(all_here), encoding="utf-8")
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip"] if own else [sys.executable, "-m", "pip", "--python", python]
    pip += ["--disable-pip-version-check", "install", "--quiet", "--no-build-isolation"]
    pip += ["--no-index", f"--find-links={wheels}", f"--constraint={kept}"]
    aside = [name for name in ASIDE if name in files]
    chosen = f"{ROOT}[{','.join(extras(files | {normal(name) for name, _ in all_here}))}]"
    for wanted in (BUILDERS, ("--editable", chosen, *aside)):
        built = {**os.environ, **WITHOUT_OPERATIONS}
        if subprocess.run([*pip, *wanted], check=False, env=built).returncode:
            raise InstallError(
                f"pip did not find all that is needed in {wheels} and in {sys.executable}: the "
                "lines above name what is missing. docs/gpu.md says how to fill the folder on a "
                "machine that has a network"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("environment", type=Path)
    given = parser.parse_args()
    try:
        main(given.wheels.resolve(), given.environment.resolve())
    except InstallError as error:
        sys.exit(f"error: {error}")
