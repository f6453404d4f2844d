"""Writes what an environment has of anygauge's dependencies, as pip's constraints: `pin.py > FILE`.

Run it with the interpreter of an environment that the tests have passed in; extras are arguments.
torch is left out, and what comes with its builds for GPUs: their versions are a release's own.
"""

from __future__ import annotations

import importlib.metadata as metadata
import re
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement

LEFT_OUT = re.compile(r"anygauge|torch|triton|nvidia-(?!ml-py).*|cuda-.*")


def needed(name: str, extras: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What a distribution needs here, directly, with the extras that it asks for."""
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement.name.lower().replace("_", "-"), tuple(sorted(requirement.extras))


def closure(name: str, extras: tuple[str, ...]) -> dict[str, str]:
    """All that a distribution needs here, name -> version."""
    found: dict[str, str] = {}
    waiting, seen = [(name, extras)], set()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        try:
            found[one[0]] = metadata.version(one[0])
        except metadata.PackageNotFoundError:
            continue  # not for this platform, or left out on purpose
        waiting.extend(needed(*one))
    return {key: found[key] for key in sorted(found) if not LEFT_OUT.fullmatch(key)}


if __name__ == "__main__":
    pins = closure("anygauge", tuple(sys.argv[1:]))
    for builder in ("hatchling", "wheel"):
        pins |= closure(builder, ())
    for package in sorted(pins):
        print(f"{package}=={pins[package]}")
