"""Wrong backends that checks of the kit's part `basic` find: see `tests.testing.wrong`.

Those that leave something behind are in `tests.testing.wrong_ends`.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import field_validator

from anygauge.interface import (
    Backend,
    Check,
    Finding,
    LaunchProfile,
    Level,
    Options,
    Probe,
    Scope,
    Setting,
    Support,
)
from anygauge_cpu.options import CpuOptions
from tests.testing.wrong import Wrong, mutant

Settings = list[Setting]


def level(value: Any, scope: Scope = Scope.JOB, name: str = "MUTANT_LEVEL") -> Settings:
    """One setting more."""
    return [Setting(name=name, value=str(value), scope=scope, reason="a reason", source="a page")]


# -- the spec and the probe -----------------------------------------------------------------------


@mutant(
    "its probe is made as it is imported", part="basic", check="spec_pickles_to_another_process"
)
def _(on: Wrong) -> None:
    made = types.ModuleType("made_by_the_mutant")
    exec("def probe(): return None", made.__dict__)
    sys.modules[made.__name__] = made
    on.spec(probe=made.probe)


def figures_by_torch() -> Mapping[str, float]:
    import torch

    return {"memory": float(torch.finfo(torch.float32).max)}


@mutant("figures come from torch", part="basic", check="spec_pickles_to_another_process")
def _(on: Wrong) -> None:
    on.spec(this_machine=figures_by_torch)


@mutant("four of the devices that are missing", part="basic", check="probe_fits_together")
def _(on: Wrong) -> None:
    @on.probe
    def probe(usual: Callable[[], Probe]) -> Probe:
        return dataclasses.replace(usual(), devices=Finding.no("no card"), device_count=4)


@mutant("available with 0 devices", part="basic", check="probe_fits_together")
def _(on: Wrong) -> None:
    @on.probe
    def probe(usual: Callable[[], Probe]) -> Probe:
        return dataclasses.replace(usual(), device_count=0)


@mutant("its cards are letters", part="basic", check="probe_fits_together")
def _(on: Wrong) -> None:
    @on.probe
    def probe(usual: Callable[[], Probe]) -> Probe:
        return dataclasses.replace(usual(), cards="card")  # type: ignore[arg-type]


@mutant("one name stands for each of four cards", part="basic", check="probe_fits_together")
def _(on: Wrong) -> None:
    @on.probe
    def probe(usual: Callable[[], Probe]) -> Probe:
        return dataclasses.replace(usual(), cards=("card",) * 4)


@mutant("the probe takes the driver's folder for granted", part="basic", check="probe_says_no")
def _(on: Wrong) -> None:
    @on.probe
    def probe(usual: Callable[[], Probe]) -> Probe:
        list(Path("/dev").iterdir())
        return usual()


@mutant("the probe takes the vendor's tool for granted", part="basic", check="probe_says_no")
def _(on: Wrong) -> None:
    @on.probe
    def probe(usual: Callable[[], Probe]) -> Probe:
        subprocess.run(["true"], check=True)
        return usual()


@mutant("the probe has no answer without devices", part="basic", check="probe_says_no")
def _(on: Wrong) -> None:
    @on.probe
    def probe(usual: Callable[[], Probe]) -> Probe | None:
        return usual() if Path("/dev/null").exists() else None


@mutant(
    "the description of cards is not in the package", part="basic", check="hardware_file_is_sound"
)
def _(on: Wrong) -> None:
    on.spec(hardware="anygauge_cpu:none.toml")


@mutant("the description of cards is no TOML", part="basic", check="hardware_file_is_sound")
def _(on: Wrong) -> None:
    on.spec(hardware="anygauge_cpu:backend.py")


def figures_as_text() -> Mapping[str, Any]:
    return {"memory": "80 GiB"}


def figures_below_zero() -> Mapping[str, float]:
    return {"memory": -1}


@mutant("the machine's figures are texts", part="basic", check="hardware_file_is_sound")
def _(on: Wrong) -> None:
    on.spec(this_machine=figures_as_text)


@mutant("the machine's memory is -1, for unknown", part="basic", check="hardware_file_is_sound")
def _(on: Wrong) -> None:
    on.spec(this_machine=figures_below_zero)


@mutant("a comma is missing after the only library", part="basic", check="lists_are_lists")
def _(on: Wrong) -> None:
    on.backend.libraries = "vendor-torch"  # type: ignore[assignment]


@mutant("the visibility variable comes with its value", part="basic", check="lists_are_lists")
def _(on: Wrong) -> None:
    on.backend.launch = LaunchProfile(visibility_variable="MUTANT_VISIBLE=0")


@mutant(
    "a library is named by a path that depends on the folder", part="basic", check="lists_are_lists"
)
def _(on: Wrong) -> None:
    on.backend.files = ("lib/libmutant.so",)


# -- options --------------------------------------------------------------------------------------


class AnyBinding(CpuOptions):
    """One option takes any value."""

    bind_cores: Any = True


class LevelOptions(Options):
    """A wrong value of its option ends in a KeyError."""

    level: Any = "low"

    @field_validator("level")
    @classmethod
    def _read(cls, value: Any) -> int:
        return {"low": 1, "high": 2}[str(value)]


@mutant("an option takes any value", part="basic", check="wrong_values_are_refused")
def _(on: Wrong) -> None:
    on.spec(options=f"{__name__}:AnyBinding")


@mutant("a wrong value ends in a KeyError", part="basic", check="wrong_values_are_refused")
def _(on: Wrong) -> None:
    on.spec(options=f"{__name__}:LevelOptions")

    @on.method("backend.__init__")
    def make(self: Backend, usual: Any, options: Any = None) -> None:
        Backend.__init__(self, options)


@mutant("instances share a placement", part="basic", check="facets_are_its_own")
def _(on: Wrong) -> None:
    shared: list[Any] = []

    @on.made
    def made(backend: Backend) -> None:
        shared.append(backend.placement)
        backend.placement = shared[0]


@mutant(
    "an option of one instance changes the class", part="basic", check="instances_do_not_interfere"
)
def _(on: Wrong) -> None:
    @on.made
    def made(backend: Backend) -> None:
        if backend.options.bind_cores is False:
            off = Support(Level.SWITCHED_OFF, "bind_cores is false")
            on.backend.capabilities = {**on.backend.capabilities, "float16": off}


@mutant(
    "each instance adds a kernel to the class", part="basic", check="instances_do_not_interfere"
)
def _(on: Wrong) -> None:
    kernels: dict[str, str] = {}
    on.backend.kernels = kernels

    @on.made
    def made(backend: Backend) -> None:
        kernels[f"operation{len(kernels)}"] = "mutant"


# -- rules ----------------------------------------------------------------------------------------


@mutant("a rule reads a variable of the process", part="basic", check="rules_read_no_variables")
def _(on: Wrong) -> None:
    @on.settings
    def settings(job: Any, node: Any, rank: int | None) -> Settings:
        return level(os.environ.get("MUTANT_DEBUG", "1"))


@mutant("a rule asks whether a variable is set", part="basic", check="rules_read_no_variables")
def _(on: Wrong) -> None:
    @on.settings
    def settings(job: Any, node: Any, rank: int | None) -> Settings:
        return level(1) if "MUTANT_DEBUG" in os.environ else []


@mutant("a rule needs a variable that agents lack", part="basic", check="rules_read_no_variables")
def _(on: Wrong) -> None:
    @on.settings
    def settings(job: Any, node: Any, rank: int | None) -> Settings:
        return level(os.environ["PATH"] and 1)


@mutant("a rule counts the processors of this machine", part="basic", check="rules_read_no_machine")
def _(on: Wrong) -> None:
    @on.settings
    def settings(job: Any, node: Any, rank: int | None) -> Settings:
        return level(os.cpu_count(), Scope.NODE)


@mutant("a rule asks this machine for its name", part="basic", check="rules_read_no_machine")
def _(on: Wrong) -> None:
    @on.settings
    def settings(job: Any, node: Any, rank: int | None) -> Settings:
        return level(socket.gethostname(), Scope.NODE)


@mutant("a rule names the working folder", part="basic", check="rules_read_no_machine")
def _(on: Wrong) -> None:
    @on.settings
    def settings(job: Any, node: Any, rank: int | None) -> Settings:
        return level(f"{Path.cwd()}/cache")


@mutant("the job's value is the memory of a machine", part="basic", check="job_scope_is_one_value")
def _(on: Wrong) -> None:
    @on.settings
    def settings(job: Any, node: Any, rank: int | None) -> Settings:
        return level(node.memory_bytes // 2)


@mutant("the job's interface is that of a machine", part="basic", check="job_scope_is_one_value")
def _(on: Wrong) -> None:
    @on.settings
    def settings(job: Any, node: Any, rank: int | None) -> Settings:
        return level(node.main_interface and node.main_interface.name)


@mutant(
    "the job's variable is set on the first machine alone",
    part="basic",
    check="job_scope_is_one_value",
)
def _(on: Wrong) -> None:
    @on.settings
    def settings(job: Any, node: Any, rank: int | None) -> Settings:
        return level(1) if node.rank == 0 else []


@mutant(
    "the node's value is another from the third rank on",
    part="basic",
    check="node_scope_is_one_value",
)
def _(on: Wrong) -> None:
    @on.settings
    def settings(job: Any, node: Any, rank: int | None) -> Settings:
        return level((rank or 0) // 2, Scope.NODE)


@mutant("the last rank lacks a variable of the job", part="basic", check="node_scope_is_one_value")
def _(on: Wrong) -> None:
    @on.settings
    def settings(job: Any, node: Any, rank: int | None) -> Settings:
        return [] if rank == 7 else level(1)


@mutant("a rule needs a version that is not known", part="basic", check="rules_hold_on_any_machine")
def _(on: Wrong) -> None:
    @on.settings
    def settings(job: Any, node: Any, rank: int | None) -> Settings:
        return level(node.libraries["torch"])


@mutant("a rule takes a version for numbers", part="basic", check="rules_hold_on_any_machine")
def _(on: Wrong) -> None:
    @on.settings
    def settings(job: Any, node: Any, rank: int | None) -> Settings:
        parts = [int(part) for part in node.libraries.get("torch", "0").split(".")]
        return level(int(parts >= [2, 14]))


@mutant("a rule takes the second interface", part="basic", check="rules_hold_on_any_machine")
def _(on: Wrong) -> None:
    @on.settings
    def settings(job: Any, node: Any, rank: int | None) -> Settings:
        return level(node.interfaces[1].name, Scope.NODE)


@mutant("two rules for one variable", part="basic", check="variables_are_set_once")
def _(on: Wrong) -> None:
    @on.settings
    def settings(job: Any, node: Any, rank: int | None) -> Settings:
        return [] if rank is None else level(1, Scope.RANK, "OMP_NUM_THREADS")


@mutant("a rule numbers the ranks", part="basic", check="variables_are_set_once")
def _(on: Wrong) -> None:
    @on.settings
    def settings(job: Any, node: Any, rank: int | None) -> Settings:
        return [] if rank is None else level(rank, Scope.RANK, "RANK")


# -- words ----------------------------------------------------------------------------------------


@mutant("a reason is a note to oneself", part="basic", check="reasons_are_words")
def _(on: Wrong) -> None:
    later = Support(Level.PARTIAL, "TODO")
    on.backend.capabilities = {**on.backend.capabilities, "float16": later}


@mutant("an engine is refused with a dash", part="basic", check="reasons_are_words")
def _(on: Wrong) -> None:
    on.backend.unsupported_engines = {"deepspeed": "-"}


@mutant(
    "a type is switched off, and nobody knows by what", part="basic", check="switches_are_named"
)
def _(on: Wrong) -> None:
    off = Support(Level.SWITCHED_OFF, "not today")
    on.backend.capabilities = {**on.backend.capabilities, "float16": off}


# -- what each backend says of itself -------------------------------------------------------------


@mutant("its name is in upper case", part="basic", check="announced")
def _(on: Wrong) -> None:
    on.spec(name="MUTANT")


@mutant("it was written for a later contract", part="basic", check="api_version")
def _(on: Wrong) -> None:
    on.spec(api_version=2)


@mutant("announcing it imports a library of tensors", part="basic", check="light_import")
def _(on: Wrong) -> None:
    @on.when_announced
    def announced() -> None:
        sys.modules["jax"] = types.ModuleType("jax")  # heavy by its name


@mutant("a device that is not open is none", part="basic", check="closed_device_says_so")
def _(on: Wrong) -> None:
    on.placement.device = None  # type: ignore[assignment]


@mutant("a check of doctor has no words", part="basic", check="diagnostics_are_sound")
def _(on: Wrong) -> None:
    @on.method("backend.diagnostics")
    def diagnostics(self: Backend, usual: Callable[[], Any]) -> Any:
        return [*usual(), Check(name="driver", outcome="pass", seen="")]
