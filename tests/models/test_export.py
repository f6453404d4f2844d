"""What is saved: whole, verified, described; or not there under its name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from anygauge.interface import ModelError
from anygauge.models import verify as verification
from anygauge.models.export import atomic_folder, check_whole
from anygauge.models.verify import VerificationError, judge, no_room
from anygauge.training import save as saving
from tests.helpers.runs import Run, run_file, trained_here

COMMON: dict[str, Any] = {
    "strategy": {"name": "single"},
    "train": {"steps": 2, "optimizer": {"lr": 2.0e-2}},
    "data": {"eval_fraction": 0.2},
}
SECRET = "not-for-the-card"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A whole model."""
    folder = tmp_path_factory.mktemp("whole")
    return trained_here(run_file(folder, **COMMON, adapter=None))


@pytest.fixture(scope="module")
def adapter(whole: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An adapter on it."""
    return trained_here(adapter_file(whole, tmp_path_factory.mktemp("adapter")))


def adapter_file(whole: Run, folder: Path, **changes: Any) -> Path:
    return run_file(
        folder,
        **{
            **COMMON,
            "model": {"name": str(whole.folder / "model")},
            "environment": {"TOKEN": SECRET},
            "adapter": {"r": 3, "alpha": 24, "groups": [{"targets": ["lm_head"], "r": 2}]},
            **changes,
        },
    )


def test_peft_is_told_which_device_to_read_to(adapter: Run, whole: Run) -> None:
    """Left to itself, it would take a device that it knows, whichever one the run is on."""
    from transformers import AutoModelForCausalLM

    from anygauge.models.adapter import load_adapter

    base = AutoModelForCausalLM.from_pretrained(whole.folder / "model")
    guess = mock.Mock(side_effect=AssertionError("it guessed"))
    with (
        mock.patch("peft.peft_model.infer_device", guess),
        mock.patch("peft.utils.save_and_load.infer_device", guess),
    ):
        loaded = load_adapter(base, adapter.folder / "adapter")
    assert {p.device.type for p in loaded.parameters()} == {"cpu"}


# -- whole --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "b is missing"),
        ({"b": torch.ones(0)}, r"b has shape \(0,\), expected shape \(2, 3\)"),
        ({"b": torch.ones(3, 2)}, r"b has shape \(3, 2\)"),
        ({"b": torch.full((2, 3), torch.nan)}, "b holds values that are not numbers"),
    ],
)
def test_shards_and_gaps_are_never_written(tensors: dict[str, torch.Tensor], message: str) -> None:
    shapes = {"a": (2,), "b": (2, 3)}
    check_whole({"a": torch.ones(2), "b": torch.ones(2, 3)}, shapes)
    with pytest.raises(ModelError, match=message):
        check_whole({"a": torch.ones(2), **tensors}, shapes)
    with pytest.raises(ModelError, match="no tensor was trained"):
        check_whole({}, {})


def test_a_folder_is_complete_or_absent(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    left = tmp_path / ".adapter.part"  # by a kill
    left.mkdir()
    (left / "strange").touch()
    with atomic_folder(folder) as part:
        (part / "file").write_text("one")
    assert [p.name for p in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "one"
    with pytest.raises(RuntimeError), atomic_folder(folder) as part:
        (part / "file").write_text("two")
        raise RuntimeError
    assert (folder / "file").read_text() == "one"
    with atomic_folder(folder) as part:
        (part / "other").write_text("three")
    assert [p.name for p in folder.iterdir()] == ["other"], "nothing of the old one stays"
    with pytest.raises(VerificationError), atomic_folder(folder) as part:
        (part / "file").write_text("four")
        raise VerificationError
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "adapter-unverified"]
    assert (tmp_path / "adapter-unverified/file").read_text() == "four"


# -- verified -----------------------------------------------------------------------------------


def test_what_a_difference_means() -> None:
    single, half = torch.float32, torch.bfloat16
    assert judge(1e-6, 0.1, dtype=single, name="adapter").why == "equal within rounding"
    assert judge(2e-2, 0.1, dtype=half, name="adapter").reloaded
    assert "as large as what training changed" in judge(3e-3, 4e-3, dtype=half, name="adapter").why
    with pytest.raises(VerificationError, match=r"by 2\.0e-02 .*float32 allows 1e-03"):
        judge(2e-2, 0.1, dtype=single, name="adapter")
    with pytest.raises(VerificationError, match="the adapter is not what was trained"):
        judge(1.9e-2, 2e-2, dtype=half, name="adapter")
    with pytest.raises(VerificationError):
        judge(float("nan"), None, dtype=single, name="model")
    assert judge(6e-2, 0.5, dtype=half, name="adapter", rounding=2e-2).reloaded
    for difference, rounding in ((6e-2, 1e-2), (0.3, 1.0)):
        with pytest.raises(VerificationError, match="and rounding alone moves them by"):
            judge(difference, None, dtype=half, name="model", rounding=rounding)


def test_a_deep_model_may_differ_by_what_rounding_does_to_it() -> None:
    """32 layers in bfloat16, of which no constant says how far their logits are rounded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=32, vocab_size=90)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    probe = verification.probe_tokens(90)
    with torch.no_grad():
        trained = model(input_ids=probe).logits.float()
        rounded = model.float()(input_ids=probe).logits
    model.to(torch.bfloat16).set_attn_implementation("eager")

    def verified(logits: torch.Tensor) -> verification.Verification:
        asked: Any = {"dtype": torch.bfloat16, "name": "model"}
        model.set_attn_implementation("eager")
        return verification.verify(logits, lambda: model, **asked)

    for logits in (trained, rounded):
        found = verified(logits).logits
        assert found
        with mock.patch.dict(verification.TOLERANCE, {torch.bfloat16: found / 2}):
            assert verified(logits).logits == found
            with pytest.raises(VerificationError, match="and rounding alone moves them by"):
                verified(1.2 * logits)


