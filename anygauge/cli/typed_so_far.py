"""What a word on the command line may become, for shells: files, names of plugins, and fields.

Imports what it needs when a shell asks: every command imports this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def run_files(incomplete: str) -> list[str]:
    """Files in YAML, and folders that may hold some."""
    typed = incomplete.removeprefix("./")
    found = []
    for one in sorted(Path(typed if typed.endswith("/") else Path(typed).parent).glob("*")):
        word = f"{one}/" if one.is_dir() else str(one)
        if word.startswith(typed) and word.endswith(("/", ".yaml", ".yml")):
            found.append(word)
    # A shell puts a space behind an only word: behind a folder, a file is to follow.
    return found + run_files(found[0]) if len(found) == 1 and found[0].endswith("/") else found


def backend_names(incomplete: str) -> list[tuple[str, str]]:
    """Backends, each with what it drives."""
    from anygauge.registry import AUTO, installed_plugins

    found = [(one.spec.name, one.spec.drives) for one in installed_plugins().backends]
    found.append((AUTO, "the best that is available"))
    return [one for one in sorted(found) if one[0].startswith(incomplete)]


def launcher_names(incomplete: str) -> list[str]:
    """Launchers."""
    from anygauge.registry import installed_plugins

    found = sorted(one.spec.name for one in installed_plugins().launchers)
    return [name for name in found if name.startswith(incomplete)]


def settings(incomplete: str) -> list[tuple[str, str]]:
    """Fields with an equals sign; behind it, the values of a field that has few."""
    return list(_settings(incomplete))


def _settings(incomplete: str) -> Iterator[tuple[str, str]]:
    from anygauge.config.describe import all_places, field_kind, meaning_in

    typed, equals, _ = incomplete.partition("=")
    for place in all_places()[0]:
        for name, field in place.section.model_fields.items():
            path, kind = ".".join((*place.path, name)), field_kind(field)
            meaning = meaning_in(place.section, name)
            if not equals and path.startswith(typed) and str(kind) != "section":
                yield f"{path}=", meaning
            elif equals and path == typed:
                members = [one for member in kind.members for one in member.choices]
                members += ["true", "false"] if bool in {m.annotation for m in kind.members} else []
                yield from ((f"{path}={one}", meaning) for one in members)
