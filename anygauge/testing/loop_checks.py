"""The real loop on a backend, and the same run file on the host: what is trained, how runs are
judged, and what is said when one fails."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from anygauge.config.strategies import StrategySection
from anygauge.interface import HOST_DEVICE, StrategySpec
from anygauge.kernels.choose import ADAMW, choose_kernels
from anygauge.registry import Registry, missing_of
from anygauge.testing.bisect import cause_of
from anygauge.testing.check import progress, sharding_spec
from anygauge.testing.process import Subject, answer_of, last_lines
from anygauge.training.auto import AUTO

TIMEOUT_S = 900.0
STEPS = 6
MIDDLE = 3
"""Steps between evaluations, and between checkpoints."""
MODEL: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 384,
    "max_position_embeddings": 128,
    # Ten times the usual: attention then decides the losses, and a wrong one shows.
    "initializer_range": 0.2,
}
TEXT = (
    "a device is a plugin and the loop asks it for properties; rows of several lengths make batches"
    " of several shapes, and every rank has its part of them"
)
LOSS, NORM, EVALUATION = "loss", "grad_norm", "eval_loss"
"""What runs are compared by: fields of the records of ``metrics.jsonl``."""
ON_HOST = ("eager", "sdpa")
"""Attention of the model library that the host has too: both sides run the same one."""
NOISE = {"float32": 2e-6, "bfloat16": 5e-3}
"""Largest relative difference of a loss from the host's, by compute type, where no author states
another: ten times what sound devices differ by, and more than twice what one does whose roundings
all go the other way. Of a gradient's norm ten times as much."""
WORDS = {
    LOSS: "the loss of",
    NORM: "the gradient's norm of",
    EVALUATION: "the loss of the evaluation after",
}
CHECKPOINTS = {"every": MIDDLE, "keep_last": 5}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "adapter": {"checkpoint": CHECKPOINTS},
    "packed": {
        # A prime, so that neither pairs nor blocks of any kind divide a row.
        "data": {"packing": True, "max_length": 83},
        "train": {"micro_batch_size": 2},
    },
    "whole": {"adapter": None},
    "dropout": {"adapter": {"r": 4, "dropout": 0.2}, "checkpoint": CHECKPOINTS},
    "spread": {},
}
"""What is trained: sections of the run file. ``spread`` is ``adapter`` with any strategy, which may
have no checkpoints."""


class RunFailed(AssertionError):
    """A run in `folder` ended with another status than 0; its message is what it printed."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRun:
    """A run that ended well, with every record of ``metrics.jsonl``."""

    folder: Path
    metrics: Sequence[Mapping[str, Any]] = field(repr=False)

    @property
    def losses(self) -> list[float]:
        """The loss of every step, nats per loss token."""
        return [record[LOSS] for record in self.metrics if LOSS in record]

    @property
    def numbers(self) -> Mapping[tuple[str, int], float]:
        """Every loss, norm and evaluation, by its name and step from 1, in the order of training;
        of an evaluation, the steps done before it."""
        found = {
            (what, record["step"]): record[what]
            for record in self.metrics
            for what in (LOSS, NORM, EVALUATION)
            if what in record
        }
        # An evaluation comes after the update of its step, and before the next step.
        return dict(sorted(found.items(), key=lambda each: (each[0][1], each[0][0] == EVALUATION)))

    @property
    def checkpoints(self) -> Sequence[Path]:
        """The checkpoints' folders, the earliest first."""
        return sorted((self.folder / "checkpoints").iterdir())


