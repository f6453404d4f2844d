"""Files to batches: formats, templates, masking, packing, padding, order; imports no torch."""

from anygauge.data.batches import (
    STEPS_AHEAD,
    Batches,
    EvaluationBatches,
    Layout,
    MicroBatch,
    Prefetcher,
    Schedule,
    accumulation,
)
from anygauge.data.encode import prompt_ids
from anygauge.data.prepare_rows import (
    PreparedRows,
    addresses,
    advice,
    copy_addresses,
    describe_rows,
    peek,
    prepare,
    training_batches,
)
from anygauge.data.rows import TokenizedRows, Tokens
from anygauge.data.sources import first_records, read_questions

__all__ = [
    "STEPS_AHEAD",
    "Batches",
    "EvaluationBatches",
    "Layout",
    "MicroBatch",
    "Prefetcher",
    "PreparedRows",
    "Schedule",
    "TokenizedRows",
    "Tokens",
    "accumulation",
    "addresses",
    "advice",
    "copy_addresses",
    "describe_rows",
    "first_records",
    "peek",
    "prepare",
    "prompt_ids",
    "read_questions",
    "training_batches",
]
