"""Cards and machines by name: whose description counts, and what an unknown name is answered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from anygauge.interface import PluginError, UnknownNameError, UsageError
from anygauge.registry import Hardware, Registry

CARD = """
[card.mine-80]
names = ["Maker Mine 80GB"]
memory = ["79.1 GiB", "its tool"]
bandwidth = ["3 TB/s", "its sheet"]
link = ["450 GB/s", "its sheet"]
flops.bfloat16 = ["900 TFLOPS", "its sheet"]

[machine."box.8"]
card = "mine-80"
cards = [8, "its page"]
network = ["400 Gb/s", "its page"]
"""


@pytest.fixture
def plugin(install, tmp_path: Path) -> Callable[..., None]:
    """``plugin("one", text)`` installs a backend of that name with a file of descriptions."""

    def put(name: str, text: str, hardware: str | None = None, more: str = "") -> None:
        folder = tmp_path / "site" / f"fake_{name}"
        folder.mkdir()
        (folder / "cards.toml").write_text(text, encoding="utf-8")
        source = f"""\
from anygauge.interface import BackendSpec, Finding, Probe, hookimpl

def probe():
    return Probe(devices=Finding.no("none"), driver=Finding.no("none"), software=Finding.no("none"))

@hookimpl
def anygauge_provide_backends():
    yield BackendSpec(
        name={name!r}, factory="fake_{name}:Fake", probe=probe, api_version=1,
        hardware={hardware or f"fake_{name}:cards.toml"!r}, {more}
    )
"""
        install(f"dist-{name}", "1.0", {name: f"fake_{name}"}, **{f"fake_{name}/__init__": source})

    return put


@pytest.fixture
def hardware(plugin, load) -> Callable[..., Hardware]:
    """What is described where a plugin brings `CARD`, and users bring files of theirs."""
    plugin("one", CARD)
    return lambda *files: Hardware.load(load(), files)


@pytest.fixture
def user(tmp_path: Path) -> Callable[..., Path]:
    """A file of the user's."""

    def put(text: str, name: str = "mine.toml") -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return put


@pytest.mark.parametrize("name", ["mine-80", "MINE 80", "mine80", "maker mine 80gb"])
def test_a_third_party_brings_its_card_whose_name_is_forgiving(hardware, name: str) -> None:
    card = hardware().card(name)
    assert (card.name, card.backend) == ("mine-80", "one")
    assert card.origin == "cards.toml of dist-one 1.0"
    assert [m.name for m in hardware().machines] == ["box.8"]
    assert not hardware().failures


def test_a_machine_has_its_cards_link(hardware, user) -> None:
    slow = user('[machine.slow]\ncard = "mine-80"\ncards = [2, "x"]\nlink = ["31 GB/s", "x"]\n')
    assert hardware().machine("BOX.8").link == 450e9
    assert hardware(slow).machine("slow").link == 31e9


def test_a_card_and_a_number_is_a_machine(hardware) -> None:
    many, one = hardware().machine("Mine-80:16"), hardware().machine("mine-80")
    assert (many.card, many.cards, many.link, many.network) == ("mine-80", 16, 450e9, None)
    assert (one.card, one.cards) == ("mine-80", 1)


@pytest.mark.parametrize("count", ["", "0", "-1", "8x", "1.5", "2000"])
def test_a_number_of_cards_is_a_number(hardware, count: str) -> None:
    with pytest.raises(UsageError, match=f"'{count}' is not a number of cards.*such as mine-80:8"):
        hardware().machine(f"mine-80:{count}")


def test_an_unknown_machine_is_answered_with_the_nearest(hardware) -> None:
    with pytest.raises(UnknownNameError) as caught:
        hardware().machine("bx.8")
    text = str(caught.value)
    assert text.splitlines()[0] == "there is no machine named 'bx.8'; did you mean 'box.8'?"
    assert "  machines: box.8\n  or a card and how many of it, as in CARD:8" in text
    assert "  cards: mine-80" in text and "docs/hardware.md" in text.splitlines()[-1]
    assert caught.value.exit_status == 2


def test_an_unknown_card_is_answered_with_the_nearest(hardware) -> None:
    for wrong, asked in (("mine-90", "card"), ("mine-90:8", "machine")):
        with pytest.raises(UnknownNameError, match="did you mean 'mine-80'"):
            getattr(hardware(), asked)(wrong)


def test_names_that_begin_alike_are_nearest_and_each_machine_is_named_once(load, user) -> None:
    cards = user('[card.a10]\n[card.a100-40]\nnames = ["a100 forty"]\n[card.a100-80]\n[card.z]\n')
    with pytest.raises(UnknownNameError, match=r"did you mean 'a100-40' or 'a100-80' or 'a10'\?"):
        Hardware.load(load(), [cards]).card("A100")


def test_a_name_far_from_all_gets_no_guess(load) -> None:
    with pytest.raises(UnknownNameError, match=r"^there is no card named 'zzz'\n  cards: none\n"):
        Hardware.load(load()).card("zzz")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('card = "lost"\ncards = 8', "machine 'box' of .*mine.toml: there is no card named 'lost'"),
        ("cards = 8", r"mine.toml: \[machine.box\] lacks card: the name"),
        ('card = "mine-80"', r"mine.toml: \[machine.box\] lacks cards: their number"),
    ],
)
def test_a_machine_without_its_cards_says_so(hardware, user, text: str, said: str) -> None:
    with pytest.raises((UsageError, UnknownNameError), match=said):
        hardware(user(f"[machine.box]\n{text}\n")).machine("box")


