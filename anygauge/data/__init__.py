"""Files to batches: formats, templates, masking, packing, padding, order; imports no torch."""

from anygauge.data.batches import (
    IGNORED,
    STEPS_AHEAD,
    Batches,
    EvaluationBatches,
    Layout,
    MicroBatch,
    Prefetcher,
    RowBatches,
    Schedule,
    accumulation,
)
from anygauge.data.encode import Counts, Encoded, RowEncoder, prompt_ids
from anygauge.data.prepare import Prepared, advice, described, peek, prepare, training_batches
from anygauge.data.readers import Record
from anygauge.data.rows import TokenizedRows
from anygauge.data.sources import first_records
from anygauge.data.streaming import StreamedRows

__all__ = [
    "IGNORED",
    "STEPS_AHEAD",
    "Batches",
    "Counts",
    "Encoded",
    "EvaluationBatches",
    "Layout",
    "MicroBatch",
    "Prefetcher",
    "Prepared",
    "Record",
    "RowBatches",
    "RowEncoder",
    "Schedule",
    "StreamedRows",
    "TokenizedRows",
    "accumulation",
    "advice",
    "described",
    "first_records",
    "peek",
    "prepare",
    "prompt_ids",
    "training_batches",
]
