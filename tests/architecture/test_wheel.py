"""The wheel: everything that an installation needs is in it, and nothing else."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.architecture.repository import ROOT, packages, project

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    result = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_its_name_says_any_platform(wheel):
    assert wheel.name == f"anygauge-{project()['project']['version']}-py3-none-any.whl"


def test_every_module_is_in_it_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(package.parent).as_posix()
        for package in packages()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == expected


def test_type_checkers_may_read_what_plugins_import(unpacked):
    assert (unpacked / "anygauge/py.typed").is_file()


def test_entry_points_are_those_of_the_project(unpacked):
    (distribution,) = importlib.metadata.distributions(path=[str(unpacked)])
    found: dict[str, dict[str, str]] = {}
    for point in distribution.entry_points:
        found.setdefault(point.group, {})[point.name] = point.value
    assert found == {
        **project()["project"]["entry-points"],
        "console_scripts": project()["project"]["scripts"],
    }


def test_the_licence_is_in_it(unpacked):
    (licence,) = unpacked.glob("*.dist-info/licenses/LICENSE")
    assert "Apache License" in licence.read_text(encoding="utf-8")


def printed(program: str, unpacked: Path, folder: Path) -> str:
    """What a program prints whose packages are those of the wheel."""
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_it_works_from_where_it_was_unpacked(unpacked, tmp_path):
    program = (
        "import anygauge, anygauge.cli as cli; print(anygauge.__file__);"
        "raise SystemExit(cli.run(['backends', '--json']))"
    )
    said = printed(program, unpacked, tmp_path)
    assert said.startswith(str(unpacked))
    assert '"name": "cpu"' in said


def test_descriptions_of_hardware_are_read_from_it(unpacked, tmp_path):
    program = (
        "from anygauge.planning.machines import Hardware; from anygauge.registry import Registry;"
        "found = Hardware.load(Registry.load());"
        "print(found.failures, found.machine('p5').cards, found.card('gaudi2').origin)"
    )
    version = project()["project"]["version"]
    assert printed(program, unpacked, tmp_path) == f"() 8 device.toml of anygauge {version}\n"
