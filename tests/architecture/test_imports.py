"""Who imports whom: the contracts hold, and no package or plugin escapes them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.architecture.repository import ROOT, core_packages, example_plugins, packages, project

LINT_IMPORTS = Path(sysconfig.get_path("scripts")) / "lint-imports"


def contract(name: str) -> dict:
    return next(c for c in project()["tool"]["importlinter"]["contracts"] if c["name"] == name)


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, LINT_IMPORTS, "--no-cache", "--no-logo"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(p.parent) for p in example_plugins())},
    )


def test_the_contracts_hold():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_every_room_has_a_floor():
    layers = contract("Packages import downwards only")["layers"]
    assert {package.strip() for layer in layers for package in layer.split("|")} == core_packages()


def test_plugins_may_import_no_room_but_the_interface():
    named = contract("Plugins import the interface alone")["forbidden_modules"]
    # The interface imports utilities, so this contract would find them behind it: see below.
    assert set(named) == core_packages() - {"anygauge.interface", "anygauge.util"}


def test_launchers_alone_may_import_utilities():
    rule = contract("Of the plugins, launchers alone use utilities")
    assert rule["forbidden_modules"] == ["anygauge.util"]
    plugins = contract("Plugins import the interface alone")["source_modules"]
    assert set(rule["source_modules"]) == set(plugins) - {"anygauge_clouds", "anygauge_launchers"}


def test_every_package_is_under_contract():
    names = {path.name for path in (*packages(), *example_plugins())}
    assert set(project()["tool"]["importlinter"]["root_packages"]) == names
    plugins = names - {"anygauge"}
    assert set(contract("Plugins import the interface alone")["source_modules"]) == plugins
    assert set(contract("Nothing imports a plugin")["forbidden_modules"]) == plugins


def test_every_package_on_disk_is_shipped():
    on_disk = {
        path.parent
        for folder in (ROOT, ROOT / "backends", ROOT / "kernels", ROOT / "launchers")
        for path in folder.glob("anygauge*/__init__.py")
    }
    assert set(packages()) == on_disk
