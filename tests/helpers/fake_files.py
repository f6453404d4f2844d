"""Files under a temporary root: fake /proc and /sys, and distributions as if installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Write each text at its path below `root`; a text of ``"-> path"`` makes a symbolic link."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            target = path.parent / text.removeprefix("-> ")
            target.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)
        else:
            path.write_text(text)
    return root


def add_distribution(site: Path, name: str, version: str, entry_points: str = "") -> None:
    """Have a folder of packages look as if a distribution had been installed there."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    write_tree(site, {f"{info}/METADATA": metadata, f"{info}/entry_points.txt": entry_points})
