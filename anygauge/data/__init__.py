"""Files to batches: forms, templates, masking, packing, padding, order; imports no torch."""

from anygauge.data.batches import Batches, EvaluationBatches, accumulation, evaluation_batches
from anygauge.data.collate import IGNORED, MicroBatch
from anygauge.data.order import Stream, permutation, split
from anygauge.data.packing import fill, pack
from anygauge.data.prepare import Prepared, peek, prepare
from anygauge.data.sources import Row, prompt_template, read_rows, render, render_alpaca
from anygauge.data.tokens import Report, TokenizedRows, prompt_ids, tokenize_rows

__all__ = [
    "IGNORED",
    "Batches",
    "EvaluationBatches",
    "MicroBatch",
    "Prepared",
    "Report",
    "Row",
    "Stream",
    "TokenizedRows",
    "accumulation",
    "evaluation_batches",
    "fill",
    "pack",
    "peek",
    "permutation",
    "prepare",
    "prompt_ids",
    "prompt_template",
    "read_rows",
    "render",
    "render_alpaca",
    "split",
    "tokenize_rows",
]
