"""Every strategy against `single` on the same rows: the cases, their results, and a table of them.

``python -m tests.strategies.matrix [--rows FILE.jsonl] [--steps N]`` prints the table that
docs/training.md has, of rows with an ``answer`` in FILE (random ones without): each strategy with
an adapter and with all weights, recomputed and not, with packed rows and padded ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from anygauge.strategies.zero.deepspeed_versions import (
    needs_reentrant_checkpointing,
    offloads_gradients,
)
from tests.helpers.ranks import on_ranks
from tests.strategies import parity_rank
from tests.strategies.parity_rank import CONFIG, ParityCase

Result = dict[str, Any]

EVERY_SECOND = {"recomputed": True, "every": 2}
SELECTIVE = {"recomputed": True, "selective": True}
NOTHING_RESIDENT = {"stage3_param_persistence_threshold": 0}
ALL = {"lora": False}
SGD = {"optimizer": "sgd"}
STAGE3 = {"stage": 3, "options": NOTHING_RESIDENT}
GATHERED = {"cp": 2}
ULYSSES = {"cp": 2, "cp_method": "ulysses"}
TENSOR = {"tp": 2}
WITHOUT_SP = {"tp": 2, "sequence_parallel": False}
PIPELINE = {"pp": 2}
DIVIDED_STAGES = {"tp": 2, "pp": 2}
FORGETFUL = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
"""Otherwise DeepSpeed keeps the output layer from its forward to its backward: both are near."""
FUSED = {"strategy": "zero", "options": STAGE3, "fused": True, **SGD}
ON_HEAD = {"targets": ["q_proj", "lm_head"]}
TIED = {**CONFIG, "tie_word_embeddings": True}
CAPPED = {
    **{**CONFIG, "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16},
    "final_logit_softcapping": 5.0,
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
TWO = [
    ParityCase(strategy="ddp"),
    ParityCase(strategy="ddp", **ALL, **SGD),
    ParityCase(strategy="ddp", dtype="bfloat16"),
    ParityCase(strategy="fsdp"),
    ParityCase(strategy="fsdp", recomputed=True, **SGD),
    ParityCase(strategy="fsdp", **ALL, **SGD),
    ParityCase(strategy="fsdp", options={"gather": "step"}),
    ParityCase(strategy="fsdp", options={"offload": "both"}),
    ParityCase(strategy="fsdp", dtype="bfloat16"),
    ParityCase(strategy="ddp", packed=True, **SGD),
    ParityCase(strategy="ddp", options=GATHERED, packed=True, **SGD),
    ParityCase(strategy="ddp", options=ULYSSES, **ALL, **SGD),
    ParityCase(strategy="fsdp", options=GATHERED, recomputed=True, **SGD),
    ParityCase(strategy="fsdp", options=GATHERED, **ALL, **SGD),
    ParityCase(strategy="fsdp", options=ULYSSES, packed=True, recomputed=True, **SGD),
    ParityCase(strategy="ddp", options=TENSOR, **SGD),
    ParityCase(strategy="ddp", options=TENSOR, packed=True, recomputed=True),
    ParityCase(strategy="ddp", options=TENSOR, dtype="bfloat16"),
    ParityCase(strategy="ddp", options=WITHOUT_SP, recomputed=True, **SGD),
    ParityCase(strategy="ddp", options=TENSOR, offloaded=True, **EVERY_SECOND, **SGD),
    ParityCase(strategy="ddp", options=WITHOUT_SP, packed=True, **ALL, **SGD),
    *(ParityCase(strategy="ddp", options={"pp": 2, "schedule": s}, **SGD) for s in SCHEDULES),
    ParityCase(strategy="ddp", options=PIPELINE, packed=True, recomputed=True),
    ParityCase(strategy="zero", packed=True, **SGD),
    *(ParityCase(strategy="zero", options={"stage": stage}) for stage in range(4)),
    *(ParityCase(strategy="zero", options={"stage": stage}, **ALL, **SGD) for stage in range(4)),
    ParityCase(strategy="zero", options={"stage": 3, "options": NOTHING_RESIDENT}, recomputed=True),
    *(
        ParityCase(strategy="zero", options={"stage": 2, "offload": "optimizer"}, **ALL, **SGD)
        for _ in range(offloads_gradients())
    ),
    *(
        ParityCase(strategy="zero", options={"offload": "optimizer"}, recomputed=True, **SGD)
        for _ in range(offloads_gradients())
    ),
    ParityCase(strategy="zero", recomputed=True, dtype="bfloat16"),
    ParityCase(strategy="zero", options={"stage": 3, "offload": "both"}),
    ParityCase(strategy="zero", options=STAGE3, **EVERY_SECOND, **SGD),
    ParityCase(strategy="zero", options={"gather": "layer"}, recomputed=True, **SGD),
    ParityCase(strategy="ddp", options=PIPELINE, recomputed=True, **ALL, **SGD),
    ParityCase(**FUSED, recomputed=True, adapter=ON_HEAD),
    ParityCase(**FUSED, **ALL, model=TIED),
    ParityCase(**FUSED, **ALL, model=CAPPED, attention="eager", recomputed=True),
]
EVERYTHING = {"dora": True, "targets": ".*"}
GPT2 = {
    **{"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256},
    **{"n_positions": 64, "bos_token_id": 0, "eos_token_id": 1},
    **{"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
}
"""With biases, weights that are stored transposed, and one tensor for both embeddings."""
GROUPED = {
    "rslora": True,
    "targets": ["q_proj"],
    "groups": [{"targets": ["embed_tokens", "lm_head"], "r": 2, "alpha": 128}],
}
ADAPTERS = [
    ParityCase(strategy="zero", options=STAGE3, recomputed=True, adapter=EVERYTHING, **SGD),
    ParityCase(strategy="zero", options={"stage": 3}, adapter=EVERYTHING, recomputed=True, **SGD),
    ParityCase(strategy="zero", options=STAGE3, adapter=EVERYTHING, **SGD),
    ParityCase(strategy="zero", options={"stage": 2}, adapter=EVERYTHING, recomputed=True, **SGD),
    ParityCase(
        strategy="zero",
        options=STAGE3,
        recomputed=True,
        adapter={**EVERYTHING, "dropout": 0.2},
        **SGD,
    ),
    ParityCase(
        strategy="zero",
        options=STAGE3,
        recomputed=True,
        adapter=EVERYTHING,
        model=GPT2,
        attention="eager",
        **SGD,
    ),
    ParityCase(strategy="zero", options=STAGE3, recomputed=True, adapter=GROUPED, **SGD),
]
RULE = {"loraplus_lr_ratio": 4.0, "weight_decay": 0.1}
MORE_ON_TWO = [
    *(
        ParityCase(strategy="zero", options={"stage": stage}, optimizer=optimizer, rule=RULE)
        for stage in (0, 1, 3)
        for optimizer in ("adamw", "adamw_8bit", "lion", "sgd", "adafactor")
        if optimizer != "adafactor" or stage == 0  # it needs matrices, which the others flatten
    ),
    ParityCase(strategy="ddp", options=TENSOR, recomputed=True, **ALL, **SGD),
    *(
        ParityCase(strategy="ddp", options={"pp": 2, "schedule": s}, recomputed=True, **ALL, **SGD)
        for s in SCHEDULES
    ),
    ParityCase(strategy="ddp", options=PIPELINE, offloaded=True, **SELECTIVE, **SGD),
    ParityCase(strategy="ddp", options=PIPELINE, dtype="bfloat16"),
    ParityCase(strategy="ddp", options=GATHERED, **EVERY_SECOND, **SGD),
    ParityCase(strategy="fsdp", **SELECTIVE, **ALL, **SGD),
    ParityCase(strategy="fsdp", options=ULYSSES, offloaded=True, **SGD),
    ParityCase(strategy="zero", options=STAGE3, offloaded=True, **ALL, **SGD),
    ParityCase(**FUSED),
    ParityCase(**FUSED, model=TIED, recomputed=True),
    ParityCase(**FUSED, **ALL, recomputed=True),
    ParityCase(
        **FUSED,
        model={**CAPPED, "tie_word_embeddings": False},
        attention="eager",
        adapter=ON_HEAD,
    ),
]
FOUR = [
    ParityCase(strategy="ddp", **SGD),
    ParityCase(strategy="fsdp", **SGD),
    ParityCase(strategy="fsdp", options={"dp_replicate": 2}, **SGD),
    ParityCase(strategy="fsdp", options={"dp_replicate": 2}, recomputed=True, **ALL, **SGD),
    ParityCase(strategy="fsdp", options={"dp_replicate": 2, "gather": "step"}),
    ParityCase(strategy="fsdp", options={"dp_shard": 4, "offload": "both"}, **ALL),
    ParityCase(strategy="ddp", options=GATHERED, **SGD),
    ParityCase(strategy="fsdp", options=GATHERED, packed=True, **ALL, **SGD),
    ParityCase(strategy="fsdp", options={"cp": 2, "dp_replicate": 2}, **SGD),
    ParityCase(strategy="ddp", options=TENSOR, **ALL, **SGD),
    ParityCase(strategy="fsdp", options=TENSOR, packed=True, recomputed=True, **SGD),
    ParityCase(strategy="fsdp", options=TENSOR, **ALL, **SGD),
    ParityCase(strategy="fsdp", options={"tp": 2, "dp_replicate": 2, "dp_shard": 1}, **SGD),
    ParityCase(strategy="ddp", options=PIPELINE, packed=True, **SGD),
    ParityCase(strategy="ddp", options={"pp": 2, "schedule": "gpipe"}, **ALL, **SGD),
    ParityCase(strategy="ddp", options={"pp": 4}, recomputed=True, **SGD),
    *(
        ParityCase(strategy="ddp", options={**DIVIDED_STAGES, "schedule": s}, **ALL, **SGD)
        for s in SCHEDULES
    ),
    ParityCase(strategy="ddp", options={"pp": 2, **WITHOUT_SP}, recomputed=True, **SGD),
    ParityCase(strategy="ddp", options=DIVIDED_STAGES, **ALL, **SGD, model=TIED),
    ParityCase(strategy="fsdp", options=TENSOR, **SELECTIVE, **ALL, **SGD),
    ParityCase(strategy="fsdp", options={"cp": 4, "cp_method": "ulysses"}, packed=True, **SGD),
    ParityCase(
        strategy="zero", options={"stage": 3, "options": {"zero_hpz_partition_size": 2}}, **SGD
    ),
    ParityCase(
        strategy="zero",
        options={"stage": 3, "options": {"zero_hpz_partition_size": 2, **NOTHING_RESIDENT}},
        **ALL,
        **SGD,
    ),
    ParityCase(strategy="zero", options={"stage": 3, "offload": "parameters"}, **ALL, **SGD),
    ParityCase(strategy="ddp", options=ULYSSES, recomputed=True, every=3, **SGD),
    ParityCase(strategy="ddp", options=GATHERED, **SELECTIVE, **SGD),
    ParityCase(strategy="ddp", offloaded=True, **ALL, **SGD),
    ParityCase(strategy="fsdp", offloaded=True, **EVERY_SECOND, **ALL, **SGD),
    ParityCase(strategy="zero", options=STAGE3, offloaded=True, recomputed=True, **SGD),
    ParityCase(strategy="zero", options={**STAGE3, "gather": "module"}, offloaded=True, **SGD),
    *(
        ParityCase(strategy="zero", options=STAGE3, **SELECTIVE, **SGD)
        for _ in range(not needs_reentrant_checkpointing())
    ),
]
CARDS = [
    ParityCase(strategy="ddp", **SGD),
    ParityCase(strategy="fsdp", recomputed=True, **SGD),
    ParityCase(strategy="fsdp", options={"offload": "both"}, **ALL, **SGD),
    ParityCase(strategy="fsdp", options=GATHERED, packed=True, **SGD),
    ParityCase(strategy="fsdp", options=ULYSSES, **SGD),
    ParityCase(strategy="ddp", options=TENSOR, packed=True, **SGD),
    ParityCase(strategy="fsdp", options=WITHOUT_SP, **ALL, **SGD),
    ParityCase(strategy="ddp", options=PIPELINE, packed=True, **SGD),
    ParityCase(strategy="ddp", options={"pp": 2, "schedule": "zero_bubble"}, **ALL, **SGD),
    ParityCase(strategy="fsdp", offloaded=True, **EVERY_SECOND, **SGD),
    ParityCase(strategy="ddp", offloaded=True, **ALL, **SGD),
    ParityCase(strategy="ddp", **SELECTIVE, **SGD),
    ParityCase(strategy="zero", options={"stage": 3, "offload": "optimizer"}),
    ParityCase(strategy="zero", options=STAGE3, offloaded=True, **ALL, **SGD),
]
EIGHT = [
    ParityCase(strategy="ddp", options=DIVIDED_STAGES, packed=True, recomputed=True, **SGD),
    ParityCase(strategy="ddp", options=DIVIDED_STAGES, **ALL, **SGD),
]
RECORD = Path(__file__).with_name("collectives.json")
A_FEW_NUMBERS = 64
"""Bytes of norms and flags in a step, which no footprint speaks of."""


def of_ranks(world: int, cases: Sequence[ParityCase], backend: str = "cpu") -> list[list[Result]]:
    """What each rank found of each case."""
    return on_ranks(
        parity_rank.results,
        [dataclasses.asdict(case) for case in cases],
        world=world,
        backend=backend,
        alone=False,
        timeout_s=1800,
        environment={"ANYGAUGE_SIM_LOCKS": "", "ANYGAUGE_SIM_CARDS": str(max(4, world))},
    )


def results(world: int, cases: Sequence[ParityCase], backend: str = "cpu") -> list[Result]:
    """What rank 0 found, which has what was trained."""
    return of_ranks(world, cases, backend)[0]


class Matrix:
    """The results of cases, and those of the reference on the same rows."""

    def __init__(self, world: int, cases: Sequence[ParityCase], backend: str = "cpu") -> None:
        alone = list(dict.fromkeys(json.dumps(dataclasses.asdict(c.alone())) for c in cases))
        references = results(1, [ParityCase(**json.loads(each)) for each in alone])
        self._references = dict(zip(alone, references, strict=True))
        found = results(world, cases, backend)
        self._found = dict(zip([case.name for case in cases], found, strict=True))

    def pair(self, case: ParityCase) -> tuple[Result, Result]:
        """(Of the case, which is forgotten then; of the reference.)"""
        alone = json.dumps(dataclasses.asdict(case.alone()))
        return self._found.pop(case.name), self._references[alone]


class CaseGroups:
    """Matrices by name, each made when the first of its cases is asked for.

    Args:
        groups: ranks, cases, and the backend if it is not the host's.
    """

    def __init__(self, **groups: tuple[Any, ...]) -> None:
        self._groups = groups
        self._made: dict[str, Matrix] = {}

    def cases(self, *slow: str) -> list[Any]:
        """Parameters of a test: group and case."""
        return [
            pytest.param(name, case, id=f"{name}: {case.name}", marks=[SLOW] * (name in slow))
            for name, (_, cases, *_) in self._groups.items()
            for case in cases
        ]

    def pair(self, name: str, case: ParityCase) -> tuple[Result, Result]:
        """(Of the case, of the reference.)"""
        if name not in self._made:
            if "sim" in self._groups[name]:
                pytest.importorskip("anygauge_sim", reason="needs `make plugins`")
            self._made[name] = Matrix(*self._groups[name])
        return self._made[name].pair(case)


SLOW = pytest.mark.slow


def apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


CROSSED: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("ddp", {}),
        ("fsdp", {}),
        ("fsdp", {"gather": "step"}),
        ("fsdp", {"offload": "both"}),
        ("ddp", TENSOR),
        ("ddp", WITHOUT_SP),
        *(("ddp", {"pp": 2, "schedule": schedule}) for schedule in SCHEDULES),
        ("fsdp", GATHERED),
        ("ddp", ULYSSES),
        *(("zero", {"stage": stage}) for stage in range(4)),
        ("zero", STAGE3),
        *(("zero", {"stage": 2, "offload": "optimizer"}) for _ in range(offloads_gradients())),
        ("zero", {"stage": 3, "offload": "both"}),
    ],
    4: [
        ("fsdp", {}),
        ("fsdp", {"dp_replicate": 2}),
        ("fsdp", TENSOR),
        ("ddp", PIPELINE),
        ("ddp", GATHERED),
        ("zero", {"stage": 3, "options": {"zero_hpz_partition_size": 2}}),
    ],
}
"""Ranks -> strategies, and their options, of the table."""


def variants(strategy: str, options: dict[str, Any], steps: int) -> list[ParityCase]:
    """A strategy in all ways; the last one by AdamW."""
    usual = ParityCase(strategy=strategy, options=options, optimizer="sgd", steps=steps)
    flags = itertools.product((True, False), repeat=3)
    return [
        *(dataclasses.replace(usual, lora=a, recomputed=b, packed=c) for a, b, c in flags),
        dataclasses.replace(usual, optimizer="adamw"),
    ]


def table(steps: int) -> list[str]:
    """Lines of a table in Markdown: the largest differences of each strategy."""
    lines = [
        "| strategy | ranks | losses | norm of step 1 | norms | losses in AdamW |",
        "|---|---|---|---|---|---|",
    ]
    for world, given in CROSSED.items():
        rows = [variants(strategy, options, steps) for strategy, options in given]
        matrix = Matrix(world, [case for row in rows for case in row])
        for (strategy, options), row in zip(given, rows, strict=True):
            *pairs, (adamw, alone) = map(matrix.pair, row)
            columns = [
                max(apart(found["losses"], wanted["losses"]) for found, wanted in pairs),
                max(apart(found["norms"][:1], wanted["norms"][:1]) for found, wanted in pairs),
                max(apart(found["norms"], wanted["norms"]) for found, wanted in pairs),
                apart(adamw["losses"], alone["losses"]),
            ]
            name = ParityCase(strategy=strategy, options=options).name.removesuffix(" LoRA")
            lines.append(f"| {name} | {world} | {' | '.join(f'{c:.0e}' for c in columns)} |")
    return lines


def recorded() -> dict[str, list[str]]:
    """The strategies that call an operator, by its name, as it was recorded."""
    found: dict[str, list[str]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def record() -> None:
    """Run the whole matrix, and write what it calls."""
    found: dict[str, set[str]] = {}
    for world, cases in ((2, [*TWO, *MORE_ON_TWO]), (4, FOUR)):
        for case, result in zip(cases, results(world, cases), strict=True):
            for name in result["operators"]:
                found.setdefault(name, set()).add(case.strategy)
    text = json.dumps({name: sorted(found[name]) for name in sorted(found)}, indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Print the table, or write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    if asked.record:
        record()
        return
    os.environ["PARITY_WEIGHTS"] = "no"
    if asked.rows is not None:
        os.environ["PARITY_ROWS"] = str(asked.rows.resolve())
    print("\n".join(table(asked.steps)))


if __name__ == "__main__":
    main()
