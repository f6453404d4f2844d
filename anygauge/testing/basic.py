"""Checks that need no device: what a backend says of itself before anything is opened.

They run in a process of their own, since one of them is that torch is not imported there.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anygauge.interface import (
    API_VERSION,
    CAPABILITIES,
    AnygaugeError,
    Backend,
    BackendSpec,
    Finding,
    Job,
    LaunchProfile,
    LaunchSettings,
    NetworkInterface,
    Node,
    Probe,
    Scope,
    Setting,
    Support,
)
from anygauge.registry import Registry
from anygauge.testing.check import check, sharding
from anygauge.testing.surroundings import Course

HEAVY = ("torch", "transformers", "tensorflow", "jax", "numpy.distutils")
PROBE_S = 2.0
"""Seconds: commands that only list backends wait for every probe."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Paper:
    """A backend as it stands on paper: nothing is open.

    Attributes:
        name: as users write it.
        options: the run file's ``backend_options``.
        course: of the process; it has a note after each check.
    """

    name: str
    options: Mapping[str, Any]
    registry: Registry
    course: Course

    @property
    def spec(self) -> BackendSpec:
        """What the plugin announced."""
        return self.registry.find_backend(self.name).spec

    def backend(self) -> Backend:
        """A new one, not opened."""
        return self.registry.create_backend(self.name, self.options)

    def jobs(self) -> list[Job]:
        """Of one machine and of two, with this backend and its options."""
        return [
            dataclasses.replace(
                job,
                backend=self.name,
                backend_options=self.options,
                strategy=sharding().name,
            )
            for job in (JOB, TWO_NODES)
        ]


JOB = Job(
    name="conformance",
    run_directory="/nowhere/conformance",
    run_file="/nowhere/conformance/run.yaml",
    backend="any",
    launch=LaunchSettings(devices=2),
    rendezvous="file:///nowhere/rendezvous",
)
TWO_NODES = dataclasses.replace(
    JOB, launch=LaunchSettings(nodes=2, devices=2), rendezvous="tcp://node0:29400"
)
NODE = Node(
    hostname="node0",
    cores=tuple(range(8)),
    physical_cores=4,
    memory_bytes=2**36,
    interfaces=(
        NetworkInterface(name="lo", up=True, physical=False, loopback=True),
        NetworkInterface(name="eth0", up=True, physical=True),
    ),
    libraries={"torch": "2.13.0"},
)


def _state() -> tuple[dict[str, str], str, float]:
    return dict(os.environ), str(Path.cwd()), os.umask(os.umask(0o22))


@check(
    "the plugin announces exactly one backend of this name",
    part="basic",
    means="Users cannot name the backend, or get another one; "
    "the entry point announces none, two, or another name.",
)
def announced(paper: Paper) -> None:
    spec = paper.spec
    assert spec.name == paper.name
    assert spec.name.replace("-", "").replace("_", "").isalnum(), (
        f"{spec.name!r} is not a plain name"
    )
    assert spec.name == spec.name.lower(), f"{spec.name!r} is not in lower case"


@check(
    "it was written for this version of the contract",
    part="basic",
    means="anygauge refuses the plugin; it was written for another "
    "version of the contract, or takes its number from anygauge.",
)
def api_version(paper: Paper) -> None:
    assert paper.spec.api_version == API_VERSION, (
        f"written for version {paper.spec.api_version} of the contract, this is {API_VERSION}"
    )


@check(
    "announcing it imports neither torch nor anything else heavy",
    part="basic",
    means="Every command takes seconds, also where the device is "
    "not used; the announcing module imports the backend's own.",
)
def light_import(paper: Paper) -> None:
    _ = paper.spec
    assert not _heavy(), f"importing the plugin imported {', '.join(_heavy())}"


@check(
    "the spec can be pickled",
    part="basic",
    means="No process can be told which backend it has; "
    "a probe that is a lambda or a local function.",
)
def spec_pickles(paper: Paper) -> None:
    assert pickle.loads(pickle.dumps(paper.spec)) == paper.spec


