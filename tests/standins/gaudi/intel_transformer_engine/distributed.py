"""Announces that layers are called in a region that is computed twice."""

import contextlib

announced = 0
"""How many such regions are open."""


class activation_checkpointing(contextlib.ContextDecorator):
    """A context, or a decorator of the function that is computed twice."""

    def _recreate_cm(self):
        return activation_checkpointing()

    def __enter__(self):
        global announced
        announced += 1

    def __exit__(self, *failed):
        global announced
        announced -= 1
