"""Process groups that torch and other libraries made: how long their collectives may wait.

A library that clones the world without a word on time gets torch's default, 10 or 30 minutes by
backend. Here that default is the run's own, and groups that are there already are given it.
"""

from __future__ import annotations

import datetime
import warnings
from contextlib import suppress
from typing import Any

PATIENT_S = 12 * 3600.0
"""Limit, in seconds, while some ranks have long work of their own and the others wait for them:
reading, tokenizing, merging, writing."""

_DEFAULTS: dict[str, datetime.timedelta] = {}
"""What torch had before `limit_groups` was first called: name in its module -> value."""


def limit_groups(seconds: float) -> tuple[str, ...]:
    """Give every process group of this process, and those made from now on, this limit.

    Returns:
        Names of the libraries whose groups cannot be given another limit than they were made with.
    """
    import torch.distributed.distributed_c10d as c10d

    limit = datetime.timedelta(seconds=seconds)
    # One default for most backends and one for a single vendor's: whatever there is, by its form.
    for name, value in list(vars(c10d).items()):
        if name.startswith("default_pg_") and isinstance(value, datetime.timedelta):
            _DEFAULTS.setdefault(name, value)
            setattr(c10d, name, limit)
    fixed = {
        library
        for group in list(c10d._world.pg_map)
        for library, backend in libraries_of(group)
        if not _set_limit(backend, limit)
    }
    return tuple(sorted(fixed))


def release_groups() -> None:
    """Give torch its own defaults back, for groups of whoever comes next."""
    if _DEFAULTS:
        import torch.distributed.distributed_c10d as c10d

        for name, value in _DEFAULTS.items():
            setattr(c10d, name, value)
        _DEFAULTS.clear()


def libraries_of(group: Any) -> list[tuple[str, Any]]:
    """(name, object) of the library behind each type of device that a group serves."""
    found = []
    for device in group._device_types:
        with suppress(RuntimeError):  # named, but never made: no collective of it can hang
            backend = group._get_backend(device)
            found.append((str(backend.name()), backend))
    return found


def _set_limit(backend: Any, limit: datetime.timedelta) -> bool:
    """Set a library's limit; False where it takes none."""
    # The first is of the libraries that torch ships, in all versions; the second of any, in late
    # ones, where a library may refuse it.
    for name in ("_set_default_timeout", "set_timeout"):
        refusals = suppress(AttributeError, RuntimeError, TypeError)
        with refusals, warnings.catch_warnings(action="ignore"):
            getattr(backend, name)(limit)
            return True
    return False