@check(
    "the probe is cheap, imports nothing heavy and changes nothing",
    part="basic",
    means="Commands that only list backends are slow, or change what "
    "they run in; a driver's library that the probe loads.",
)
def probe_is_pure(paper: Paper) -> None:
    before, loaded = _state(), set(_heavy())
    began = time.perf_counter()
    first = paper.spec.probe()
    took = time.perf_counter() - began
    second = paper.spec.probe()
    assert _state() == before, "the probe changed the process's environment, folder or umask"
    imported = sorted(set(_heavy()) - loaded)
    assert not imported, f"the probe imported {', '.join(imported)}"
    assert first == second, "two probes of the same machine differ"
    assert took < PROBE_S, f"the probe took {took:.1f} s"


@check(
    "the probe answers the three questions, each with words",
    part="basic",
    means="`anygauge backends` cannot say why a device is "
    "missing; a finding whose detail was left empty.",
)
def probe_answers(paper: Paper) -> None:
    probe = paper.spec.probe()
    assert isinstance(probe, Probe), f"the probe gave {type(probe).__name__}"
    for name in ("devices", "driver", "software"):
        finding = getattr(probe, name)
        assert isinstance(finding, Finding), f"{name}: {type(finding).__name__} is not a Finding"
        assert finding.detail.strip(), f"{name}: no words"
        assert "\n" not in finding.detail, f"{name}: more than a line"
    assert probe.device_count is None or probe.device_count >= 0


@check(
    "constructing it has no side effect and imports no torch",
    part="basic",
    means="A command takes the device, or seconds, only to ask "
    "a question; what belongs into open() is done in the constructor.",
)
def light_construction(paper: Paper) -> None:
    before, loaded = _state(), set(_heavy())
    backend = paper.backend()
    assert _state() == before, "constructing it changed the environment, folder or umask"
    imported = sorted(set(_heavy()) - loaded)
    assert not imported, f"constructing it imported {', '.join(imported)}"
    assert not backend.placement.is_open, "constructing it opened a device"


@check(
    "its name, device type, capabilities and refused engines are filled in",
    part="basic",
    means="Runs are refused, or let through, for no reason that "
    "a user can read; a capability or engine of another name.",
)
def described(paper: Paper) -> None:
    backend = paper.backend()
    assert backend.name == paper.name, f"the class says {backend.name!r}"
    assert isinstance(backend.device_type, str) and backend.device_type
    unknown = sorted(set(backend.capabilities) - set(CAPABILITIES))
    assert not unknown, (
        f"capabilities that nobody asks about: {', '.join(unknown)}; those that are asked about: "
        f"{', '.join(CAPABILITIES)}"
    )
    for name in CAPABILITIES:
        support = backend.support(name)
        assert isinstance(support, Support), f"support({name!r}) gave {type(support).__name__}"
    for engine, reason in backend.unsupported_engines.items():
        assert reason.strip(), f"unsupported_engines[{engine!r}] gives no reason"
    assert isinstance(backend.launch, LaunchProfile)


@check(
    "a device that is not open says so",
    part="basic",
    means="Code that asks too early computes on the wrong device; a default in place of an error.",
)
def closed_device_says_so(paper: Paper) -> None:
    try:
        _ = paper.backend().placement.device
    except RuntimeError as error:
        assert "open" in str(error), f"the error does not say what to do: {error}"
    else:
        raise AssertionError("placement.device gave a device before open()")


@check(
    "an unknown option is refused in words",
    part="basic",
    means="A misspelt option has no effect, and nobody notices; its class of options takes any "
    "field.",
)
def unknown_option(paper: Paper) -> None:
    name = "no_such_option_of_any_backend"
    try:
        paper.registry.create_backend(paper.name, {**paper.options, name: 1})
    except AnygaugeError as error:
        assert name in str(error), f"the error does not name the option: {error}"
    else:
        raise AssertionError(f"backend_options.{name} was taken without a word")


