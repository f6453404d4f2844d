"""Writes what is generated on the pages of the documentation: ``make docs``.

A page has two marks for each such part, ``<!-- generated: NAME (make docs) -->`` and
``<!-- end -->``. `PARTS` has a function of that name, which gives what stands between them.
tests/docs/test_make_docs.py fails if a page is stale, or if a name stands on no page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MARKS = re.compile(
    r"(<!-- generated: ([\w ]+) \(make docs\) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL
)


def main() -> None:
    """Write every page anew, and name those that were stale."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (made := generated(text)) != text:
            path.write_text(made, encoding="utf-8")
            print(f"{path.relative_to(ROOT)} is written")


def pages() -> list[Path]:
    """The pages that have generated parts."""
    found = sorted(DOCS.rglob("*.md"))
    return [path for path in found if MARKS.search(path.read_text(encoding="utf-8"))]


def generated(text: str) -> str:
    """A page with today's parts; the text around them is written by hand.

    Raises:
        KeyError: a part's name is not among `PARTS`.
    """
    return MARKS.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n{part[4]}", text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    first, *lines = (f"| {' | '.join(cells)} |\n" for cells in [head, *rows])
    return "".join([first, f"|{'---|' * len(head)}\n", *lines])


# -- run-file.md ---------------------------------------------------------------------------------


def run_file_fields() -> str:
    """A heading and a table (field, type, default, meaning) for each section of a run file."""
    from anygauge.config.describe import meaning, sections
    from anygauge.config.plugin_sections import PluginSection
    from anygauge.interface.plugins import PROJECT
    from anygauge.registry import installed_plugins

    plugins = installed_plugins()
    provided = [*plugins.strategies, *plugins.optimizers]
    ours = {(p.kind, p.spec.name) for p in provided if p.distribution == PROJECT}
    places: dict[Any, list[str]] = {}
    named: dict[Any, dict[str, Any]] = {}
    for path, section in sections():
        if not issubclass(section, PluginSection):
            places.setdefault(section, []).append(".".join(path))
        elif (section.plugin_kind, section.plugin_name) in ours:
            base = section.__bases__[-1]
            places.setdefault(base, []).append(".".join(path))
            named.setdefault(base, {})[section.plugin_name] = section
    told = {meaning(field) for section in places for field in section.model_fields.values()}
    parts = []
    for section, paths in places.items():
        title = " and ".join(f"`{path}`" for path in paths if path) or "Top level"
        if section in named:
            parts.append(of_plugins(section, paths[0], named[section]))
        else:
            # The table above has this sentence already, of the field that holds the section.
            more = "" if about(section) in told else f"{about(section)}\n\n"
            parts.append(f"### {title}\n\n{more}{fields(section)}")
    return "\n".join(parts)


def of_plugins(base: Any, path: str, found: Mapping[str, Any]) -> str:
    """The fields of all plugins of a kind in one table: those that several have are one row."""
    names = [[f"`{name}`", escaped(about(section))] for name, section in found.items()]
    of: dict[tuple[str, ...], list[str]] = {}
    for name, section in found.items():
        for row in field_rows(section):
            if row[0] != "`name`":
                of.setdefault(tuple(row), []).append(f"`{name}`")
    names_of = {row: "all" if len(of[row]) == len(found) else ", ".join(of[row]) for row in of}
    rows = [[row[0], names_of[row], *row[1:]] for row in of]
    return (
        f"### `{path}`\n\n{about(base)} `name` decides the other fields.\n\n"
        f"{table(['`name`', 'what it is'], names)}\n"
        + table(["field", "of", "type", "default", "meaning"], rows)
    )


def about(section: Any) -> str:
    """What a section is, in one line."""
    return " ".join((section.__doc__ or "").split())


def fields(model: Any) -> str:
    """A table of the fields of a section, or of a plugin's options."""
    return table(["field", "type", "default", "meaning"], field_rows(model))


def field_rows(model: Any) -> list[list[str]]:
    """A row of that table for each field."""
    from anygauge.config.describe import field_kind, meaning

    return [
        [f"`{name}`", escaped(str(field_kind(field))), default(field), escaped(meaning(field))]
        for name, field in model.model_fields.items()
    ]


def escaped(text: str) -> str:
    """Text with the characters escaped that Markdown would take for markup or a cell's end."""
    return re.sub(r"([<|*\[\]])", r"\\\1", text)


def default(field: Any) -> str:
    """A field's default, as a cell."""
    from anygauge.config.describe import default_text
    from anygauge.util.section import Section

    text = default_text(field)
    if field.is_required() or isinstance(field.get_default(call_default_factory=True), Section):
        return text
    return f"`{text}`".replace("|", "&#124;")


# -- environment.md, gaudi.md, stacks.md ---------------------------------------------------------


