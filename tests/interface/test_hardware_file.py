"""The TOML of cards and machines: what is read, and what is refused with which words."""

from __future__ import annotations

import pytest

from anygauge.interface import UsageError, read_hardware

WHOLE = """
[card.mine]
names = ["Maker Mine 80GB"]
memory = ["79.1 GiB", "its tool"]
reserved = ["512 MiB", "its tool"]
bandwidth = ["3.35 TB/s", "its sheet"]
link = ["450 GB/s", "its sheet"]
host_link = ["63 GB/s", "its sheet"]
flops.float32 = ["67 TFLOPS", "its sheet"]
flops.bfloat16 = ["0.989 PFLOPS", "its sheet, halved"]

[machine."mine.8"]
card = "mine"
cards = [8, "the rental's page"]
network = ["3200 Gb/s", "the rental's page"]
host_memory = ["2 TB", "the rental's page"]
cores = [96, "the rental's page"]
disk = ["30 TB", "the rental's page"]
disk_rate = ["16 GB/s", "the rental's page"]
"""


def test_figures_are_bytes_and_operations_per_second() -> None:
    (card,), (machine,) = read_hardware(WHOLE, "a.toml", backend="mine")
    assert (card.name, card.names, card.backend) == ("mine", ("Maker Mine 80GB",), "mine")
    assert (card.memory, card.reserved) == (int(79.1 * 2**30), 2**29)
    assert (card.bandwidth, card.link, card.host_link) == (3.35e12, 450e9, 63e9)
    assert card.flops == {"float32": 67e12, "bfloat16": 0.989e15}
    assert (machine.name, machine.card, machine.cards) == ("mine.8", "mine", 8)
    assert (machine.network, machine.host_memory, machine.cores) == (400e9, 2 * 10**12, 96)
    assert (machine.disk, machine.disk_rate, machine.link) == (30 * 10**12, 16e9, None)


def test_every_figure_keeps_its_source_and_the_file() -> None:
    (card,), (machine,) = read_hardware(WHOLE, "a.toml")
    assert card.sources["flops.bfloat16"] == "its sheet, halved"
    assert set(card.sources) == {
        *("memory", "reserved", "bandwidth", "link", "host_link"),
        *("flops.float32", "flops.bfloat16"),
    }
    assert set(machine.sources) == {
        *("cards", "network", "host_memory", "cores", "disk", "disk_rate"),
    }
    assert card.origin == machine.origin == "a.toml"


def test_what_is_left_out_is_unknown() -> None:
    (card,), (machine,) = read_hardware("[card.a]\n[machine.b]\n", "a.toml")
    assert (card.memory, card.bandwidth, card.link, card.flops) == (None, None, None, {})
    assert (machine.card, machine.cards, machine.network) == ("", 0, None)


def test_a_user_may_leave_sources_out_and_begin_with_a_byte_order_mark() -> None:
    text = '[card.a]\nmemory = "24 GiB"\nlink = ["0 GB/s", "measured"]\n[machine.b]\nprice = 2.5\n'
    (card,), (machine,) = read_hardware("\ufeff" + text, "mine.toml", sourced=False)
    assert (card.memory, card.sources["memory"]) == (24 * 2**30, "mine.toml")
    assert (card.link, card.sources["link"]) == (0, "measured")
    assert (machine.price, machine.sources["price"]) == (2.5, "mine.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[card.a", "a.toml: not TOML: "),
        (
            '[crad.a]\nmemory = "1 GB"',
            "unknown key 'crad'; did you mean 'card'? valid keys: card, ",
        ),
        ("card = 3", "a.toml: card is 3; it must be a table"),
        ("[card]\na = 3", "card.a is 3; it must be a table"),
        ("[card.'a b']", "[card.a b]: a name is letters, digits"),
        (
            "[card.a]\nmemroy = ['1 GB', 'x']",
            "[card.a] has an unknown key 'memroy'; did you mean 'memory'?",
        ),
        ("[card.a]\nmemory = '80 GB'", "card.a.memory is '80 GB'; it must be its source beside it"),
        (
            "[card.a]\nmemory = ['80 GB']",
            "card.a.memory is ['80 GB']; it must be a figure and its source",
        ),
        ("[card.a]\nmemory = ['80 GB', '']", "a figure and its source"),
        (
            "[card.a]\nmemory = ['80 Gb', 'x']",
            "card.a.memory is '80 Gb'; it must be a number and its unit in quotes, of B, kB, MB",
        ),
        ("[card.a]\nmemory = [80, 'x']", "card.a.memory is 80; it must be a number and its unit"),
        (
            "[card.a]\nmemory = ['0 GB', 'x']",
            "card.a.memory is '0 GB'; it must be a number above 0",
        ),
        (
            "[card.a]\nbandwidth = ['3 TB', 'x']",
            "card.a.bandwidth is '3 TB'; it must be a number and its unit in quotes, of B/s",
        ),
        (
            "[card.a]\nflops = ['3 TFLOPS', 'x']",
            "card.a.flops is ['3 TFLOPS', 'x']; it must be a table",
        ),
        ("[card.a]\nflops.bf16 = ['3 TFLOPS', 'x']", "[card.a.flops] has an unknown key 'bf16'"),
        ("[card.a]\nflops.bfloat16 = ['3 T', 'x']", "of GFLOPS, TFLOPS, PFLOPS"),
        ("[card.a]\nnames = 'b'", "card.a.names is 'b'; it must be a list of texts"),
        ("[card.a]\nshared_memory = 1", "card.a.shared_memory is 1; it must be true or false"),
        ("[machine.a]\ncard = 8", "machine.a.card is 8; it must be a name in quotes"),
        ("[machine.a]\ncards = [8.5, 'x']", "machine.a.cards is 8.5; it must be a whole number"),
        (
            "[machine.a]\ncards = ['8', 'x']",
            "machine.a.cards is '8'; it must be a whole number, without",
        ),
        ("[machine.a]\ncards = [true, 'x']", "machine.a.cards is True; it must be a whole number"),
        ("[machine.a]\nprice = [nan, 'x']", "machine.a.price is nan; it must be a number above 0"),
        ("[machine.a]\ncores = [inf, 'x']", "machine.a.cores is inf; it must be a whole number"),
        (
            "[machine.p5.large]\ncards = [8, 'x']",
            'A name with a dot stands in quotes: [machine."a.b"]',
        ),
    ],
)
def test_what_cannot_be_is_refused_by_file_and_place(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_hardware(text, "a.toml")
    assert str(caught.value).startswith("a.toml: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("sourced", [True, False])
def test_a_character_too_few_or_too_many_is_no_traceback(sourced: bool) -> None:
    refused = 0
    for at in range(len(WHOLE)):
        for text in (WHOLE[:at] + WHOLE[at + 1 :], WHOLE[:at] + "[" + WHOLE[at:]):
            try:
                read_hardware(text, "a.toml", sourced=sourced)
            except UsageError as error:
                refused += 1
                assert str(error).startswith("a.toml: ")
    assert refused > len(WHOLE)