@check(
    "the environment is pure: the same for the same arguments, and nothing changed",
    part="basic",
    means="Ranks of one job get different environments; a rule "
    "that draws numbers, reads clocks or sets variables itself.",
)
def environment_is_pure(paper: Paper) -> None:
    before = _state()
    first = _environment(paper)
    second = _environment(paper)
    assert _state() == before, "asking for the environment changed it"
    assert first == second, "two calls with the same arguments differ"


@check(
    "every setting has a name, a value of text, a reason and a source",
    part="basic",
    means="Users see a variable without knowing why; a rule without "
    "reason or source, or a number in place of text.",
)
def settings_explain_themselves(paper: Paper) -> None:
    for setting in [each for part in _environment(paper) for each in part]:
        assert isinstance(setting, Setting), f"{type(setting).__name__} is not a Setting"
        assert setting.name and "=" not in setting.name, f"{setting.name!r} is not a variable"
        assert setting.value is None or isinstance(setting.value, str), (
            f"{setting.name}: a value of type {type(setting.value).__name__}; variables are text"
        )
        assert setting.reason.strip(), f"{setting.name}: no reason"
        assert setting.source.strip(), f"{setting.name}: no source"


@check(
    "what is set for the whole job does not depend on the rank",
    part="basic",
    means="Ranks get another one's value, or a job's value "
    "differs between ranks; a rule of the wrong scope.",
)
def scopes_hold(paper: Paper) -> None:
    backend = paper.backend()
    without = _named(backend.environment(TWO_NODES, NODE, None))
    for local_rank in (0, 1):
        with_rank = _named(backend.environment(TWO_NODES, NODE, local_rank))
        for name, setting in with_rank.items():
            if setting.scope is Scope.RANK:
                continue
            assert without.get(name) == setting, (
                f"{name} has scope {setting.scope.value}, but differs or is missing where no rank "
                "is asked for"
            )
    ranked = [name for name, s in without.items() if s.scope is Scope.RANK]
    assert not ranked, f"of scope rank, though no rank was asked for: {', '.join(ranked)}"


@check(
    "shapes are padded upwards, and never beyond the maximum",
    part="basic",
    means="Rows are cut, or a batch does not fit the model; rounding up past the maximum, or down.",
)
def shapes_are_sound(paper: Paper) -> None:
    shapes = paper.backend().graph.shapes
    for maximum in (64, 100, 1024):
        for longest in (1, 7, maximum // 2, maximum):
            padded = shapes.padded_length(longest, maximum)
            assert longest <= padded <= maximum, f"{longest} of {maximum} tokens became {padded}"


@check(
    "the checks of `doctor` have names and verdicts",
    part="basic",
    means="`anygauge doctor` reports a problem without saying what "
    "to do; a line whose words were left empty.",
)
def diagnostics_are_sound(paper: Paper) -> None:
    for line in paper.backend().diagnostics():
        assert line.name and line.seen, f"a check without words: {line}"
        assert line.outcome in ("pass", "skip", "warn", "fail"), (
            f"{line.name}: outcome {line.outcome!r}"
        )
        assert line.outcome == "pass" or line.remedy, f"{line.name}: no remedy"


@check(
    "the process had the backend's environment, and ended with status 0",
    part="basic",
    of_the_end=True,
    means="Commands end with a failure after they have done their work; what "
    "a library does at exit, or an environment that cannot be made.",
)
def ends_on_paper(trouble: str) -> None:
    assert not trouble, trouble


def _environment(paper: Paper) -> list[list[Setting]]:
    backend = paper.backend()
    return [
        list(backend.environment(job, NODE, rank)) for job in paper.jobs() for rank in (None, 0, 1)
    ]


def _named(settings: Any) -> dict[str, Setting]:
    return {setting.name: setting for setting in settings}


def _heavy() -> list[str]:
    return [name for name in HEAVY if name in sys.modules]
