"""What a word on the command line may become, for shells: files, names of plugins, and fields.

Imports what it needs when a shell asks: every command imports this module.
"""

from __future__ import annotations

from pathlib import Path


def run_files(incomplete: str) -> list[str]:
    """Return files in YAML, and folders that may hold some."""
    typed = incomplete.removeprefix("./")
    found = []
    for one in sorted(Path(typed if typed.endswith("/") else Path(typed).parent).glob("*")):
        word = f"{one}/" if one.is_dir() else str(one)
        if word.startswith(typed) and word.endswith(("/", ".yaml", ".yml")):
            found.append(word)
    # A shell puts a space behind an only word: behind a folder, a file is to follow.
    return found + run_files(found[0]) if len(found) == 1 and found[0].endswith("/") else found


def backend_names(incomplete: str) -> list[str]:
    """Return backends, and what chooses among them."""
    from anygauge.registry import AUTO, installed_plugins

    names = sorted([AUTO, *(one.spec.name for one in installed_plugins().backends)])
    return [name for name in names if name.startswith(incomplete)]


def launcher_names(incomplete: str) -> list[str]:
    """Return launchers."""
    from anygauge.registry import installed_plugins

    names = sorted(one.spec.name for one in installed_plugins().launchers)
    return [name for name in names if name.startswith(incomplete)]


def field_settings(incomplete: str) -> list[tuple[str, str]]:
    """Return fields with an equals sign, then values of a field that has few; all explained."""
    from anygauge.config.describe import all_places, field_kind, meaning_in

    typed, equals, _ = incomplete.partition("=")
    found = []
    for place in all_places()[0]:
        for name, field in place.section.model_fields.items():
            path, kind = ".".join((*place.path, name)), field_kind(field)
            words = [f"{path}="] if path.startswith(typed) and str(kind) != "section" else []
            if equals:
                values = [word for member in kind.members for word in member.choices]
                values += ["true", "false"] if "true or false" in str(kind) else []
                words = [f"{path}={value}" for value in values if path == typed]
            found += [(word, meaning_in(place.section, name)) for word in words]
    return found
