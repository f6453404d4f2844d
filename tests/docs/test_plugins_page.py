"""The pages on plugins, line by line: from an empty folder to a backend that conforms."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import ROOT, Block, blocks
from tests.docs.test_examples import ROWS, RUN_FILE
from tests.helpers.tiny_tokenizer import make_tokenizer

PAGES = [ROOT / "docs" / name for name in ("plugins.md", "conformance-kit.md", "other-plugins.md")]
"""In the order in which they are read."""
ONE_PROCESS = "on_paper or on_device"
TIMEOUT_S = 1500


class Desk:
    """An empty folder, and an environment of its own in which anygauge is installed.

    Attributes:
        printed: by each command of the pages.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "anygauge-mine"
        self.folder.mkdir()
        self.printed: list[str] = []
        home = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
        self.python = home / "bin" / "python"
        # What is installed here is installed there, too; what is installed there stays there.
        site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
        here = sysconfig.get_path("purelib")
        (site / "parent.pth").write_text(f"import site; site.addsitedir({here!r})\n")

    def follow(self, block: Block, *, kit: str) -> None:
        """Do what a block says; `kit` selects tests of the conformance kit."""
        name = block.option("file")
        if name is not None:
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text)
        elif "shell" in block.words:
            for command in block.commands():
                chosen = ("-k", kit) if command[0] == "pytest" and kit else ()
                self.printed.append(self.run(*command, *chosen))

    def run(self, program: str, *arguments: str) -> str:
        """Run a command of the pages; it must succeed."""
        modules = {"pip": ("pip",), "anygauge": ("anygauge.cli",), "pytest": ("pytest",)}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        if arguments[0] == "env":
            del environment["OMP_NUM_THREADS"]  # the plugin's own is shown
        done = subprocess.run(
            # Without the folder it stands in: what is imported must have been installed.
            [str(self.python), "-P", "-m", *modules[program], *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        assert done.returncode == 0, (
            f"{program} {shlex.join(arguments)}\n{done.stdout}{done.stderr}"
        )
        return done.stdout


def steps() -> list[Block]:
    return [block for page in PAGES for block in blocks() if block.page == page]


def test_the_pages_are_true_but_for_ranks_and_the_loop(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    shutil.copy(ROWS, desk.folder / "rows.jsonl")
    make_tokenizer(desk.folder / "tokenizer")
    (desk.folder / "run.yaml").write_text(yaml.safe_dump(RUN_FILE))
    for block in steps():
        desk.follow(block, kit=ONE_PROCESS)
    report = json.loads(desk.run("anygauge", "backends", "--json"))
    (mine,) = [b for b in report["backends"] if b["name"] == "mine"]
    assert (mine["distribution"], mine["version"]) == ("anygauge-mine", "0.2.0")
    assert mine["available"] and not report["failed"]
    assert report["auto"]["chosen"] != "mine", "its priority is negative"
    shown = desk.run("anygauge", "env", "run.yaml", "--backend", "mine", "--format", "json")
    (setting,) = json.loads(shown)["0"]
    assert (setting["name"], setting["set_by"]) == ("OMP_NUM_THREADS", "backend")
    assert setting["source"] == "my own measurements"
    page = (desk.folder / "report.md").read_text()
    assert page.startswith("# `mine` is not fully tried against anygauge's backend contract")
    assert re.search(r"\d+ checks were not tried: .*the loop \(all \d+\)\.$", page, re.M)
    assert (desk.folder / "runs/tiny/adapter/adapter_model.safetensors").is_file()
    metrics = (desk.folder / "runs/tiny/metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, metrics) if "loss" in record]
    assert losses[-1] < losses[0] - 0.01, "the loss falls"
    (dry_run,) = (each for each in desk.printed if "softmax: mine, asked for by name" in each)
    assert "nice -n 10" in dry_run
    assert not list((desk.folder / "runs/tiny/logs").glob("supervisor.log")), "its agent did"


@pytest.mark.slow
def test_ranks_and_a_run_conform_too(tmp_path: Path) -> None:
    """Not every run of the loop: the kit's own tests try those on other backends."""
    desk = Desk(tmp_path)
    for block in steps():
        if block.option("file") and "kernel" in (block.option("file") or ""):
            break
        desk.follow(block, kit="on_ranks or resumed_run")
    report = (desk.folder / "report.md").read_text()
    (untried,) = re.findall(r"\d+ checks were not tried: (.*)$", report, re.M)
    assert "several ranks" not in untried and "the loop (8 of 9)" in untried
