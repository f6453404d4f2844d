"""Streams of the card."""

import habana_standin
import torch

_record_stream = torch.Tensor.record_stream
_functions = habana_standin.cards() and habana_standin.card_functions()

_Base = _functions["Stream"]


class Stream(_Base):
    """A queue of work; device and priority are taken and not used, as in the original."""

    def __new__(cls, device=None, priority=0, **kwargs):
        return super().__new__(cls)


def stream(stream):
    return _functions["stream"](stream)


def current_stream(device=None):
    import habana_frameworks.torch.hpu as hpu

    hpu.init()
    return _functions["current_stream"]()


def default_stream(device=None):
    return current_stream(device)


def set_stream(stream):
    return _functions["set_stream"](stream)


def record_stream(self, stream):
    return _record_stream(self, stream)
