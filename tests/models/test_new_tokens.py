"""New tokens: what their rows begin with, how they are trained, and that others can load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from anygauge.cli import run as command
from anygauge.config.load import load_run_file
from anygauge.config.resolved import dump_run
from anygauge.config.schema import ModelSection
from anygauge.interface import AnygaugeError, ModelError
from anygauge.models.model_files import LazyTensor
from anygauge.models.source import load_config
from anygauge.models.tokenizer import load_tokenizer
from anygauge.models.verify import probe_tokens, relative_difference
from anygauge.models.vocabulary import EnlargedValue, NewTokens, new_tokens, start_rows
from tests.helpers.runs import check_here, run_file, save_tiny, trained_here
from tests.helpers.tiny_tokenizer import VOCABULARY

MODEL = {"new_tokens": ["gaugeword"], "new_special_tokens": ["<|user|>", "<|end|>"]}
PLAIN: dict[str, Any] = {"strategy": {"name": "single"}, "precision": {"param_dtype": "float32"}}


def base(folder: Path, **config: Any) -> Path:
    """A model that transformers saved, with its tokenizer, and no rows to spare."""
    return save_tiny(folder, {"vocab_size": VOCABULARY, **config})


def rows_of_text(folder: Path) -> str:
    """Training rows in which the new tokens stand."""
    path = folder / "new.jsonl"
    rows = [
        {"prompt": f"<|user|> say gaugeword {n}", "completion": f"gaugeword {n}<|end|>"}
        for n in range(24)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def file(folder: Path, model: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    data = {"train": {"path": rows_of_text(folder)}, "max_length": 64}
    return run_file(
        folder, **{**PLAIN, "model": {"name": str(model), **MODEL}, "data": data, **changes}
    )


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base(tmp_path_factory.mktemp("base") / "model", tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def one_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what does not depend on the output layer."""
    return base(tmp_path_factory.mktemp("one") / "model")


def logits(model: Any) -> torch.Tensor:
    ids = torch.cat([probe_tokens(VOCABULARY), torch.tensor([[VOCABULARY, VOCABULARY + 2]])], 1)
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids).logits
    return found


def by_hand(model: Path, adapter: Path) -> Any:
    """The lines that docs/vocabulary.md gives to users, run as they stand there."""
    page = (Path(__file__).parents[2] / "docs" / "vocabulary.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    for there, here in (("runs/first/adapter", adapter), ("HuggingFaceTB/SmolLM2-135M", model)):
        assert there in code
        code = code.replace(there, str(here))
    names: dict[str, Any] = {}
    exec(code, names)
    return names["model"]


def test_rows_are_trained_and_load_with_plain_peft(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = file(tmp_path / "run", model)
    assert command(["train", str(path), "--dry-run"]) == 0
    assert "3 new tokens, numbers 400 to 402; the embedding has 403" in capsys.readouterr().out
    run = trained_here(path)
    assert load_run_file(run.folder / "run.yaml").model.new_special_tokens == [
        "<|user|>",
        "<|end|>",
    ]
    adapter = run.folder / "adapter"
    report = json.loads((run.folder / "report.json").read_text())
    assert report["verified"]["logits"] < 1e-3
    names = [n for n in load_file(adapter / "adapter_model.safetensors") if "trainable_tokens" in n]
    tied = json.loads((model / "config.json").read_text())["tie_word_embeddings"]
    assert len(names) == (1 if tied else 2)
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    assert tokenizer.tokenize("gaugeword<|end|>") == ["gaugeword", "<|end|>"]
    assert tokenizer.decode([VOCABULARY, VOCABULARY + 2], skip_special_tokens=True) == "gaugeword"

    one, other = logits(by_hand(model, adapter)), logits(by_hand(model, adapter))
    assert torch.equal(one, other)  # resizing draws: nothing of that may be left
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(adapter)), one)
    merged = tmp_path / "merged"
    assert command(["merge", str(run.folder), "--output", str(merged)]) == 0
    whole = AutoModelForCausalLM.from_pretrained(merged)
    assert whole.config.vocab_size == VOCABULARY + 3 == len(AutoTokenizer.from_pretrained(merged))
    assert relative_difference(logits(whole), one) < 1e-5
    answer = ["--prompt", "<|user|> say", "--max-new-tokens", "4", "--backend", "cpu"]
    assert command(["generate", str(run.folder), *answer]) == 0
    named = ["generate", str(model), "--adapter", str(adapter), "--raw", *answer]
    assert command(named) == 0
    before = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    rows = load_file(adapter / "adapter_model.safetensors")[names[-1]]
    assert (rows - before.double().mean(0).float()).abs().max() > 0


