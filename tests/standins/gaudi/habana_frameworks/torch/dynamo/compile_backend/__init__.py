"""Registers the compiler when the device is loaded in eager mode."""

from . import backends
