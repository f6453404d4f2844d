"""Files to batches: formats, templates, masking, packing, padding, order; imports no torch."""

from anygauge.data.batches import Batches, Layout, Schedule, accumulation
from anygauge.data.collate import IGNORED, MicroBatch
from anygauge.data.encode import Counts, Encoded, RowEncoder
from anygauge.data.files import Record
from anygauge.data.prepare import Prepared, advice, described, peek, prepare, training_batches
from anygauge.data.readers import first_records
from anygauge.data.row_batches import EvaluationBatches, RowBatches
from anygauge.data.rows import TokenizedRows
from anygauge.data.streamed_rows import StreamedRows
from anygauge.data.tokens import prompt_ids

__all__ = [
    "IGNORED",
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
