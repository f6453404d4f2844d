"""Cards and machines by name: whose description counts, what an unknown name is answered, and that
those that come along are there, sourced and sane."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge.interface import CARD_FIGURES, AnygaugeError, BackendSpec, Card, PluginError
from anygauge.planning.machines import MACHINE_FIGURES, Hardware
from anygauge.registry import BLOCK_VARIABLE, Provided, Registry

TABLES: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parent / "machines.yaml").read_text(encoding="utf-8")
)


class Here:
    """A machine with plugins and files of the user's own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, list[Path]()
        self.registry = Registry()
        self.plugin("one", TABLES["card"])

    def plugin(self, name: str, text: str, place: str = "", says: Callable[[], Any] = dict) -> None:
        """A backend of that name with a file of descriptions."""
        folder, place = self.folder / f"cards_of_{name}", place or f"cards_of_{name}:cards.toml"
        folder.mkdir()
        (folder / "cards.toml").write_text(text, encoding="utf-8")
        told: dict[str, Any] = {"hardware": place, "this_machine": says}
        spec = BackendSpec(name=name, factory="a:A", probe=print, api_version=1, **told)
        one = Provided(distribution=f"dist-{name}", version="1.0", spec=spec)
        self.registry.backends = (*self.registry.backends, one)

    def user(self, text: str | bytes) -> Path:
        """A file of the user's."""
        file = self.folder / f"{len(self.files)}.toml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        self.files.append(file)
        return file

    def load(self) -> Hardware:
        return Hardware.load(self.registry, self.files)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.syspath_prepend(str(tmp_path))
    return Here(tmp_path)


# -- names ----------------------------------------------------------------------------------------


def test_a_third_party_brings_its_card_whose_name_is_forgiving(mine: Here) -> None:
    hardware = mine.load()
    for name in ("mine-80", "MINE 80", "mine80", "maker mine 80gb"):
        card = hardware.card(name)
        told = (card.name, card.backend, card.origin)
        assert told == ("mine-80", "one", "cards.toml of dist-one 1.0")
        assert hardware.of_devices([name]) == card and hardware.of_devices([name, "other"]) is None
    assert [m.name for m in hardware.machines] == ["box.8"] and not hardware.failures


def test_a_card_and_a_number_is_a_machine_which_may_be_imagined(mine: Here) -> None:
    mine.user(TABLES["described"])
    hardware = mine.load()
    for name, (cards, *notes) in TABLES["numbers"].items():
        found = hardware.machine(name)
        said = (found.cards, found.imagined, hardware.note_on(found))
        assert said == (cards, bool(notes), " ".join(notes)), name
        assert found.link == (31e9 if name == "slow" else hardware.card(found.card).link), name
        assert found.network == (50e9 if name == "BOX.8" else None), name


@pytest.mark.parametrize("case", TABLES["wrong"], ids=str)
def test_what_is_wrong_with_a_name_or_a_users_file(mine: Here, case: dict[str, Any]) -> None:
    text = case.get("file", "")
    file = mine.user(text or "")
    if text is None:
        file.unlink()
    (kind,) = case.keys() & {"card", "machine"}
    with pytest.raises(AnygaugeError) as caught:
        getattr(mine.load(), kind)(case[kind])
    assert caught.value.exit_status == 2
    assert [words for words in case["says"] if words not in str(caught.value)] == []


# -- whose description counts ---------------------------------------------------------------------


def test_a_users_file_comes_over_a_plugin_figure_by_figure(mine: Here) -> None:
    file = mine.user(TABLES["over"])
    found = mine.load()
    card = found.card("mine-80")
    assert (card.bandwidth, card.link) == (2.5e12, 0)
    assert card.flops == {"bfloat16": 900e12, "float16": 700e12}
    assert (card.memory, card.sources["memory"]) == (int(79.1 * 2**30), "its tool")
    assert card.sources["bandwidth"] == "measured" and card.backend == "one"
    assert card.origin == f"cards.toml of dist-one 1.0 and {file}"
    assert found.card("mine") == found.card("maker mine 80gb") == card
    machine = found.machine("box.8")
    assert (machine.cores, machine.cards, machine.network) == (20, 8, 50e9)
    mine.user('[card.mine-80]\nmemory = "2 GB"\n')
    card = mine.load().card("mine")
    assert (card.memory, card.link) == (2 * 10**9, 0), "a later file counts, where it says anything"