def environment_rules() -> str:
    """Of each backend of this distribution: its networks and its rules."""
    from anygauge.registry import Registry

    registry = Registry.load()
    names = sorted(p.spec.name for p in registry.backends if p.distribution == "anygauge")
    parts = []
    for backend in map(registry.create_backend, names):
        networks = [[f"`{f.name}`", f.what, "yes" if f.detect else "no"] for f in backend.fabrics]
        alike: dict[tuple[str, ...], list[str]] = {}
        for rule in backend.environment_rules:
            told = (rule.value, rule.scope.value, rule.reason)
            alike.setdefault(told, []).append(f"`{rule.name}`")
        parts += [f"## `{backend.name}`\n"]
        if networks:
            parts += [table(["network", "what", "detected by `auto`"], networks)]
        rules = [[", ".join(variables), *told] for told, variables in alike.items()]
        parts += [table(["variable", "value", "scope", "why"], rules)]
    return "\n".join(parts)


def gaudi_releases() -> str:
    """Gaudi's releases, and what goes with each."""
    from anygauge_hpu.backend import RELEASES

    rows = []
    for release in RELEASES:
        trainer, extra = release.goes_with["optimum-habana"], f"none: {release.note}"
        if release.built:
            newest = release.versions["transformers"] >= "5"
            extra = "`hpu`" if newest else "`hpu-lazy`"
            trainer += "" if "optimum-habana" in release.versions else ", not in our image"
        torch, engine = release.versions["torch"], release.versions["deepspeed"]
        rows.append([release.name, torch, engine, extra, trainer])
    return table(["release", "torch", "Intel's DeepSpeed", "extra", "optimum-habana"], rows)


def gaudi_options() -> str:
    """The fields of `backend_options`."""
    from anygauge_hpu.backend import HpuOptions

    return fields(HpuOptions)


def oldest_drivers() -> str:
    """NVIDIA's oldest driver for each version of CUDA."""
    from anygauge_cuda.diagnostics import OLDEST_DRIVER

    return table(["CUDA", "oldest driver"], [[str(c), str(d)] for c, d in OLDEST_DRIVER.items()])


# -- hardware.md ---------------------------------------------------------------------------------


def hardware() -> Any:
    """The descriptions of this distribution and of examples/hardware."""
    from anygauge.planning.machines import Hardware
    from anygauge.registry import BLOCK_VARIABLE, Registry

    others = {p.distribution for p in Registry.load().plugins} - {"anygauge"}
    own = Registry.load({BLOCK_VARIABLE: ",".join(others)})
    return Hardware.load(own, sorted((ROOT / "examples/hardware").glob("*.toml")))


def cards() -> str:
    """What each card can do."""
    columns: Mapping[str, Callable[[Any], str]] = {
        "card": lambda card: f"`{card.name}`",
        "backend": lambda card: f"`{card.backend}`" if card.backend else "none",
        "memory, GiB": lambda card: (
            "this machine" if "memory" in card.to_measure else amount(card.memory, 2**30, 2)
        ),
        "bfloat16 or float16, TFLOPS": lambda card: amount(
            card.flops.get("bfloat16", card.flops.get("float16")), 1e12, 1
        ),
        "measured": lambda card: amount(card.matmul.get("bfloat16"), 1e12, 1),
        "bandwidth, GB/s": lambda card: amount(card.bandwidth, 1e9),
        "link, GB/s": lambda card: amount(card.link, 1e9, 1),
        "host link, GB/s": lambda card: amount(card.host_link, 1e9, 1),
    }
    rows = [[cell(card) for cell in columns.values()] for card in hardware().cards]
    return table(list(columns), rows)


def machines() -> str:
    """What each machine has."""
    columns: Mapping[str, Callable[[Any], str]] = {
        "machine": lambda machine: f"`{machine.name}`",
        "cards": lambda machine: f"{machine.cards} x `{machine.card}`",
        "network, GB/s": lambda machine: amount(machine.network, 1e9, 1),
        "host memory, GiB": lambda machine: amount(machine.host_memory, 2**30),
        "cores": lambda machine: amount(machine.cores, 1),
        "disk, GB": lambda machine: amount(machine.disk, 1e9),
    }
    known = hardware()
    rows = [
        [cell(known.machine(each.name)) for cell in columns.values()] for each in known.machines
    ]
    return table(list(columns), rows)


def amount(value: float | None, unit: float, digits: int = 0) -> str:
    """A figure in a unit; a question mark if nobody was found to have published it."""
    return "?" if value is None else f"{value / unit:,.{digits}f}"


# -- models.md, conformance/ ---------------------------------------------------------------------


UNEXPLAINED = "nobody has explained this"