@pytest.mark.parametrize("fault", ["saved wrongly", "cannot be checked"])
def test_an_adapter_that_is_not_verified_is_kept_under_another_name(
    fault: str, whole: Run, tmp_path: Path
) -> None:
    right = saving.save_adapter

    def wrong(*args: Any, **named: Any) -> None:
        right(*args, **named)
        path = args[2] / "adapter_model.safetensors"
        save_file({name: 0 * t for name, t in load_file(path).items()}, path)

    def fails(*args: Any, **named: Any) -> None:
        raise MemoryError("no room on the host")

    put, said = {
        "saved wrongly": (("save_adapter", wrong), "kept as adapter-unverified"),
        "cannot be checked": (
            ("load_for_inference", fails),
            r"no room on the host\. It was kept as adapter-unverified",
        ),
    }[fault]
    path = adapter_file(whole, tmp_path)
    with mock.patch.object(saving, *put), pytest.raises(VerificationError, match=said):
        trained_here(path)
    folder = tmp_path / "out/tiny"
    assert not (folder / "adapter").exists() and not (folder / "report.json").exists()
    assert len(load_file(folder / "adapter-unverified/adapter_model.safetensors")) == 30


@pytest.mark.parametrize("reason", ["memory", "off"])
def test_the_summary_says_what_was_not_verified(whole: Run, tmp_path: Path, reason: str) -> None:
    path = adapter_file(whole, tmp_path, adapter={"r": 2, "verify": reason != "off"})
    with mock.patch.object(verification, "available_memory", lambda: 1000):
        run = trained_here(path)
    verified = json.loads((run.folder / "report.json").read_text())["verified"]
    assert (verified["reloaded"], verified["logits"]) == (False, None)
    said = "0.0 GiB are available" if reason == "memory" else "adapter.verify is false"
    assert said in verified["why"]
    assert said in (run.folder / "adapter/README.md").read_text()


