"""The checks that `doctor` runs for Gaudi: cards, driver, versions, mode, visible modules."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from anygauge.interface import (
    Check,
    ImageRelease,
    Outcome,
    file_texts,
    installed_version,
    major_minor,
    read_releases,
)
from anygauge_hpu.environment import LAZY_VARIABLE, MODULES_VARIABLE
from anygauge_hpu.probe import PATTERNS, PLUGIN, driver_version, is_fork, modules_here, probe

RELEASES = read_releases(Path(__file__).with_name("device.toml"))
"""Releases of Gaudi's software, oldest first, named as Intel does: ``1.23.0``."""

_NO_CARD = (
    "in a container, hand the cards in (--runtime=habana -e HABANA_VISIBLE_DEVICES=all); in a "
    "cluster, ask for habana.ai/gaudi"
)
_NO_DRIVER = "install and load Intel's driver on the host (not in the container)"
_NO_SOFTWARE = "use one of Intel's images: see the table of releases in docs/gaudi.md"


def checks(
    root: Path = Path("/"),
    *,
    environ: Mapping[str, str] | None = None,
    versions: Mapping[str, str] | None = None,
) -> Sequence[Check]:
    """Look at files, versions and variables; nothing of Gaudi's software is imported.

    Args:
        versions: installed distributions; None looks for them.
    """
    environ = os.environ if environ is None else environ
    if versions is None:
        names = (PLUGIN, "torch", "deepspeed", "transformers", "optimum-habana")
        versions = {name: v for name in names if (v := installed_version(name))}
    found = probe(root, versions.get(PLUGIN))
    return [
        Check.of("cards", found.has_hardware, found.devices.detail, _NO_CARD),
        Check.of("driver", bool(found.driver), found.driver.detail, _NO_DRIVER),
        Check.of("software", PLUGIN in versions, _stated_version(PLUGIN, versions), _NO_SOFTWARE),
        *(
            _versions(root, versions)
            if PLUGIN in versions
            else (_skip("release"), _skip("driver release"))
        ),
        _deepspeed(versions),
        _mode(environ, versions),
        _modules(environ, found.device_count, modules_here(file_texts(PATTERNS, root))),
        _kernels_path(environ, installed=PLUGIN in versions),
    ]


def release_of(version: str | None) -> ImageRelease | None:
    """The known release that a plugin's version belongs to: the one of its three numbers, else the
    newest of its first two; None for an unknown one.
    """
    pair = major_minor(version)
    alike = [r for r in RELEASES if pair and major_minor(r.name) == pair]
    return next((r for r in alike if is_of(version, r)), alike[-1] if alike else None)


def is_of(version: str | None, release: ImageRelease) -> bool:
    """Whether a plugin's version, such as ``1.24.1.482``, has all numbers of a release."""
    return f"{version}.".startswith(f"{release.name}.")


def _versions(root: Path, versions: Mapping[str, str]) -> list[Check]:
    release, torch = release_of(versions[PLUGIN]), versions.get("torch", "")
    seen = f"{PLUGIN} {versions[PLUGIN]}, torch {torch or 'not installed'}"
    fits = release is not None and major_minor(torch) == major_minor(release.versions["torch"])
    # A patch that is not known here may come with another torch, as 1.24.1 did.
    if release is None or not (fits or is_of(versions[PLUGIN], release)):
        known = f"{RELEASES[0].name} to {RELEASES[-1].name}"
        of_torch = Check.warn("release", seen, f"releases known here: {known}; compare Intel's")
    else:
        of_torch = Check.of(
            "release",
            fits,
            f"{seen}; {release.name} goes with torch {release.versions['torch']} "
            f"({release.source})",
            f"use {release.base}, or an image made of it (anygauge image --backend hpu)",
        )
    name, driver = "driver release", driver_version(root)
    if driver is None:
        return [of_torch, Check.skip(name, "the driver is not loaded")]
    same = major_minor(driver) == major_minor(versions[PLUGIN])
    pair = f"driver {driver}, {PLUGIN} {versions[PLUGIN]}"
    remedy = "use driver and software of one release"
    return [of_torch, Check.of(name, same, pair, remedy, Outcome.WARN)]


