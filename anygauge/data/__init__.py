"""Files to batches: formats, templates, masking, packing, padding, order; imports no torch."""

from anygauge.data.batches import (
    IGNORED,
    STEPS_AHEAD,
    Ahead,
    Batches,
    EvaluationBatches,
    Layout,
    MicroBatch,
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
    "Ahead",
    "Batches",
    "Counts",
    "Encoded",
    "EvaluationBatches",
    "Layout",
    "MicroBatch",
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
