"""Lines that agents print: which of them are events."""

from __future__ import annotations

import pytest

from anygauge.util.events import message_event, read_event


def test_a_line_that_an_agent_has_printed_is_its_event() -> None:
    assert read_event(b'{"event": "step", "step": 3}\n') == {"event": "step", "step": 3}
    assert message_event("hello", "warning")["level"] == "warning"


@pytest.mark.parametrize(
    "line",
    [b"", b"a greeting\n", b"[1]", b"3", b'{"step": 1}', b'{"event": 1}', b"\xff", b"[" * 100_000],
    ids=lambda line: repr(line[:12]),
)
def test_any_other_line_is_none(line: bytes) -> None:
    assert read_event(line) is None
