"""Events of the card; there is one argument, as in the original."""

import habana_standin

_functions = habana_standin.cards() and habana_standin.card_functions()


class Event(_functions["Event"]):
    """A moment in a stream."""

    def __new__(cls, enable_timing=False):
        return super().__new__(cls, enable_timing=enable_timing)