def test_all_weights_are_saved_with_the_new_size(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = trained_here(file(tmp_path / "run", model, adapter=None))
    saved = AutoModelForCausalLM.from_pretrained(run.folder / "model")
    assert saved.config.vocab_size == VOCABULARY + 3
    assert saved.get_input_embeddings().weight.shape[0] == VOCABULARY + 3
    assert AutoTokenizer.from_pretrained(run.folder / "model").tokenize("gaugeword") == [
        "gaugeword"
    ]


def new_tokens_of(model: Path) -> NewTokens:
    section = ModelSection(name=str(model), **MODEL)
    new = new_tokens(section, load_config(section), load_tokenizer(section), 0)
    assert new is not None
    return new


def test_rows_to_spare_are_used(tmp_path: Path) -> None:
    model = base(tmp_path / "model", vocab_size=VOCABULARY + 2)
    new = new_tokens_of(model)
    assert (new.rows, new.rows_before) == (VOCABULARY + 3, VOCABULARY + 2)
    assert "2 of them in spare rows of the embedding" in str(new)
    run = trained_here(file(tmp_path / "run", model))
    indices = json.loads((run.folder / "adapter" / "adapter_config.json").read_text())
    assert indices["trainable_token_indices"] == {
        name: [VOCABULARY, VOCABULARY + 1, VOCABULARY + 2]
        for name in ("model.embed_tokens", "lm_head")
    }
    assert logits(by_hand(model, run.folder / "adapter")).isfinite().all()


WHOLE = {"modules_to_save": ["embed_tokens", "lm_head"]}


@pytest.mark.parametrize("adapter", [{}, WHOLE], ids=["rows", "whole"])
def test_they_load_into_a_base_with_rows_to_spare_and_can_be_continued(
    tmp_path: Path, adapter: dict[str, Any]
) -> None:
    from peft import AutoPeftModelForCausalLM

    model = base(tmp_path / "model", vocab_size=VOCABULARY + 8)
    common: dict[str, Any] = {"train": {"steps": 2, "eval_at_start": True}}
    common["data"] = {"train": {"path": rows_of_text(tmp_path)}, "eval_fraction": 0.2}
    first = trained_here(file(tmp_path / "run", model, adapter={"r": 4, **adapter}, **common))
    folder = first.folder / "adapter"
    found = logits(by_hand(model, folder))
    assert found.shape[-1] == VOCABULARY + 8
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(folder)), found)

    for name, strategy in (("single", "single"), ("fsdp", "fsdp")):
        path = file(
            tmp_path / "run", model, name=name, strategy={"name": strategy}, adapter=None, **common
        )
        fields = yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump({**fields, "adapter": {"start_from": str(folder)}}))
        second = trained_here(path)
        assert second.evaluations()[0] == pytest.approx(first.evaluations()[-1], rel=1e-6)
        assert second.steps("loss")[-1] < first.steps("loss")[-1]
    fields["model"]["new_tokens"] = ["gaugeword", "another"]
    path.write_text(yaml.safe_dump({**fields, "adapter": {"start_from": str(folder)}}))
    if not adapter:
        with pytest.raises(ModelError, match=r"tokens 400 to 402, .*new tokens are 400 to 403"):
            trained_here(path)


