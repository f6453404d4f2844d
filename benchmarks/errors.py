"""What goes wrong before anything is measured; the message says what to do."""

from __future__ import annotations


class BenchmarkError(Exception):
    """For the user: shown without a traceback."""


class MissingDataError(BenchmarkError):
    """The workload's file is not there."""


class RowsError(BenchmarkError):
    """The workload cannot give as many rows as were asked for."""


class ModelNotMadeError(BenchmarkError):
    """The model that is to be trained could not be made."""
