"""What is known of each strategy before torch is imported: what it needs, and what it cannot do."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.interface import FULL, Level, Requirement, RunFileError, Support, UnsupportedError

if TYPE_CHECKING:
    from anygauge.config.schema import StrategySection
    from anygauge.interface import Backend
    from anygauge.interface.strategy import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyFacts:
    """A strategy as a dry run knows it.

    Attributes:
        needs: what it asks of a device.
        engine: the library that runs it, if that is not torch alone.
        optimizer_sees_full_parameters: see `Strategy`.
    """

    needs: Sequence[Requirement] = ()
    engine: str | None = None
    optimizer_sees_full_parameters: Support = FULL


FACTS = {
    "single": StrategyFacts(),
    "zero": StrategyFacts(
        needs=(Requirement(capability="collectives", because="ZeRO shards over ranks"),),
        engine="deepspeed",
        optimizer_sees_full_parameters=Support(
            Level.NOT_WRITTEN_YET, "DeepSpeed clips and updates flattened parts of weights itself"
        ),
    ),
}


def check_needs(backend: Backend, facts: StrategyFacts) -> None:
    """Refuse a device that lacks what a strategy needs, or cannot run its engine.

    Raises:
        UnsupportedError: quotes the backend's reason.
    """
    reason = backend.unsupported_engines.get(facts.engine or "")
    if reason is not None:
        raise UnsupportedError(
            f"backend {backend.name!r} cannot run {facts.engine}, which the strategy asked for "
            f"stands on: {reason}"
        )
    for need in facts.needs:
        support = backend.support(need.capability)
        if not support:
            raise UnsupportedError(
                f"backend {backend.name!r} lacks {need.capability!r}, needed because "
                f"{need.because}: {support}"
            )


def check_section(section: StrategySection) -> None:
    """Refuse options that the strategy does not take, or cannot run with.

    Raises:
        RunFileError: it takes no options.
        UnsupportedError: the options move the optimizer off the device.
    """
    if section.name != "zero":
        if section.options:
            raise RunFileError(
                f"strategy.options: {section.name!r} has none, but got "
                f"{', '.join(section.options)}; remove them"
            )
        return
    for name, value in section.options.items():
        if _offloads_optimizer(name, value):
            raise UnsupportedError(
                f"strategy.options.{name}: anygauge cannot train with an offloaded optimizer yet: "
                "DeepSpeed takes only an optimizer of its own there, and the field that permits "
                "another is outside of zero_optimization, which is all that strategy.options "
                "reaches. Leave it out; to save memory on the device, "
                "shard over more ranks or train an adapter"
            )


def check_known(section: StrategySection) -> None:
    """Refuse options that the DeepSpeed of this machine does not know, if there is one.

    Raises:
        RunFileError: names the field, and the nearest that exists.
    """
    known = (_zero_fields() or set()) if section.name == "zero" and section.options else set()
    for name in section.options:
        if known and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise RunFileError(
                f"strategy.options.{name}: DeepSpeed's zero_optimization has no such field"
                + (f"; did you mean {near[0]!r}?" if near else "")
                + ". Its fields are in DeepSpeed's configuration reference"
            )


def _zero_fields() -> set[str] | None:
    """Fields of zero_optimization, read from DeepSpeed's source: to import it takes seconds."""
    package = importlib.util.find_spec("deepspeed")
    if package is None or package.origin is None:
        return None
    file = Path(package.origin).with_name("runtime") / "zero" / "config.py"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    found = set()
    for kind in ast.walk(tree):
        if isinstance(kind, ast.ClassDef) and kind.name == "DeepSpeedZeroConfig":
            for field in (one for one in kind.body if isinstance(one, ast.AnnAssign)):
                found.add(ast.unparse(field.target))
                for word in field.value.keywords if isinstance(field.value, ast.Call) else ():
                    if word.arg == "alias" and isinstance(word.value, ast.Constant):
                        found.add(str(word.value.value))
    return found or None


def _offloads_optimizer(name: str, value: Any) -> bool:
    """Whether a field of DeepSpeed's zero_optimization moves the optimizer off the device.

    Its former name ends in ``_offload``, and is true or false.
    """
    if name == "offload_optimizer":
        device = value.get("device") if isinstance(value, dict) else value
        return device not in (None, "none")
    return name.endswith("_offload") and bool(value)


def check_types(section: StrategySection, precision: Precision) -> None:
    """Refuse types of numbers that the strategy does not combine.

    Raises:
        UnsupportedError: DeepSpeed has no such combination of stage and types.
    """
    if section.name == "zero":
        check_stage_types(section.stage, precision)


def check_stage_types(stage: int, precision: Precision) -> None:
    """The same for one stage of `zero`."""
    if stage == 0 and precision.reduce_dtype != precision.param_dtype:
        raise UnsupportedError(
            f"strategy zero, stage 0: DeepSpeed accumulates gradients in the compute type "
            f"({precision.param_dtype}) there, not in {precision.reduce_dtype}. Set "
            "precision.reduce_dtype: param_dtype, or strategy.stage: 1 or higher."
        )
