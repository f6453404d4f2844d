"""What goes wrong before anything is measured."""

from __future__ import annotations


class BenchmarkError(Exception):
    """For the user: shown without a traceback; says what to do."""