def _deepspeed(versions: Mapping[str, str]) -> Check:
    """Intel's builds are of the device's release, and say so behind DeepSpeed's own version, as
    ``0.16.1+hpu.synapse.v1.21.0``."""
    name, version = "deepspeed", versions.get("deepspeed")
    release = release_of(versions.get(PLUGIN))
    install = (
        f"pip install git+https://github.com/HabanaAI/DeepSpeed.git@{release.versions[name]}"
        if release is not None
        else "install Intel's build of DeepSpeed (HabanaAI/DeepSpeed) of the same release"
    )
    if PLUGIN not in versions:
        return _skip(name)
    if version is None:
        return Check.warn(name, "deepspeed is not installed", f"strategy zero needs it: {install}")
    built = re.search(r"\+hpu\.synapse\.v(\d+\.\d+\.\d+)", version)
    if built is None:
        return Check.warn(
            name,
            f"deepspeed {version} is not Intel's build, whose version ends in +hpu.synapse.v...",
            f"{install}; with another one, lazy mode needs strategy.reentrant: true",
        )
    wanted = None if release is None else release.versions[name]
    seen = f"deepspeed {version}, Intel's build of release {built[1]}"
    if wanted is None or major_minor(built[1]) == major_minor(wanted):
        return Check(name, Outcome.PASS, seen)
    return Check.warn(name, f"{seen}; {PLUGIN} {versions[PLUGIN]} goes with {wanted}", install)


def _mode(environ: Mapping[str, str], versions: Mapping[str, str]) -> Check:
    value, torch = environ.get(LAZY_VARIABLE), versions.get("torch", "")
    if value is None:
        return Check("mode", Outcome.PASS, f"{LAZY_VARIABLE} is unset: anygauge sets it")
    seen = f"{LAZY_VARIABLE}={value}, torch {torch or 'not installed'}"
    if value != "0" and torch and not is_fork(torch):
        seen += "; lazy mode needs Intel's build (+git...)"
        return Check("mode", Outcome.FAIL, seen, "unset the variable, or use Intel's image")
    return Check.warn("mode", seen, "unset it: a run file chooses with backend_options.mode")


def _modules(environ: Mapping[str, str], cards: int | None, here: Sequence[str] | None) -> Check:
    text = environ.get(MODULES_VARIABLE)
    name = "visible modules"
    if text is None:
        stated = f" ({','.join(here)})" if here else ""
        return Check(name, Outcome.PASS, f"{MODULES_VARIABLE} is unset: all{stated}")
    seen = f"{MODULES_VARIABLE}={text}"
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        remedy = "write module numbers with commas between them, such as 0,1,2,3"
        return Check(name, Outcome.FAIL, seen, remedy)
    numbers = [int(part) for part in text.split(",")]
    if len(set(numbers)) < len(numbers):
        return Check(name, Outcome.FAIL, seen, "name each module only once")
    absent = [number for number in numbers if here is not None and str(number) not in here]
    if absent:
        seen += f", but the modules here are {','.join(here or ())}"
        remedy = f"name modules that are here, or unset {MODULES_VARIABLE}"
        return Check(name, Outcome.FAIL, seen, remedy)
    more = cards is not None and len(numbers) > cards
    seen += f", but {cards} cards are here" if more else ""
    return Check.of(name, not more, seen, "name as many as there are", Outcome.WARN)


def _kernels_path(environ: Mapping[str, str], *, installed: bool) -> Check:
    """Multi-node runs that lose this variable end in "Graph compile failed synStatus 26"."""
    path = environ.get("GC_KERNEL_PATH")
    if path:
        missing = [part for part in path.split(":") if part and not Path(part).exists()]
        if missing:
            remedy = "unset it, or use the image that it was set for"
            seen = f"GC_KERNEL_PATH names {missing[0]}, which is not here"
            return Check("kernel library", Outcome.FAIL, seen, remedy)
        return Check("kernel library", Outcome.PASS, f"GC_KERNEL_PATH={path}")
    if not installed:
        return _skip("kernel library")
    return Check.warn(
        "kernel library",
        "GC_KERNEL_PATH is unset, though Intel's images set it",
        "start ranks through a shell or launcher that keeps the image's variables",
    )


def _stated_version(name: str, versions: Mapping[str, str]) -> str:
    return f"{name} {versions[name]}" if name in versions else f"{name} is not installed"


def _skip(name: str) -> Check:
    return Check.skip(name, "Gaudi's software is not installed")
