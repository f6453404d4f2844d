"""Every error that anygauge raises on purpose.

    AnygaugeError                   a sentence for the user; shown without a traceback
    ├── RunFileError                the run file or an override is wrong (exit status 2)
    ├── UsageError                  an option or argument of a command is wrong (exit status 2)
    ├── DataError                   a file or row of the data is wrong (exit status 2)
    │   └── DataAccessError         the network or the cache failed, not the rows (1)
    ├── ModelError                  the model, tokenizer or adapter cannot be used (exit status 2)
    │   └── ResultError             what was trained or merged cannot be written as it is (1)
    ├── PluginError                 a plugin is broken, misspelt, doubled or too old: names it
    │   ├── UnknownNameError        no plugin provides what was named (exit status 2)
    │   └── NotAvailableError       the plugin is sound, but cannot run on this machine
    ├── UnsupportedError            a device or strategy lacks what was asked of it: says why
    └── NonFiniteLossError          the loss or its gradient became inf or nan: names the rows

A message says what was received, where, what is valid, and what to do next.
"""

from __future__ import annotations

from anygauge.util.hiding import without_users

__all__ = [
    "LOST",
    "STOPPED",
    "AnygaugeError",
    "DataAccessError",
    "DataError",
    "ModelError",
    "NonFiniteLossError",
    "NotAvailableError",
    "PluginError",
    "ResultError",
    "RunFileError",
    "UnknownNameError",
    "UnsupportedError",
    "UsageError",
]

STOPPED = 75
"""Exit status of a run that was asked to end and wrote a checkpoint to resume from: "temporary
failure, try again" in <sysexits.h>."""

LOST = 69
"""Exit status of a run that lost a node: "unavailable" in <sysexits.h>. It may be resumed."""


class AnygaugeError(Exception):
    """Base of all errors meant for the user.

    Its text quotes what was received, but for the user and password of an address.

    Attributes:
        exit_status: what the command line exits with.
    """

    exit_status = 1

    def __str__(self) -> str:
        return without_users(super().__str__())

    @property
    def kind(self) -> str:
        """The nearest class of this file, by which another process raises it again."""
        return next(each.__name__ for each in type(self).__mro__ if each.__module__ == __name__)


def error_class(kind: str) -> type[AnygaugeError]:
    """The class of an `AnygaugeError.kind`; of any other name the base of all."""
    found = globals().get(kind)
    return found if isinstance(found, type) and issubclass(found, AnygaugeError) else AnygaugeError


class RunFileError(AnygaugeError):
    exit_status = 2


class UsageError(AnygaugeError):
    exit_status = 2


class DataError(AnygaugeError):
    exit_status = 2


class DataAccessError(DataError):
    exit_status = 1


class ModelError(AnygaugeError):
    exit_status = 2


class ResultError(ModelError):
    exit_status = 1


class PluginError(AnygaugeError): ...


class UnknownNameError(PluginError):
    exit_status = 2


class NotAvailableError(PluginError): ...


class UnsupportedError(AnygaugeError): ...


class NonFiniteLossError(AnygaugeError): ...
