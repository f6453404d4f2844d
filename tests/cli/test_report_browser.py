"""The page of ``anygauge report`` in a real browser: light, dark, and as wide as a phone.

With ``ANYGAUGE_SCREENSHOTS=docs/images`` the pictures of docs/run-folder.md are made anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.helpers.browser import PROGRAM, Page, browser_page
from tests.helpers.runs import called, run_file, save_tiny, trained

pytestmark = pytest.mark.skipif(not PROGRAM, reason="no Chromium here: apt-get install chromium")

PHONE, DESKTOP = (390, 844), (1280, 1300)
LARGEST = 150_000
"""Bytes of a picture."""
LEAST_PX = 9
"""Height of a line of text in a chart that can be read."""
LEAST_CONTRAST = 4.5
"""Of text and what it stands on: WCAG 2.2, level AA."""

CONTRASTS = """
(() => {
  const light = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(each => {
      const part = each / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const under = element => {
    for (let each = element; each; each = each.parentElement) {
      const color = getComputedStyle(each).backgroundColor;
      if (color !== "rgba(0, 0, 0, 0)") return color;
    }
  };
  return [...document.querySelectorAll("h1, h2, p, th, td, summary, figcaption, svg text")].map(
    each => {
      const style = getComputedStyle(each);
      const ink = each.tagName === "text" ? style.fill : style.color;
      const [dark, bright] = [light(ink), light(under(each))].sort((a, b) => a - b);
      return (bright + 0.05) / (dark + 0.05);
    });
})()
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs of one run file: one process, and two; with a sample."""
    folder = tmp_path_factory.mktemp("report")
    base = save_tiny(folder / "base")
    train = {"steps": 24, "eval_every": 6, "eval_at_start": True, "system_every_s": 0.5}
    train["optimizer"] = {"lr": 0.02}
    train["schedule"] = {"warmup_steps": 4}
    runs = []
    for name, devices in (("one-process", 1), ("two-processes", 2)):
        path = run_file(
            folder,
            name=name,
            model={"name": str(base)},
            train=train,
            data={"eval_fraction": 0.2},
            launch={"devices": devices},
            checkpoint={"every": 12},
        )
        runs.append(trained(path, "--plan").folder)
    page = folder / "report.html"
    options = ["--output", page, "--prompt", "Which gauge?", "--max-new-tokens", "8"]
    done = called(["report", *runs, *options, "--backend", "cpu"])
    assert done.returncode == 0, done.stderr
    return page


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browser_page(tmp_path / "profile") as found:
        yield found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_can_be_read(
    size: tuple[int, int], dark: bool, report: Path, page: Page, tmp_path: Path
) -> None:
    page.open(report, width=size[0], height=size[1], dark=dark)
    assert page.messages == []
    assert page.requests == [report.resolve().as_uri()]
    assert page.value("document.documentElement.scrollWidth") <= size[0]
    charts = page.value("[...document.querySelectorAll('svg')].map(e => e.clientWidth)")
    assert len(charts) == 7, "all but MFU, for which the CPU has no peak"
    assert min(charts) >= 300
    heights = "e => e.getBoundingClientRect().height"
    texts = page.value(f"[...document.querySelectorAll('svg text')].map({heights})")
    assert len(texts) > 50
    assert min(texts) >= LEAST_PX
    contrasts = page.value(CONTRASTS)
    assert len(contrasts) > 100
    assert min(contrasts) >= LEAST_CONTRAST
    background = page.value("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark

    name = f"report-{'phone-' if size is PHONE else ''}{'dark' if dark else 'light'}.png"
    folder = Path(os.environ.get("ANYGAUGE_SCREENSHOTS") or tmp_path)
    page.value("document.querySelector('.charts').previousElementSibling.scrollIntoView()")
    page.screenshot(folder / name)
    assert (folder / name).read_bytes()[:4] == b"\x89PNG"
    assert 10_000 < (folder / name).stat().st_size <= LARGEST


def test_numbers_open_below_a_chart(report: Path, page: Page) -> None:
    page.open(report, width=PHONE[0], height=PHONE[1])
    page.value("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    assert page.value("document.documentElement.scrollWidth") <= PHONE[0]
    rows = page.value("document.querySelectorAll('details')[0].querySelectorAll('tbody tr').length")
    assert rows > 10
    assert page.messages == []


def test_the_pictures_of_the_pages_are_small() -> None:
    found = sorted((ROOT / "docs/images").glob("report-*.png"))
    assert [each.name for each in found] == [
        *("report-dark.png", "report-light.png", "report-phone-light.png"),
    ]
    assert all(each.stat().st_size <= LARGEST for each in found)