def test_a_users_file_comes_over_a_plugin_figure_by_figure(hardware, user) -> None:
    file = user(
        '[card."MINE-80"]\nbandwidth = ["2.5 TB/s", "measured"]\nlink = "0 GB/s"\n'
        'flops.bfloat16 = ["700 TFLOPS", "measured"]\n[machine."box.8"]\nprice = 20\n'
    )
    found = hardware(file)
    card = found.card("mine-80")
    assert (card.bandwidth, card.link, card.flops["bfloat16"]) == (2.5e12, 0, 700e12)
    assert (card.memory, card.sources["memory"]) == (int(79.1 * 2**30), "its tool")
    assert card.sources["bandwidth"] == "measured" and card.backend == "one"
    assert card.origin == f"cards.toml of dist-one 1.0 and {file}"
    machine = found.machine("box.8")
    assert (machine.price, machine.cards, machine.network) == (20, 8, 50e9)
    assert [one.name for one in found.cards] == ["mine-80"]


def test_a_later_file_comes_over_an_earlier_one(load, user) -> None:
    files = [
        user('[card.a]\nmemory = "1 GB"\nlink = "1 GB/s"\n', "1.toml"),
        user('[card.a]\nmemory = "2 GB"\n', "2.toml"),
    ]
    card = Hardware.load(load(), files).card("a")
    assert (card.memory, card.link) == (2 * 10**9, 1e9)


def test_two_plugins_of_one_name_are_both_named(plugin, load, user) -> None:
    plugin("one", CARD)
    plugin("two", '[card.other]\nnames = ["mine 80"]\nmemory = ["1 GB", "x"]\n')
    with pytest.raises(PluginError) as caught:
        Hardware.load(load()).card("mine-80")
    assert "described by cards.toml of dist-one 1.0 and cards.toml of dist-two 1.0" in str(
        caught.value
    )
    assert "ANYGAUGE_BLOCK_PLUGINS" in str(caught.value)
    assert Hardware.load(load()).card("other").memory == 10**9
    own = user('[card.mine-80]\nmemory = "3 GB"\n')
    assert Hardware.load(load(), [own]).card("mine-80").memory == 3 * 10**9


@pytest.mark.parametrize(
    ("text", "hardware", "reason"),
    [
        ("[card.x", None, "not TOML"),
        ("[card.x]\nmemory = '3 GB'", None, "its source beside it"),
        ("", "fake_bad:lost.toml", "FileNotFoundError"),
        ("", "no_such_package:cards.toml", "ModuleNotFoundError"),
    ],
)
def test_a_broken_file_harms_no_other(
    plugin, load, text: str, hardware: str | None, reason: str
) -> None:
    plugin("bad", text, hardware)
    plugin("one", CARD)
    found = Hardware.load(load())
    assert found.card("mine-80").backend == "one"
    (failure,) = found.failures
    assert (failure.distribution, failure.version) == ("dist-bad", "1.0")
    assert reason in failure.reason
    with pytest.raises(
        UnknownNameError, match=r"of dist-bad 1.0 may describe it and cannot be read"
    ):
        found.machine("another")


def test_a_spec_names_its_file_in_one_form(plugin, load) -> None:
    plugin("bad", "", "cards.toml")
    (failure,) = load().failures
    assert "hardware 'cards.toml' must read 'package:file.toml'" in failure.reason


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read as a description of hardware: "),
        (b"\xff\xfe\x00", "cannot be read as a description of hardware: "),
        (b'[card.a]\nmemory = "3"\n', "card.a.memory is '3'"),
    ],
    ids=["missing", "binary", "a mistake"],
)
def test_a_users_file_that_cannot_be_taken_is_named(
    load, tmp_path: Path, content: bytes | None, said: str
) -> None:
    file = tmp_path / "mine.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=f"mine.toml: {said}"):
        Hardware.load(load(), [file])


ASKED = '[card.here]\nshared_memory = true\nmemory = ["this machine", "its kernel"]\n'


def test_a_figure_may_be_left_to_the_machine_at_hand(plugin, load, user) -> None:
    plugin("one", ASKED, more="this_machine=lambda: {'memory': 12345},")
    hardware = Hardware.load(load())
    (listed,) = hardware.cards
    assert (listed.memory, listed.asked, listed.shared_memory) == (None, ("memory",), True)
    assert (
        hardware.card("here").memory
        == hardware.card(hardware.machine("here:2").card).memory
        == 12345
    )
    stated = Hardware.load(load(), [user('[card.here]\nmemory = "1 GB"\n')]).card("here")
    assert (stated.memory, stated.asked) == (10**9, ())


def test_who_does_not_say_or_cannot_be_asked(plugin, load, user) -> None:
    with pytest.raises(UsageError, match=r"\[card.here\] leaves figures to this machine, and none"):
        Hardware.load(load(), [user(ASKED)]).card("here")
    plugin("one", ASKED)
    assert Hardware.load(load()).card("here").memory is None


def test_a_plugin_that_fails_to_ask_is_named(plugin, load) -> None:
    plugin("one", ASKED, more="this_machine=lambda: 1 / 0,")
    with pytest.raises(
        PluginError, match=r"card 'here' of cards.toml of dist-one 1.0: .*ZeroDivisionError"
    ):
        Hardware.load(load()).card("here")


def test_this_processor_is_described() -> None:
    hardware = Hardware.load(Registry.load())
    card = hardware.card("cpu")
    assert card.memory and card.shared_memory and card.backend == "cpu"
    assert (card.flops, card.bandwidth) == ({}, None)
    assert hardware.machine("cpu:2").cards == 2