def _prepare(folder: Path) -> None:
    """Write rows and a tokenizer of bytes into a folder, unless they are there."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if (folder / "tokenizer").exists():
        return
    words, symbols = TEXT.split(), ("<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()))
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(folder / "tokenizer")
    for name, numbers in (("rows", range(64)), ("held_out", range(64, 73))):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as rows:
            for number in numbers:
                row = [words[(number * 7 + at * 3) % len(words)] for at in range(2 + number % 9)]
                prompt, completion = " ".join(row[:2]) + " ", " ".join(row[2:]) or "so"
                rows.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")


def host_kernels(subject: Subject, *, adapter: bool) -> dict[str, str]:
    """Operation -> what the host must compute with to round as a backend does, by its formulas; of
    a process with the subject's variables, which may say where plugins are."""
    request = (subject.name, dict(subject.options), adapter)
    environment = {**os.environ, **subject.environment}
    return dict(answer_of(kernels_for_both, request, environment, "the backend's kernels"))


def kernels_for_both(name: str, options: Mapping[str, Any], adapter: bool) -> dict[str, str]:
    registry = Registry.load()
    backend = registry.create_backend(name, options)
    shared = ("linear_cross_entropy", *(["lora_linear"] if adapter else []))
    found = {}
    for operation, choice in choose_kernels(registry, backend, {}).items():
        spec = choice.provided.spec if choice.provided else None
        if operation == ADAMW and spec and spec.counterpart:
            found[operation] = spec.counterpart
        elif operation in shared and not (spec and spec.device_types):
            found[operation] = choice.name
    return found


