"""The TOML of cards: what is read, and what is refused with which words."""

from __future__ import annotations

import pytest

from anygauge.interface import Rates, UsageError, read_cards

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
shared_memory = true

[card.mine.ranks.2]
matmul.float32 = ["50 GFLOPS", "measured"]
call = ["20 us", "measured"]
"""


def test_figures_are_bytes_and_operations_per_second_and_keep_their_source() -> None:
    (card,) = read_cards(WHOLE, "a.toml", backend="mine")
    assert (card.name, card.names, card.backend) == ("mine", ("Maker Mine 80GB",), "mine")
    assert (card.memory, card.reserved) == (int(79.1 * 2**30), 2**29)
    assert (card.bandwidth, card.link, card.host_link) == (3.35e12, 450e9, 63e9)
    assert card.flops == {"float32": 67e12, "bfloat16": 0.989e15}
    rates = Rates(matmul={"float32": 50e9}, call=20 * 1e-6)
    assert (card.shared_memory, card.ranks) == (True, {2: rates})
    assert set(card.sources) == {
        *("memory", "reserved", "bandwidth", "link", "host_link"),
        *("flops.float32", "flops.bfloat16", "ranks.2.call", "ranks.2.matmul.float32"),
    }
    assert card.sources["flops.bfloat16"] == "its sheet, halved" and card.origin == "a.toml"


def test_what_is_left_out_is_unknown() -> None:
    (card,) = read_cards('[card.a]\nbackend = "its own"', "a.toml", backend="mine")
    assert (card.memory, card.bandwidth, card.link, card.flops) == (None, None, None, {})
    assert card.backend == "its own" and not card.to_measure


def test_a_user_may_leave_sources_out_and_begin_with_a_byte_order_mark() -> None:
    text = '[card.a]\nmemory = "24 GiB"\nlink = ["0 GB/s", "measured"]\n'
    (card,) = read_cards("\ufeff" + text, "mine.toml", sourced=False)
    assert (card.memory, card.sources["memory"]) == (24 * 2**30, "mine.toml")
    assert (card.link, card.sources["link"]) == (0, "measured")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[card.a", "a.toml: not TOML: "),
        ('[crad.a]\nmemory = "1 GB"', "unknown key 'crad'; did you mean 'card'? valid keys: card"),
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
        ("[card.a]\nsources = {}", "[card.a] has an unknown key 'sources'"),
        (
            "[card.a]\nflops.bfloat16 = ['this machine', 'x']",
            "card.a.flops.bfloat16 is 'this machine'; it must be a number and its unit",
        ),
        ("[card.a.ranks.0]", "card.a.ranks.0 is '0'; it must be a number of ranks, 1 to 1024"),
        ("[card.a.ranks.2]\nmemory = 1", "[card.a.ranks.2] has an unknown key 'memory'"),
        ("[card.a.ranks.2]\ncall = ['2 GB/s', 'x']", "card.a.ranks.2.call is '2 GB/s'"),
    ],
)
def test_what_cannot_be_is_refused_by_file_and_place(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_cards(text, "a.toml")
    assert str(caught.value).startswith("a.toml: ")
    assert words in str(caught.value)


def test_a_character_too_few_or_too_many_is_no_traceback() -> None:
    refused = 0
    for at in range(len(WHOLE)):
        for text in (WHOLE[:at] + WHOLE[at + 1 :], WHOLE[:at] + "[" + WHOLE[at:]):
            try:
                read_cards(text, "a.toml")
            except UsageError as error:
                refused += 1
                assert str(error).startswith("a.toml: ")
    assert refused > len(WHOLE)
