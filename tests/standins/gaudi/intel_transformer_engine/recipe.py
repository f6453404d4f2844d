"""How scales are found."""

import dataclasses
import enum


class Format(enum.Enum):
    E5M2 = "E5M2"
    HYBRID = "HYBRID"


@dataclasses.dataclass
class DelayedScaling:
    margin: int = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1
    amax_compute_algo: str = "most_recent"
    reduce_amax: bool = True

    def __post_init__(self):
        assert isinstance(self.fp8_format, Format)
        assert self.amax_compute_algo in ("max", "most_recent")