def test_a_run_goes_on_with_them(one_model: Path, tmp_path: Path) -> None:
    path = file(tmp_path / "run", one_model, checkpoint={"every": 2, "keep_last": 4})
    whole = trained_here(path)
    step2 = whole.folder / "checkpoints" / "step-00000002"
    assert (step2 / "adapter" / "tokenizer_config.json").is_file()
    resume = {"checkpoint.resume": str(step2)}
    assert trained_here(path, name="on", **resume).steps("loss") == whole.steps("loss")[2:]
    with pytest.raises(AnygaugeError, match=r"model\.new_tokens"):
        trained_here(path, name="other", **resume, **{"model.new_tokens": ["otherword"]})


def test_what_rows_begin_with() -> None:
    old = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0))
    old = old @ torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.1]]) + 5
    value = LazyTensor(old, tuple(old.shape), old.dtype)
    mean = start_rows(value, 20_000, 4, "mean", 0)
    torch.testing.assert_close(mean, old.mean(0).expand(4, 3))
    drawn = start_rows(value, 20_000, 5000, "normal", 0)
    torch.testing.assert_close(drawn.mean(0), old.mean(0), rtol=0, atol=0.1)
    torch.testing.assert_close(drawn.T.cov(), old.T.cov(), rtol=0.1, atol=0.1)
    assert not torch.equal(drawn, start_rows(value, 20_000, 5000, "normal", 1))


def test_parts_of_an_enlarged_value() -> None:
    old = torch.arange(12.0).reshape(6, 2)
    new = -torch.ones(3, 2, dtype=torch.float64)
    for first in (4, 6, 2):
        whole = torch.cat([old, old.new_zeros(max(first + 3 - 6, 0), 2)])
        whole[first : first + 3] = -1
        value = EnlargedValue(LazyTensor(old, (6, 2), old.dtype), new, first)
        assert value.shape == tuple(whole.shape)
        assert torch.equal(value.read((...,)), whole) and value.read((...,)).dtype == old.dtype
        for start in range(len(whole)):
            for end in range(start + 1, len(whole) + 1):
                part = (slice(start, end), slice(1, 2))
                assert torch.equal(value.read(part), whole[part]), (first, part)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"new_tokens": ["a b", " "]}, "' ' is empty"),
        ({"new_tokens": ["xyzzy"], "new_special_tokens": ["xyzzy"]}, "'xyzzy' is listed twice"),
        ({"new_special_tokens": ["</s>"]}, "'</s>' is already token 1 of the tokenizer"),
    ],
)
def test_tokens_that_are_none(one_model: Path, fields: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_tokenizer(ModelSection(name=str(one_model), **fields))


def test_a_file_of_tokens(one_model: Path, tmp_path: Path) -> None:
    path = file(tmp_path / "run", one_model)
    fields = yaml.safe_load(path.read_text())
    (path.parent / "tokens.txt").write_text("gaugeword\r\nother word\r\n", encoding="utf-8-sig")
    fields["model"] = {"name": str(one_model), "new_tokens": "tokens.txt"}
    path.write_text(yaml.safe_dump(fields))
    run = load_run_file(path)
    assert load_tokenizer(run.model).tokenize("other word") == ["other word"]
    assert "tokens.txt" in dump_run(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter": {"targets": ["lm_head"]}}, "factors on lm_head"),
        ({"strategy": {"name": "ddp", "tp": 2}}, "strategy.tp divides layers"),
        ({"strategy": {"name": "ddp", "pp": 2}}, "strategy.pp gives them to several stages"),
    ],
)
def test_refused_before_ranks_start(
    one_model: Path, tmp_path: Path, changes: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_here(monkeypatch)
    devices = {"launch": {"devices": 2}} if "strategy" in changes else {}
    path = file(tmp_path / "run", one_model, **devices, **changes)
    with pytest.raises(AnygaugeError, match=message):
        command(["train", str(path), "--dry-run"])
