"""Who imports whom: no package or plugin escapes the contracts, which `make lint` checks."""

from __future__ import annotations

from tests.architecture import contracts
from tests.architecture.repository import ROOT, core_packages, example_plugins, packages, project

COMMON, CONTRACTS = contracts.read()


def contract(name: str) -> dict[str, set[str]]:
    found = next(c for c in CONTRACTS if c["name"] == name)
    return {key: set(value) for key, value in found.items() if isinstance(value, list)}


def test_no_package_of_the_core_escapes() -> None:
    for_plugins = contract("Plugins import the interface alone")["forbidden_modules"]
    # The interface imports utilities, so this contract would find them behind it: see below.
    assert for_plugins == core_packages() - {"anygauge.interface", "anygauge.util"}
    rule = contract("Of the plugins, launchers alone use utilities")
    assert rule["forbidden_modules"] == {"anygauge.util"}
    folders = {path.parent.relative_to(ROOT) for path in ROOT.glob("anygauge/*/**/__init__.py")}
    ancestors = {".".join(folder.parts) for folder in folders}
    assert contract("No circles within a package")["ancestors"] == ancestors >= core_packages()


def test_no_plugin_escapes() -> None:
    names = {path.name for path in (*packages(), *example_plugins())}
    assert set(COMMON["root_packages"]) == names
    plugins = names - {"anygauge"}
    assert contract("Plugins import the interface alone")["source_modules"] == plugins
    assert contract("Nothing imports a plugin")["forbidden_modules"] == plugins
    rule = contract("Of the plugins, launchers alone use utilities")
    assert rule["source_modules"] == plugins - {"anygauge_clouds", "anygauge_launchers"}


def test_every_package_on_disk_is_shipped() -> None:
    on_disk = {path.parent for path in ROOT.glob("*/anygauge_*/__init__.py")}
    assert {ROOT / "anygauge", *on_disk} == set(packages())
    wheel = project()["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["only-include"] == ["anygauge", *wheel["sources"]]
