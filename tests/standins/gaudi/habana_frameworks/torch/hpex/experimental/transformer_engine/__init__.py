"""Passes on the names of `intel_transformer_engine`, modules too, as the original's file does."""

import sys
import types

import intel_transformer_engine as _library

for _name, _value in vars(_library).items():
    if not _name.startswith("__"):
        globals()[_name] = _value
        if isinstance(_value, types.ModuleType):
            sys.modules[f"{__name__}.{_name}"] = _value
