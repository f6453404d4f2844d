"""Every strategy against `single` on the same rows: the cases, their results, and a table of them.

``python -m tests.strategies.matrix [--rows FILE.jsonl] [--steps N]`` prints the table that
docs/measured.md has, of rows with an ``answer`` in FILE (random ones without): each strategy with
an adapter and with all weights, recomputed and not, with packed rows and padded ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from anygauge.strategies.zero.deepspeed_versions import (
    needs_reentrant_checkpointing,
    offloads_gradients,
)
from tests.helpers.run_ranks import on_ranks
from tests.strategies import parity_rank
from tests.strategies.parity_rank import CONFIG, ParityCase

Result = dict[str, Any]
SLOW = pytest.mark.slow


def of(strategy: str, options: Mapping[str, Any] | None = None, **more: Any) -> ParityCase:
    return ParityCase(strategy=strategy, options=dict(options or {}), **more)


RECOMPUTED = {"recomputed": True}
EVERY_SECOND = {**RECOMPUTED, "every": 2}
SELECTIVE = {**RECOMPUTED, "selective": True}
NOTHING_RESIDENT = {"stage3_param_persistence_threshold": 0}
ALL = {"lora": False}
SGD = {"optimizer": "sgd"}
BF16 = {"dtype": "bfloat16"}
STAGE3 = {"stage": 3, "options": NOTHING_RESIDENT}
GATHERED = {"cp": 2}
ULYSSES = {"cp": 2, "cp_method": "ulysses"}
TENSOR = {"tp": 2}
WITHOUT_SP = {"tp": 2, "sequence_parallel": False}
PIPELINE = {"pp": 2}
BOTH = {"tp": 2, "pp": 2}
REPLICAS = {"dp_replicate": 2}
STEP, HOST = {"gather": "step"}, {"offload": "both"}
HPZ = {"zero_hpz_partition_size": 2}
FORGETFUL = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
"""Otherwise DeepSpeed keeps the output layer from its forward to its backward: both are near."""
FUSED = {"fused": True, **SGD}
ON_HEAD = {"targets": ["q_proj", "lm_head"]}
TIED = {**CONFIG, "tie_word_embeddings": True}
CAPPED = {
    **{**CONFIG, "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16},
    "final_logit_softcapping": 5.0,
}
UNTIED = {**CAPPED, "tie_word_embeddings": False}
EAGER = {"attention": "eager"}
STAGES = [{"stage": stage} for stage in range(4)]
SCHEDULES = [
    {"pp": 2, "schedule": name} for name in ("gpipe", "1f1b", "interleaved", "zero_bubble")
]
ON_HOST = [{"stage": 2, "offload": "optimizer"}, {"offload": "optimizer"}]
if not offloads_gradients():
    ON_HOST = []
TWO = [
    of("ddp"),
    of("ddp", **ALL, **SGD),
    of("ddp", **BF16),
    of("fsdp"),
    of("fsdp", **RECOMPUTED, **SGD),
    of("fsdp", **ALL, **SGD),
    of("fsdp", STEP),
    of("fsdp", HOST),
    of("fsdp", **BF16),
    of("ddp", packed=True, **SGD),
    of("ddp", GATHERED, packed=True, **SGD),
    of("ddp", ULYSSES, **ALL, **SGD),
    of("fsdp", GATHERED, **RECOMPUTED, **SGD),
    of("fsdp", GATHERED, **ALL, **SGD),
    of("fsdp", ULYSSES, packed=True, **RECOMPUTED, **SGD),
    of("ddp", TENSOR, **SGD),
    of("ddp", TENSOR, packed=True, **RECOMPUTED),
    of("ddp", TENSOR, **BF16),
    of("ddp", WITHOUT_SP, **RECOMPUTED, **SGD),
    of("ddp", TENSOR, offloaded=True, **EVERY_SECOND, **SGD),
    of("ddp", WITHOUT_SP, packed=True, **ALL, **SGD),
    *(of("ddp", schedule, **SGD) for schedule in SCHEDULES),
    of("ddp", PIPELINE, packed=True, **RECOMPUTED),
    of("zero", packed=True, **SGD),
    *(of("zero", stage) for stage in STAGES),
    *(of("zero", stage, **ALL, **SGD) for stage in STAGES),
    of("zero", STAGE3, **RECOMPUTED),
    *(of("zero", there, **ALL, **SGD) for there in ON_HOST[:1]),
    *(of("zero", there, **RECOMPUTED, **SGD) for there in ON_HOST[1:]),
    of("zero", **RECOMPUTED, **BF16),
    of("zero", {"stage": 3, **HOST}),
    of("zero", STAGE3, **EVERY_SECOND, **SGD),
    of("zero", {"gather": "layer"}, **RECOMPUTED, **SGD),
    of("ddp", PIPELINE, **RECOMPUTED, **ALL, **SGD),
    of("zero", STAGE3, **FUSED, **RECOMPUTED, adapter=ON_HEAD),
    of("zero", STAGE3, **FUSED, **ALL, model=TIED),
    of("zero", STAGE3, **FUSED, **ALL, **RECOMPUTED, model=CAPPED, **EAGER),
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
    of("zero", STAGE3, **RECOMPUTED, adapter=EVERYTHING, **SGD),
    of("zero", {"stage": 3}, **RECOMPUTED, adapter=EVERYTHING, **SGD),
    of("zero", STAGE3, adapter=EVERYTHING, **SGD),
    of("zero", {"stage": 2}, **RECOMPUTED, adapter=EVERYTHING, **SGD),
    of("zero", STAGE3, **RECOMPUTED, adapter={**EVERYTHING, "dropout": 0.2}, **SGD),
    of("zero", STAGE3, **RECOMPUTED, adapter=EVERYTHING, model=GPT2, **EAGER, **SGD),
    of("zero", STAGE3, **RECOMPUTED, adapter=GROUPED, **SGD),
]
RULE = {"loraplus_lr_ratio": 4.0, "weight_decay": 0.1}
MORE_ON_TWO = [
    *(
        of("zero", {"stage": stage}, optimizer=optimizer, rule=RULE)
        for stage in (0, 1, 3)
        for optimizer in ("adamw", "adamw_8bit", "lion", "sgd", "adafactor")
        if optimizer != "adafactor" or stage == 0  # it needs matrices, which the others flatten
    ),
    of("ddp", TENSOR, **RECOMPUTED, **ALL, **SGD),
    *(of("ddp", schedule, **RECOMPUTED, **ALL, **SGD) for schedule in SCHEDULES),
    of("ddp", PIPELINE, offloaded=True, **SELECTIVE, **SGD),
    of("ddp", PIPELINE, **BF16),
    of("ddp", GATHERED, **EVERY_SECOND, **SGD),
    of("fsdp", **SELECTIVE, **ALL, **SGD),
    of("fsdp", ULYSSES, offloaded=True, **SGD),
    of("zero", STAGE3, offloaded=True, **ALL, **SGD),
    of("zero", STAGE3, **FUSED),
    of("zero", STAGE3, **FUSED, model=TIED, **RECOMPUTED),
    of("zero", STAGE3, **FUSED, **ALL, **RECOMPUTED),
    of("zero", STAGE3, **FUSED, model=UNTIED, adapter=ON_HEAD, **EAGER),
]
FOUR = [
    of("ddp", **SGD),
    of("fsdp", **SGD),
    of("fsdp", REPLICAS, **SGD),
    of("fsdp", REPLICAS, **RECOMPUTED, **ALL, **SGD),
    of("fsdp", {**REPLICAS, **STEP}),
    of("fsdp", {"dp_shard": 4, **HOST}, **ALL),
    of("ddp", GATHERED, **SGD),
    of("fsdp", GATHERED, packed=True, **ALL, **SGD),
    of("fsdp", {**GATHERED, **REPLICAS}, **SGD),
    of("ddp", TENSOR, **ALL, **SGD),
    of("fsdp", TENSOR, packed=True, **RECOMPUTED, **SGD),
    of("fsdp", TENSOR, **ALL, **SGD),
    of("fsdp", {**TENSOR, **REPLICAS, "dp_shard": 1}, **SGD),
    of("ddp", PIPELINE, packed=True, **SGD),
    of("ddp", SCHEDULES[0], **ALL, **SGD),
    of("ddp", {"pp": 4}, **RECOMPUTED, **SGD),
    *(of("ddp", {**TENSOR, **schedule}, **ALL, **SGD) for schedule in SCHEDULES),
    of("ddp", {**WITHOUT_SP, **PIPELINE}, **RECOMPUTED, **SGD),
    of("ddp", BOTH, **ALL, **SGD, model=TIED),
    of("fsdp", TENSOR, **SELECTIVE, **ALL, **SGD),
    of("fsdp", {**ULYSSES, "cp": 4}, packed=True, **SGD),
    of("zero", {"stage": 3, "options": HPZ}, **SGD),
    of("zero", {"stage": 3, "options": {**HPZ, **NOTHING_RESIDENT}}, **ALL, **SGD),
    of("zero", {"stage": 3, "offload": "parameters"}, **ALL, **SGD),
    of("ddp", ULYSSES, **RECOMPUTED, every=3, **SGD),
    of("ddp", GATHERED, **SELECTIVE, **SGD),
    of("ddp", offloaded=True, **ALL, **SGD),
    of("fsdp", offloaded=True, **EVERY_SECOND, **ALL, **SGD),
    of("zero", STAGE3, offloaded=True, **RECOMPUTED, **SGD),
    of("zero", {**STAGE3, "gather": "module"}, offloaded=True, **SGD),
    *(of("zero", STAGE3, **SELECTIVE, **SGD) for _ in range(not needs_reentrant_checkpointing())),
]
CARDS = [
    of("ddp", **SGD),
    of("fsdp", **RECOMPUTED, **SGD),
    of("fsdp", HOST, **ALL, **SGD),
    of("fsdp", GATHERED, packed=True, **SGD),
    of("fsdp", ULYSSES, **SGD),
    of("ddp", TENSOR, packed=True, **SGD),
    of("fsdp", WITHOUT_SP, **ALL, **SGD),
    of("ddp", PIPELINE, packed=True, **SGD),
    of("ddp", SCHEDULES[-1], **ALL, **SGD),
    of("fsdp", offloaded=True, **EVERY_SECOND, **SGD),
    of("ddp", offloaded=True, **ALL, **SGD),
    of("ddp", **SELECTIVE, **SGD),
    of("zero", {"stage": 3, "offload": "optimizer"}),
    of("zero", STAGE3, offloaded=True, **ALL, **SGD),
]
EIGHT = [of("ddp", BOTH, packed=True, **RECOMPUTED, **SGD), of("ddp", BOTH, **ALL, **SGD)]
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


def compared(
    world: int, cases: Sequence[ParityCase], backend: str = "cpu"
) -> dict[str, tuple[Result, Result]]:
    """By the name of each case its results, and those of the reference on the same rows."""
    alone = [json.dumps(dataclasses.asdict(case.alone())) for case in cases]
    each = list(dict.fromkeys(alone))
    known = dict(zip(each, results(1, [ParityCase(**json.loads(c)) for c in each]), strict=True))
    found = results(world, cases, backend)
    return {
        case.name: (one, known[reference])
        for case, one, reference in zip(cases, found, alone, strict=True)
    }


class CaseGroups:
    """Cases by group, whose results are made when the first of them is asked for.

    Args:
        groups: ranks, cases, and the backend if it is not the host's.
    """

    def __init__(self, **groups: tuple[Any, ...]) -> None:
        self._groups = groups
        self._made: dict[str, dict[str, tuple[Result, Result]]] = {}

    def cases(self, *slow: str) -> list[Any]:
        """Parameters of a test: group and case."""
        return [
            pytest.param(name, case, id=f"{name}: {case.name}", marks=[SLOW] * (name in slow))
            for name, (_, cases, *_) in self._groups.items()
            for case in cases
        ]

    def pair(self, name: str, case: ParityCase) -> tuple[Result, Result]:
        """(Of the case, which is forgotten then; of the reference.)"""
        if name not in self._made:
            if "sim" in self._groups[name]:
                pytest.importorskip("anygauge_sim", reason="needs `make plugins`")
            self._made[name] = compared(*self._groups[name])
        return self._made[name].pop(case.name)


def apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


CROSSED: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("ddp", {}),
        *(("fsdp", options) for options in ({}, STEP, HOST)),
        *(("ddp", options) for options in (TENSOR, WITHOUT_SP, *SCHEDULES)),
        ("fsdp", GATHERED),
        ("ddp", ULYSSES),
        *(("zero", options) for options in (*STAGES, STAGE3, *ON_HOST[:1], {"stage": 3, **HOST})),
    ],
    4: [
        *(("fsdp", options) for options in ({}, REPLICAS, TENSOR)),
        ("ddp", PIPELINE),
        ("ddp", GATHERED),
        ("zero", {"stage": 3, "options": HPZ}),
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
        pairs_of = compared(world, [case for row in rows for case in row])
        for (strategy, options), row in zip(given, rows, strict=True):
            *pairs, (adamw, alone) = (pairs_of[case.name] for case in row)
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
