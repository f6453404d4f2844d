"""Docker's bake of images, made of what backends/*/device.toml lists; bake itself reads no TOML.

python docker/buildx.py TARGET... [options of `docker buildx bake`], from the repository's root
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "build" / "releases.json"


def releases(backend: str) -> list[dict[str, Any]]:
    """A backend's rows as the bake file takes them."""
    file = ROOT / f"backends/anygauge_{backend}/device.toml"
    rows = tomllib.loads(file.read_text(encoding="utf-8")).get("release", [])
    return [{"built": True, **row} for row in rows]


def variables() -> dict[str, Any]:
    """The rows of all backends, each in the variable that the bake file has for them."""
    names = [p.parent.name.removeprefix("anygauge_") for p in ROOT.glob("backends/*/device.toml")]
    rows = {f"{name.upper()}_RELEASES": {"default": releases(name)} for name in sorted(names)}
    return {"variable": rows}


if __name__ == "__main__":
    TABLES.parent.mkdir(exist_ok=True)
    TABLES.write_text(json.dumps(variables(), indent=2), encoding="utf-8")
    files = ("-f", "docker/docker-bake.hcl", "-f", str(TABLES.relative_to(ROOT)))
    os.chdir(ROOT)
    os.execvp("docker", ["docker", "buildx", "bake", *files, *sys.argv[1:]])