def train(
    subject: Subject,
    folder: Path,
    name: str,
    *,
    strategy: str,
    ranks: int,
    dtype: str,
    host: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> TrainRun:
    """Train the tiny model.

    Args:
        folder: for what runs need, and for their own folders.
        host: on the host's own backend instead, for comparison; attention and kernels that serve
            every device stay the subject's.
        changes: sections of the run file that replace the usual ones; of ``data`` and ``train``,
            fields.

    Raises:
        RunFailed: with what the run printed.
    """
    _prepare(folder)
    backend, given = subject.create(), dict(changes or {})
    # Where a strategy can choose how layers recompute, as the device needs.
    fields = StrategySection.of_plugin(strategy or None).model_fields
    reentrant = backend.graph.reentrant_only and "reentrant" in fields
    run = {
        "name": name,
        "output": str(folder),
        "backend": HOST_DEVICE if host else subject.name,
        "backend_options": {} if host else dict(subject.options),
        "model": {
            "config": dict(MODEL),
            "tokenizer": str(folder / "tokenizer"),
            "attention": backend.attention if backend.attention in ON_HOST else ON_HOST[0],
        },
        "adapter": {"r": 4, "dropout": 0.0},
        "data": {
            "train": {"path": str(folder / "rows.jsonl")},
            "eval": {"path": str(folder / "held_out.jsonl")},
            "max_length": 96,
            "cache": "off",
            **given.pop("data", {}),
        },
        "train": {
            "steps": STEPS,
            "global_batch_size": 4,
            "micro_batch_size": 1,
            "optimizer": {"lr": 2.0e-3},
            "eval_every": MIDDLE,
            "eval_at_start": True,
            **given.pop("train", {}),
        },
        "precision": {"param_dtype": dtype},
        "strategy": {"name": strategy, **({"reentrant": True} if reentrant and not host else {})},
        "launch": {"devices": ranks},
        **given,
    }
    if host:
        run["kernels"] = host_kernels(subject, adapter=run["adapter"] is not None)
    progress(f"{subject.name} in the loop: {name}")
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "anygauge.cli", "train", str(path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", **subject.environment},
    )
    if done.returncode:
        said = last_lines(done.stdout + done.stderr, 4)
        why = f"anygauge train ended with status {done.returncode}: {said}"
        raise RunFailed(why, folder / name)
    text = (folder / name / "metrics.jsonl").read_text(encoding="utf-8")
    return TrainRun(folder=folder / name, metrics=[json.loads(one) for one in text.splitlines()])


# -- how runs are judged --------------------------------------------------------------------------


def compare_runs(
    found: TrainRun, wanted: TrainRun, allowed: Mapping[str, float], where: str = "on the host"
) -> tuple[Mapping[str, float], int, str]:
    """Every loss, norm and evaluation of a run beside another's, in the order of training.

    Args:
        wanted: the other, whose last steps it has.
        allowed: relative, by `LOSS`, `NORM` and `EVALUATION`.
        where: the other was made, in words.

    Returns:
        The largest relative difference, by the same; the step from 1 of the first number that is
        further away than is allowed or is not a number, 0 if there is none, or if it was evaluated
        before the first step; and that number in words, empty if there is none.
    """
    mine, others = ([step for what, step in run.numbers if what == LOSS] for run in (found, wanted))
    assert mine and mine == others[len(others) - len(mine) :], (
        f"it trained steps {mine}, not {others}"
    )
    most: dict[str, float] = {}
    step, wrong = 0, ""
    for (what, at), number in found.numbers.items():
        due = wanted.numbers[what, at]
        away = abs(number - due) / abs(due)
        most[what] = max(most.get(what, 0.0), away)
        if not away <= allowed[what] and not wrong:
            step = at
            wrong = (
                f"{WORDS[what]} step {at} is {number:.9g}, {where} {due:.9g}: {away:.1e} away, "
                f"{allowed[what]:.1e} is allowed"
            )
    return most, step, wrong


@dataclass(slots=True)
class LoopTrials:
    """The runs of one backend; each is made once.

    Attributes:
        stated: the author's largest relative difference from the host, by compute type; `NOISE`
            stands for the rest.
        made: runs, by name.
        figures: for the report: what was compared -> the largest difference, and what is allowed.
    """

    subject: Subject
    folder: Path
    stated: Mapping[str, float] = field(default_factory=dict)
    made: dict[str, TrainRun] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        kind: str,
        dtype: str = "float32",
        *,
        spec: StrategySpec | None = None,
        ranks: int = 1,
        host: bool = False,
        resume: Path | None = None,
    ) -> TrainRun:
        """Train, unless it was done before.

        Args:
            kind: one of `KINDS`.
            spec: the strategy; None for whole models on one rank.
            resume: a checkpoint of another of these runs.

        Raises:
            RunFailed: with what the run printed.
        """
        strategy = spec or next(p.spec for p in Registry.load().strategies if p.spec.reference)
        place = "host" if host else "device"
        name = f"{place}-{kind}-{strategy.name}{ranks}-{dtype}"
        name += f"-from-{resume.parents[1].name}" if resume else ""
        if name not in self.made:
            changes = dict(KINDS[kind])
            if resume is not None:
                changes["checkpoint"] = {**CHECKPOINTS, "resume": str(resume)}
            self.made[name] = train(
                self.subject,
                self.folder,
                name,
                strategy=strategy.name,
                ranks=ranks,
                dtype=dtype,
                host=host,
                changes=changes,
            )
        return self.made[name]

    def tolerances(self, dtype: str, tolerance: float | None = None) -> dict[str, float]:
        """Largest relative differences from the host's run; of norms ten times the most of all.

        Args:
            tolerance: of a strategy, or 0, where sums are in another order: what is stated does
                not lower what is usual; None where they are not.
        """
        stated = self.stated.get(dtype)
        most = max(NOISE[dtype], stated or 0.0, tolerance or 0.0)
        loss = most if stated is None or tolerance is not None else stated
        return {LOSS: loss, EVALUATION: loss, NORM: 10 * most}

    def trial(
        self,
        kind: str,
        dtype: str = "float32",
        *,
        spec: StrategySpec | None = None,
        ranks: int = 1,
        resumed: bool = False,
    ) -> str:
        """Why a run is not that of one process on the host, within what is allowed, and the cause;
        empty if it is.

        Args:
            resumed: from the middle of one process's run on the device.

        Raises:
            RunFailed: of a run that it is compared with, or resumed from.
        """
        resume = self.run("adapter", dtype).checkpoints[0] if resumed else None
        host = self.run("adapter" if kind == "spread" else kind, dtype, host=True)
        allowed = self.tolerances(dtype, spec.tolerance if spec else None)
        try:
            found = self.run(kind, dtype, spec=spec, ranks=ranks, resume=resume)
        except RunFailed as error:
            folder, step, wrong = error.folder, STEPS, str(error)
            if not (folder / "run.json").exists():
                return wrong  # it came to no step
        else:
            most, step, wrong = compare_runs(found, host, allowed)
            folder, step = found.folder, max(1, step)
            what = f"{spec.name} on {ranks}" if spec else f"{kind}, {dtype}"
            for title, names in (("losses", (LOSS, EVALUATION)), ("gradients' norms", (NORM,))):
                self.figures[f"{title}, {'resumed with ' if resume else ''}{what}"] = (
                    f"{max(most[name] for name in names):.1e} from the host's at most; "
                    f"{allowed[names[0]]:.1e} allowed"
                )
        if not wrong:
            return ""
        cause = cause_of(self.subject, self.folder, folder, step, ranks=ranks)
        return f"{wrong}; {cause}"

    def try_strategies(self, specs: Sequence[StrategySpec], ranks: int) -> str:
        """What is wrong with each strategy, in words; empty if nothing is. The figures have those
        that say nothing of a device."""
        wrong = []
        for spec in specs:
            why = self.trial("spread", spec=spec, ranks=1 if spec.single_process else ranks)
            if is_beside(spec):
                figure = f"beside the verdict: strategy {spec.name} on {ranks}"
                self.figures[figure] = why or "as one process"
            elif why:
                wrong.append(f"{spec.name}: {why}")
        return "; ".join(wrong)

    def try_resume(self, spec: StrategySpec | None = None, ranks: int = 1) -> str:
        """Why a run, without a strategy one that drops out, does not go on from its middle as it
        was, to the last digit unless sums vary; empty if it does."""
        kind = "adapter" if spec else "dropout"
        whole = self.run(kind, spec=spec, ranks=ranks)
        rest = self.run(kind, spec=spec, ranks=ranks, resume=whole.checkpoints[0])
        if kind == "dropout" and self.run("adapter").losses == whole.losses:
            return "with adapter.dropout 0.2 the losses are those without it: nothing is dropped"
        if len(rest.losses) == len(whole.losses):
            return f"it trained {len(rest.losses)} steps from the middle of as many"
        usual = {LOSS: 0.0, NORM: math.inf, EVALUATION: math.inf}
        if spec:
            usual[LOSS] = max(spec.tolerance, 1e-6)
        elif self.subject.create().sums_vary:  # it says so: resumed, it differs no more than they
            usual = self.tolerances("float32")
        *_, wrong = compare_runs(rest, whole, usual, "in the undisturbed run")
        return wrong and (
            f"after a resume from step {MIDDLE} {wrong}: a state, a generator or the place in the "
            "data is not restored"
        )


def strategies(subject: Subject) -> tuple[list[StrategySpec], dict[str, str]]:
    """(Strategies whose needs the device meets, `sharding_spec` first; why not the rest)."""
    backend, refused = subject.create(), {}
    specs = [plugin.spec for plugin in Registry.load().strategies]
    specs = [spec for spec in specs if not spec.reference and spec.name != AUTO]
    specs.sort(key=lambda spec: spec.name != sharding_spec().name)
    for spec in specs:
        lacking = [str(s) for s in map(backend.support, spec.needs) if not s]
        whys = (*lacking, backend.unsupported_engines.get(spec.engine), missing_of(spec))
        if why := next(filter(None, whys), ""):
            refused[spec.name] = why
    return [spec for spec in specs if spec.name not in refused], refused


def is_beside(spec: StrategySpec) -> bool:
    """Whether a strategy says nothing of a device: one of another distribution than anygauge's, or
    one that is approximate by design. Its own kit is ``--anygauge-strategy``."""
    plugin = Registry.load().find_strategy(spec.name)
    return spec.tolerance > 0 or plugin.distribution != "anygauge"