def test_room_is_needed_for_a_copy_in_the_compute_type() -> None:
    elements = 1_000_000
    with mock.patch.object(verification, "available_memory", lambda: 3_000_000):
        assert no_room(elements, torch.bfloat16) == ""
        assert "not compared" in no_room(elements, torch.float32)
        assert "not compared" in no_room(4 * elements, torch.bfloat16)


def test_whole_models_are_verified_too(whole: Run) -> None:
    verified = json.loads((whole.folder / "report.json").read_text())["verified"]
    assert verified["reloaded"] and verified["logits"] < 1e-5 and verified["effect"] is None


# -- described ----------------------------------------------------------------------------------


def front_matter(card: str) -> dict[str, Any]:
    fields = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(fields, dict)
    return fields


def python_blocks(card: str) -> Iterator[str]:
    yield from re.findall(r"^```python\n(.*?)^```$", card, re.M | re.S)


def test_the_card_says_how_it_was_made(adapter: Run) -> None:
    card = (adapter.folder / "adapter/README.md").read_text()
    fields = front_matter(card)
    assert fields["library_name"] == "peft" and "lora" in fields["tags"]
    assert "base_model" not in fields, "a folder is not a name on the hub"
    report = json.loads((adapter.folder / "report.json").read_text())
    for said in (
        "from `model`",
        "| data | `rows.jsonl` |",
        f"| rows | {report['data']} |",
        "LoRA, rank 3, alpha 24",
        "`all-linear`; `lm_head`: rank 2, alpha 24",
        "adamw, lr 0.02",
        "| seed | 0 |",
        f"| first step | {report['first_loss']:.4f} |",
        f"| last step | {report['final_loss']:.4f} |",
        f"{report['evaluations'][-1]['eval_loss']:.4f}",
        f"{report['verified']['logits']:.1e}",
        f"| torch | {torch.__version__} |",
        "single",
    ):
        assert said in card, said


def test_the_card_names_no_folder_and_no_secret(whole: Run, adapter: Run) -> None:
    for folder in (whole.folder / "model", adapter.folder / "adapter"):
        card = (folder / "README.md").read_text()
        assert SECRET not in card and "TOKEN" not in card
        assert str(whole.folder.parents[2]) not in card
        assert str(adapter.folder.parents[2]) not in card


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_the_cards_code_runs(
    whole: Run, adapter: Run, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = (adapter if kind == "adapter" else whole).folder / kind
    card = (folder / "README.md").read_text()
    monkeypatch.chdir(folder)
    blocks = list(python_blocks(card))
    assert len(blocks) == 1
    names: dict[str, Any] = {}
    exec(compile(blocks[0], "card", "exec"), names)
    assert type(names["model"]).__name__ == (
        "PeftModelForCausalLM" if kind == "adapter" else "LlamaForCausalLM"
    )


def test_a_base_on_the_hub_is_named_with_its_revision() -> None:
    from anygauge.config.schema import RunFile
    from anygauge.models.card import Facts, run_card

    run = RunFile.model_validate(
        {
            "model": {"name": "owner/base", "revision": "abc"},
            "adapter": {"dora": True},
            "data": {
                "train": [
                    {"path": "/home/someone/rows.jsonl"},
                    {"path": "https://someone.example/d/more.csv?signature=someone"},
                    {"path": "owner/rows"},
                ]
            },
        }
    )
    facts = Facts(
        device="x",
        backend="b",
        strategy="s, stage 4",
        ranks=2,
        precision="p",
        data="d",
        steps=1,
        tokens=1,
        first_loss=1.0,
        final_loss=1.0,
        evaluations=[],
        verified={"reloaded": False, "why": "not compared: w"},
        versions={},
    )
    card = run_card(run, facts)
    assert front_matter(card)["base_model"] == "owner/base"
    assert front_matter(card)["base_model_relation"] == "adapter"
    assert "`owner/base`, revision `abc`" in card
    assert "| strategy | s, stage 4 |" in card
    assert "DoRA adapter" in card and "someone" not in card
    assert "`rows.jsonl`, `more.csv`, `owner/rows` (train)" in card