def architectures() -> str:
    """What ``make zoo`` found, of each set of versions; those with more models come first.

    Model types with equal results share a row: those that pass everything first, then the most.
    """
    found = json.loads((ROOT / "tests/models/zoo.json").read_text(encoding="utf-8"))
    parts = []
    for stack in sorted(found["stacks"].values(), key=lambda stack: -len(stack["rows"])):
        failed = [row.get("failed", {}) for row in stack["rows"].values()]
        named = ", ".join(f"{name} {number}" for name, number in stack["versions"].items())
        built = sum("made" not in tests for tests in failed)
        passed = f"{built} can be built, and {failed.count({})} pass all tests"
        alike: dict[tuple[str, ...], list[str]] = {}
        for name, row in stack["rows"].items():
            tests = row.get("failed", {})
            result = "; ".join(found["parts"][test] for test in tests) or "yes"
            less = ", without recomputation" if {"recomputes", "loss"} <= {*row} else ""
            lines = [f"{name}: {message}" for message in tests.values()]
            why = "; ".join(explained(line, found["limits"]) for line in lines)
            used = (row.get("attention", ""), row.get("loss", ""))
            alike.setdefault((result + less, *used, why), []).append(f"`{name}`")
        rows = sorted(alike.items(), key=lambda row: (row[0][3] > "", -len(row[1])))
        parts.append(
            f"## With {named}\n\nOf {len(failed)} architectures, {passed}.\n\n"
            + table(
                ["model types", "result", "attention", "loss", "why"],
                [[", ".join(names), *cells] for cells, names in rows],
            )
        )
    return "\n".join(parts)


def explained(line: str, limits: Mapping[str, str]) -> str:
    """Whose limit a failure is; the message itself if nobody has explained it."""
    texts = (text for form, text in limits.items() if re.search(form, line))
    return next(texts, f"{UNEXPLAINED}: {line}")


REPORTS = [DOCS / "conformance" / f"{device}.json" for device in ("cpu", "sim", "lazy")]
"""Of the repository's own devices, each as the kit wrote it."""


def devices() -> str:
    """What the conformance kit found of the repository's devices."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in REPORTS]
    return "\n".join(compared(reports))


def compared(reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Tables of several reports, a column each; checks with equal results are counted."""
    from anygauge.testing.plugin import RESULTS

    names = [f"`{report['backend']}`" for report in reports]
    verdicts = ["conforms" if report["conforms"] else "does NOT conform" for report in reports]
    conditions = dict.fromkeys(name for report in reports for name in report["conditions"])
    told = {name: [r["conditions"].get(name, "-") for r in reports] for name in conditions}
    equal = [f"{name} {values[0]}" for name, values in told.items() if len({*values}) == 1]
    differ = [[name, *values] for name, values in told.items() if len({*values}) > 1]
    yield f"Equal for all: {', '.join(equal)}.\n"
    yield table(["", *names], [["verdict", *verdicts], *differ])
    checks = [{line["name"]: line for line in report["checks"]} for report in reports]
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, line in checks[0].items():
        results = [found[name]["result"] for found in checks]
        marks = ("-" if each == "skipped" else RESULTS[each][0] for each in results)
        alike.setdefault((line["part"], *marks), []).append(line["title"].replace("|", "\\|"))
    rows = [
        [f"{part}: {titles[0] if len(titles) == 1 else f'{len(titles)} checks'}", *marks]
        for (part, *marks), titles in alike.items()
    ]
    yield table(["check", *names], rows)
    figures = dict.fromkeys(name for report in reports for name in report["figures"])
    rows = []
    for name in figures:
        told = [re.match(r"(\S+) from .*; (\S+) ", r["figures"].get(name, "")) for r in reports]
        allowed = next(found[2] for found in told if found)
        rows += [[name, allowed, *(found[1] if found else "-" for found in told)]]
    yield table(["largest distance from the host's", "allowed", *names], rows)


def defects() -> str:
    """A line for each check that finds wrong backends; those of real runs are not among them."""
    from anygauge.testing.process import PARTS as KIT
    from tests.testing import wrong

    found: dict[str, dict[str, list[str]]] = {part: {} for part in KIT}
    for mutant in wrong.table().values():
        if mutant.part in found:
            found[mutant.part].setdefault(mutant.check, []).append(mutant.name)
    parts = []
    for part, checks in found.items():
        alike: dict[str, list[str]] = {}
        for check, names in checks.items():
            # One table row for all of `basic_leaves_output`, `basic_leaves_files` and so on.
            text = re.sub(
                r"^leaves \w+ (\(.*\))$", r"leaves what the name says \1", "; ".join(names)
            )
            alike.setdefault(text, []).append(f"`{check}`")
        rows = [[", ".join(names), text] for text, names in alike.items()]
        parts.append(f"## {part}\n\n" + table(["check that fails", "defects"], rows))
    return "\n".join(parts)


PARTS: Mapping[str, Callable[[], str]] = {
    "run file fields": run_file_fields,
    "environment rules": environment_rules,
    "gaudi releases": gaudi_releases,
    "gaudi options": gaudi_options,
    "oldest drivers": oldest_drivers,
    "cards": cards,
    "machines": machines,
    "architectures": architectures,
    "devices": devices,
    "defects": defects,
}

if __name__ == "__main__":
    main()
