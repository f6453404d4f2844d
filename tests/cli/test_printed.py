"""What commands print: help of one style, and nothing that drives a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import typer
from rich.progress import Progress
from rich.table import Table

import anygauge.cli
from anygauge.cli import EscapedStream
from anygauge.launch.view import View, explain
from anygauge.util.console import Console
from anygauge.util.text import escape
from tests.helpers.runs import called

HOSTILE = "a\x1b[2J\x07\r\x9b1A\x7f\udcffb"
SHOWN = r"a\x1b[2J\x07\r\x9b1A\x7f\udcffb"


def test_newlines_and_tabs_and_other_letters_stay() -> None:
    assert escape("a\n\tä漢\u202f🙂") == "a\n\tä漢\u202f🙂"
    assert escape(HOSTILE) == SHOWN


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_printed_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Terminal()
    monkeypatch.setattr("sys.stdout", EscapedStream(written))
    print(HOSTILE, end="\n")
    typer.echo(HOSTILE)
    Console(force_terminal=True, width=80).print("styled", style="bold")
    assert written.getvalue() == f"{SHOWN}\n{SHOWN}\n\x1b[1mstyled\x1b[0m\n"


def test_a_bar_is_drawn_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Terminal()
    monkeypatch.setattr("sys.stdout", EscapedStream(written))
    console = Console(force_terminal=True, width=80, highlight=False)
    with Progress(console=console, transient=True) as bar:
        bar.add_task(HOSTILE, total=3)
        console.print(HOSTILE, markup=False)
    text = written.getvalue()
    assert "\x1b[?25l" in text and "\x1b[2K" in text and r"\x1b[2K" not in text
    assert SHOWN in text and "\x1b[2J" not in text


def test_what_is_printed_by_rich() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, highlight=False, width=200)
    console.print(HOSTILE, style="bold", markup=False)
    View(console, quiet=False).show({"event": "message", "text": HOSTILE})
    explain(console, HOSTILE)
    explain(console, "[bold]:bug:")
    table = Table()
    table.add_column(HOSTILE)
    console.print(table)
    assert written.getvalue().count(SHOWN) == 3
    assert "[bold]:bug:" in written.getvalue(), "a message is no markup"
    styles = r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[1A|\x1b\[2K|\r"
    assert escape(text := re.sub(styles, "", written.getvalue())) == text


PROSE = "  one two three-four, five [six] /a/path/of/some/length seven"
WRAPPED = "  one two\n    three-four,\n    five [six]\n    /a/path/of/some/length\n    seven"


@pytest.mark.parametrize(
    ("terminal", "whole", "shown"),
    [
        (True, None, WRAPPED),
        (True, True, PROSE),  # a command, to be copied
        *((False, whole, PROSE) for whole in (None, False, True)),
    ],
)
def test_prose_wraps_at_words_on_a_terminal_and_is_whole_in_a_file(
    terminal: bool, whole: bool | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    written = io.StringIO()
    lines = Console(file=written, force_terminal=terminal, width=15, color_system=None)
    lines.print(PROSE, soft_wrap=whole)
    assert written.getvalue() == f"{shown}\n"


def test_a_command(tmp_path: Path) -> None:
    done = called(["data", tmp_path / "none\x1b[2J.yaml"])
    assert r"none\x1b[2J.yaml" in done.stderr and "\x1b" not in done.stderr + done.stdout


def test_all_commands_print_so() -> None:
    folder = Path(anygauge.cli.__file__).parent
    own = [
        p.name for p in folder.glob("*.py") if "from rich.console import Console" in p.read_text()
    ]
    assert own == []


@pytest.mark.parametrize("name", anygauge.cli.COMMANDS)
def test_help_has_one_style(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert anygauge.cli.run([name, "--help"]) == 0
    usage, *lines = capsys.readouterr().out.splitlines()
    words = r"[A-Za-z._]+|\[[A-Za-z.]+\]"
    assert re.fullmatch(
        rf"Usage: anygauge {name}( ({words}))* \[OPTIONS\]( \[-- COMMAND \.{{3}}\])?", usage
    )
    assert "  -h, --help" in "\n".join(lines) and not any("bool" in line for line in lines)
    assert max(map(len, [*lines, *anygauge.cli.help_text().splitlines()])) <= 80