def test_two_plugins_of_one_name_are_both_named(mine: Here) -> None:
    mine.plugin("two", '[card.other]\nnames = ["mine 80"]\nmemory = ["1 GB", "x"]\n')
    both = "by cards.toml of dist-one 1.0 and cards.toml of dist-two 1.0.*ANYGAUGE_BLOCK_PLUGINS"
    with pytest.raises(PluginError, match=both):
        mine.load().card("mine-80")
    assert mine.load().card("other").memory == 10**9
    mine.user('[card.mine-80]\nmemory = "3 GB"\n')
    assert mine.load().card("mine-80").memory == 3 * 10**9


@pytest.mark.parametrize("case", TABLES["broken"], ids=str)
def test_a_broken_file_harms_no_other(mine: Here, case: dict[str, str]) -> None:
    mine.plugin("bad", case.get("file", ""), case.get("place", ""))
    found = mine.load()
    assert found.card("mine-80").backend == "one"
    (failure,) = found.failures
    assert (failure.distribution, failure.version) == ("dist-bad", "1.0")
    assert case["says"] in failure.reason
    with pytest.raises(AnygaugeError, match=r"of dist-bad 1.0 may describe it and cannot be"):
        found.machine("another")


def test_a_figure_may_be_left_to_the_machine_at_hand(mine: Here) -> None:
    asked = '[card.{}]\nshared_memory = true\nmemory = ["this machine", "its kernel"]\n'
    mine.plugin("told", asked.format("here"), says=lambda: {"memory": 12345, "link": 1})
    mine.plugin("silent", asked.format("quiet"))
    mine.plugin("broken", asked.format("there"), says=lambda: 1 / 0)
    hardware = mine.load()
    (listed,) = [card for card in hardware.cards if card.name == "here"]
    assert (listed.memory, listed.to_measure, listed.shared_memory) == (None, ("memory",), True)
    card = hardware.card(hardware.machine("here:2").card)
    assert (card.memory, card.link, hardware.card("quiet").memory) == (12345, None, None)
    failed = "card 'there' of cards.toml of dist-broken 1.0: .*ZeroDivisionError"
    with pytest.raises(PluginError, match=failed):
        hardware.card("there")
    mine.user('[card.here]\nmemory = "1 GB"\n')
    assert mine.load().card("here").memory == 10**9


# -- those that come along ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped() -> Hardware:
    """Without those of test devices, whose cards have any size."""
    examples = sorted((Path(__file__).parents[2] / "examples/hardware").glob("*.toml"))
    blocked = {BLOCK_VARIABLE: "anygauge-sim,anygauge-lazy,anygauge-plain"}
    return Hardware.load(Registry.load(blocked), examples)


def test_the_cards_and_machines_that_there_must_be(shipped: Hardware) -> None:
    assert not shipped.failures
    for name in TABLES["cards"]:
        assert shipped.card(name).memory, name
    assert shipped.card("NVIDIA H100 80GB HBM3").name == "h100", "its driver's name"
    for name in TABLES["machines"]:
        assert shipped.machine(name).host_memory, name
    for machine in shipped.machines:  # has a card that is described
        assert shipped.machine(machine.name).link is not None, machine.name
    note = shipped.note_on(shipped.machine("v100-16:32"))
    assert "p3.16xlarge has 8: --machine p3.16xlarge --nodes 4" in note
    card = shipped.card("cpu")
    assert card.memory and card.shared_memory and card.backend == "cpu"
    assert (card.flops, card.bandwidth) == ({}, None), "only this machine knows"


def test_every_figure_has_a_source_and_is_sane(shipped: Hardware) -> None:
    for described in (*shipped.cards, *shipped.machines):
        names = CARD_FIGURES if isinstance(described, Card) else MACHINE_FIGURES
        figures = {name: getattr(described, name) for name in names}
        for of in ("flops", "matmul") if isinstance(described, Card) else ():
            figures |= {f"{of}.{kind}": rate for kind, rate in getattr(described, of).items()}
        for name, value in figures.items():
            if value is None:
                continue
            place = f"{described.name}: {name} = {value}"
            assert len(described.sources[name]) > 7, place
            least, most = TABLES["bounds"][name]
            assert least <= value <= most, place
            if name.startswith("matmul."):
                assert 0.4 <= value / figures[name.replace("matmul", "flops")] <= 1, place
