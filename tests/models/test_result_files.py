"""What stands beside a result's weights: enough to prompt it and to stop it, and the base's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.cli import run as command
from anygauge.cli.trained import model_origin
from anygauge.config.schema import ModelSection
from anygauge.interface import ModelError
from anygauge.models.result_files import ResultFiles
from anygauge.models.source import load_config
from anygauge.models.tokenizer import load_tokenizer
from tests.helpers.chats import make_chat_tokenizer, template
from tests.helpers.runs import TINY, Run, run_file, tiny_model, trained_here
from tests.standins.hub import TOKEN, Hub, Repository, use_hub

QUESTION = "Say it."
ASKED = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "ok<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KINDS = ("model", "adapter", "checkpoint", "merged")
BESIDE = ("chat_template.jinja", "generation_config.json", "tokenizer.json")


def save_fields(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(fields, indent=1))


def fields_of(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


def make_base(folder: Path, own_template: str | None, ends: list[str]) -> Path:
    """A base in the words of transformers 4, with what no library would write by itself."""
    tokenizer: Any = make_chat_tokenizer(folder)
    tiny_model().save_pretrained(folder)
    save_fields(
        folder / "config.json",
        **TINY,
        architectures=["LlamaForCausalLM"],
        torch_dtype="float32",
        rope_theta=500000.0,
        publisher="somebody",
        eos_token_id=1,
    )
    save_fields(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token="</s>",
        padding_side="left",
        **({} if own_template is None else {"chat_template": own_template}),
    )
    (folder / "generation_config.json").unlink()
    if ends:
        ids = tokenizer.convert_tokens_to_ids(ends)
        fields = {"_from_model_config": True, "eos_token_id": ids, "do_sample": True}
        save_fields(folder / "generation_config.json", **fields, temperature=0.7)
    return folder


@pytest.fixture(scope="module", params=["two ends and no template", "another template"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    if request.param == "another template":
        return make_base(folder, template("inst"), [])
    return make_base(folder, None, ["</s>", "<|eot_id|>"])


@pytest.fixture(scope="module")
def results(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Trained with `data.chat_template` until the answer is learned by heart."""
    folder = tmp_path_factory.mktemp("runs")
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "ok"}]
    (folder / "rows.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
    (folder / "chatml.jinja").write_text(CHATML)

    def run(name: str, **changes: Any) -> Run:
        data = {"path": str(folder / "rows.jsonl")}
        steps = {"steps": 40, "optimizer": {"lr": 1.0e-2}}
        fields: dict[str, Any] = {
            "name": name,
            "model": {"name": str(base)},
            "strategy": {"name": "single"},
            "precision": {"param_dtype": "float32"},
            "data": {"train": data, "chat_template": str(folder / "chatml.jinja")},
            "train": steps,
        }
        return trained_here(run_file(folder, **fields, **changes))

    whole = run("whole", adapter=None)
    adapted = run("adapted", adapter={"r": 16, "alpha": 32}, checkpoint={"every": 40})
    assert command(["merge", str(adapted.folder), "--output", str(folder / "merged")]) == 0
    (checkpoint,) = adapted.folder.glob("checkpoints/*/adapter")
    paths = (whole.folder / "model", adapted.folder / "adapter", checkpoint, folder / "merged")
    return dict(zip(KINDS, paths, strict=True))


def by_plain_libraries(folder: Path, base: Path, beside: Path) -> Any:
    """The model of a result; of its base, an adapter gets the weights and what builds them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, GenerationConfig

    if not (folder / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(folder).eval()
    beside.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(base / name, beside)
    model = AutoModelForCausalLM.from_pretrained(beside)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return PeftModel.from_pretrained(model, folder).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_plain_libraries_ask_and_stop_as_trained(
    results: Mapping[str, Path], base: Path, kind: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(results[kind])
    turns = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == ASKED
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    model = by_plain_libraries(results[kind], base, tmp_path / "weights")
    answer = model.generate(input_ids=ids, do_sample=False, max_new_tokens=20)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == ANSWER


@pytest.mark.parametrize("kind", ["model", "adapter", "merged"])
def test_what_was_pushed_is_asked_and_stops_as_trained(
    results: Mapping[str, Path],
    base: Path,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    published, before = (
        {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in (base, results[kind])
    )
    run = results[kind] if kind == "merged" else results[kind].parent
    with Hub({"them/base": Repository(files=published)}) as hub:
        use_hub(monkeypatch, hub, tmp_path)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert command(["push", str(run), "me/it", "--base", "them/base"]) == 0
        sent = hub.repositories["me/it"].files
        assert sent.keys() == before.keys()
        assert str(base).encode() not in b"".join(sent.values())
        loading = AutoPeftModelForCausalLM if kind == "adapter" else AutoModelForCausalLM
        model = loading.from_pretrained("me/it").eval()
        model.generation_config = GenerationConfig.from_pretrained("me/it")
        tokenizer = AutoTokenizer.from_pretrained("me/it")
    assert {path.name: path.read_bytes() for path in results[kind].iterdir()} == before
    turns = [{"role": "user", "content": QUESTION}]
    asked = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = asked["input_ids"]  # some tokenizers also give token types, which the model does not take
    answer = model.generate(ids, do_sample=False, max_new_tokens=20)[0]
    assert tokenizer.decode(answer) == ASKED + ANSWER


def test_vllm_and_llama_cpp_find_what_they_read(results: Mapping[str, Path]) -> None:
    """By their sources: `vllm/lora/peft_helper.py` and `utils.py` of vLLM 0.33.0 (commit
    4ba787ec9); `convert_lora_to_gguf.py`, `conversion/base.py` and `gguf/vocab.py` of llama.cpp
    (commit 0c1e57098, which llama-cpp-python 0.3.36 contains)."""
    from safetensors import safe_open

    config = fields_of(results["adapter"] / "adapter_config.json")
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (16, 32, False)
    assert isinstance(config["target_modules"], list) and config["base_model_name_or_path"]
    assert (config["bias"], config["init_lora_weights"]) == ("none", True)
    refused = ("modules_to_save", "use_dora", "lora_bias", "alora_invocation_tokens")
    refused += ("layer_replication", "use_bdlora", "use_qalora", "rank_pattern", "alpha_pattern")
    assert not any(config.get(name) for name in refused)
    with safe_open(results["adapter"] / "adapter_model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            layer, factor, kind = name.rsplit(".", 2)
            assert layer.startswith("base_model.model.model.layers.")
            assert factor in ("lora_A", "lora_B") and kind == "weight"
            assert tensors.get_tensor(name).shape[factor == "lora_B"] == 16
    for kind in ("model", "merged"):
        assert fields_of(results[kind] / "config.json")["architectures"] == ["LlamaForCausalLM"]
        assert {*BESIDE, "tokenizer_config.json"} <= {path.name for path in results[kind].iterdir()}


def test_generate_takes_each_folder(
    results: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = shutil.copytree(results["adapter"], tmp_path / "copied")
    of_runs = [results[kind].parent for kind in ("model", "adapter", "checkpoint")]
    for folder in (*of_runs, copied, *results.values()):
        capsys.readouterr()
        ask = ["--prompt", QUESTION, "--backend", "cpu", "--max-new-tokens", "20"]
        assert command(["generate", str(folder), *ask]) == 0
        assert capsys.readouterr().out == ANSWER.removesuffix("<|im_end|>") + "\n", folder
    assert command(["merge", str(copied), "--output", str(tmp_path / "merged")]) == 0
    for path in results["merged"].iterdir():
        if path.name != "README.md":
            assert (tmp_path / "merged" / path.name).read_bytes() == path.read_bytes()


def test_an_adapter_that_was_moved_away_from_its_base(
    results: Mapping[str, Path], tmp_path: Path
) -> None:
    moved = shutil.copytree(results["adapter"], tmp_path / "moved")
    config = fields_of(moved / "adapter_config.json")
    for named, said in (("/gone/base", "/gone/base"), (None, "none")):
        save_fields(moved / "adapter_config.json", **{**config, "base_model_name_or_path": named})
        message = rf"names {said}\); give the base as MODEL, and --adapter {moved}$"
        with pytest.raises(ModelError, match=message):
            model_origin(str(moved), None, None)


def test_files_are_the_bases_own_but_for_what_training_changed(
    results: Mapping[str, Path], base: Path
) -> None:
    own = fields_of(base / "tokenizer_config.json")
    own.pop("chat_template", None)
    for kind, folder in results.items():
        assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
        assert fields_of(folder / "tokenizer_config.json") == own, kind
        for name in BESIDE:
            assert (folder / name).read_bytes() == (results["model"] / name).read_bytes()
        if kind in ("model", "merged"):
            assert fields_of(folder / "config.json") == fields_of(base / "config.json")
    generation = fields_of(results["model"] / "generation_config.json")
    stored = base / "generation_config.json"
    before = fields_of(stored)["eos_token_id"] if stored.is_file() else [1]
    tokenizer = load_tokenizer(ModelSection(name=str(base)))
    assert generation["eos_token_id"] == [*before, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert generation.get("temperature") == (0.7 if stored.is_file() else None)


def test_a_run_or_an_adapter_is_not_a_model(results: Mapping[str, Path]) -> None:
    whole, adapter = results["model"], results["adapter"]
    for folder, message in (
        (whole.parent, f"is a run's folder; its model is {whole}"),
        (adapter.parent, f"name its base here and {adapter} in adapter.start_from"),
        (adapter, f"has an adapter, not a model. To train it on, name its base here and {adapter}"),
        (results["checkpoint"].parent, f"anygauge merge {results['checkpoint']} --output merged"),
    ):
        with pytest.raises(ModelError, match=r"^model\.name: ") as caught:
            load_config(ModelSection(name=str(folder)))
        assert message in str(caught.value)


# -- bases of other kinds -----------------------------------------------------------------------


def written(folder: Path, section: ModelSection, config: Any = None) -> Path:
    folder.mkdir()
    ResultFiles(section, load_tokenizer(section)).write(folder, config, torch.bfloat16)
    return folder


def test_a_drawn_model_names_its_class_and_its_tokenizers_end(tmp_path: Path) -> None:
    make_chat_tokenizer(tmp_path / "tokenizer")
    section = ModelSection(config=TINY, tokenizer=str(tmp_path / "tokenizer"))
    folder = written(tmp_path / "model", section, load_config(section))
    config = fields_of(folder / "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))
    # The architecture's own number for it is 2, which is the pad token here.
    assert fields_of(folder / "generation_config.json")["eos_token_id"] == 1


def test_new_tokens_and_sizes_are_all_that_changes(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", None, [])
    config = fields_of(base / "config.json")
    del config["architectures"], config["torch_dtype"]
    save_fields(base / "config.json", **config, attn_implementation="eager")  # a wish of its maker
    added = {"new_tokens": ["gaugeword"], "new_special_tokens": ["<|new|>"]}
    section = ModelSection(name=str(base), **added)
    larger = load_config(section)
    larger.vocab_size, larger.tie_word_embeddings = 600, True
    folder = written(tmp_path / "model", section, larger)
    assert fields_of(folder / "config.json") == {
        **config,
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "vocab_size": 600,
        "tie_word_embeddings": True,
    }
    before, after = (fields_of(path / "tokenizer.json") for path in (base, folder))
    assert [token["content"] for token in after.pop("added_tokens")[-2:]] == [
        "gaugeword",
        "<|new|>",
    ]
    del before["added_tokens"]
    assert after == before
    text = "say gaugeword<|new|> 2"
    one, other = (load_tokenizer(s) for s in (section, ModelSection(name=str(folder))))
    assert one(text) == other(text) and len(one) == len(other)
    assert other.decode(other(text)["input_ids"], skip_special_tokens=True) == "say gaugeword 2"


@pytest.mark.parametrize("added", [{}, {"new_tokens": ["gaugeword"]}], ids=["", "new tokens"])
@pytest.mark.parametrize(
    ("model_type", "named", "legacy"),
    [
        ("llama", "LlamaTokenizerFast", False),  # transformers 5 takes another class for it
        ("gpt2", None, False),
        ("gpt2", None, True),
        ("qwen2", "Qwen2Tokenizer", False),  # adds a token of its own
    ],
)
def test_a_tokenizer_needs_no_configuration_beside_it(
    model_type: str, named: str | None, legacy: bool, added: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    base = tmp_path / "base"
    make_chat_tokenizer(base)
    save_fields(base / "config.json", **{**TINY, "model_type": model_type})
    fields = {} if named is None else {"tokenizer_class": named}
    save_fields(base / "tokenizer_config.json", eos_token="</s>", **fields)
    if legacy:
        stored = fields_of(base / "tokenizer.json")["model"]
        save_fields(base / "vocab.json", **stored["vocab"])
        lines = (pair if isinstance(pair, str) else " ".join(pair) for pair in stored["merges"])
        (base / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]))
        (base / "tokenizer.json").unlink()
    section = ModelSection(name=str(base), **added)
    tokenizer = AutoTokenizer.from_pretrained(written(tmp_path / "beside", section))
    text = "What is 2 + 2?<|im_end|>\n gaugeword"
    assert tokenizer(text)["input_ids"] == load_tokenizer(section)(text)["input_ids"]
    assert (tokenizer.eos_token, len(tokenizer)) == ("</s>", len(load_tokenizer(section)))


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from .more import NAME
class OwnConfig(LlamaConfig):
    model_type = NAME
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def own_base(folder: Path, **auto_map: Any) -> Path:
    """A base with code of its own: a configuration, a model and a tokenizer."""
    base = make_base(folder, None, [])
    config = fields_of(base / "config.json")
    classes = {"AutoConfig": "own.OwnConfig", **auto_map}
    changes = {"model_type": "own", "auto_map": classes, "architectures": ["OwnModel"]}
    save_fields(base / "config.json", **{**config, **changes})
    (base / "own.py").write_text(CODE)
    (base / "more.py").write_text('NAME = "own"\n')
    return base


def test_a_tokenizer_whose_class_only_the_configuration_names(tmp_path: Path) -> None:
    """Transformers 4 reads it there, transformers 5 does not."""
    from transformers import AutoTokenizer

    base = own_base(tmp_path / "base", AutoTokenizer=["own.OwnTokenizer", None])
    save_fields(base / "tokenizer_config.json", eos_token="</s>")
    section = ModelSection(name=str(base), trust_remote_code=True)
    folder = written(tmp_path / "beside", section)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert type(tokenizer).__name__ == type(load_tokenizer(section)).__name__
    assert tokenizer("a b")["input_ids"] == load_tokenizer(section)("a b")["input_ids"]


def test_a_tokenizer_that_is_one_file(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_chat_tokenizer(tmp_path / "tokenizer")
    section = ModelSection(config=TINY, tokenizer=str(tmp_path / "tokenizer/tokenizer.json"))
    tokenizer = AutoTokenizer.from_pretrained(written(tmp_path / "beside", section))
    assert tokenizer.eos_token == "</s>" and tokenizer("a b") == load_tokenizer(section)("a b")


def test_code_of_the_models_own_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model on the hub, whose copy consists of links."""
    from transformers import AutoModelForCausalLM
    from transformers.dynamic_module_utils import HF_MODULES_CACHE

    base = own_base(tmp_path / "files", AutoModelForCausalLM="own.OwnModel")
    config = fields_of(base / "config.json")
    config.pop("architectures", None)  # its code alone names it
    save_fields(base / "config.json", **config)
    snapshot = tmp_path / "hub/models--somebody--own/snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for path in base.iterdir():
        (snapshot / path.name).symlink_to(path)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    section = ModelSection(name="somebody/own", trust_remote_code=True)
    folder = written(tmp_path / "model", section, load_config(section))
    shutil.copy(base / "model.safetensors", folder)
    shutil.rmtree(base)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__name__ == "OwnModel" and not list(folder.rglob(".*"))
    assert fields_of(folder / "config.json")["architectures"] == ["OwnModel"]
    shutil.rmtree(Path(HF_MODULES_CACHE) / "transformers_modules/model", ignore_errors=True)


@pytest.mark.parametrize("new", [False, True])
def test_a_result_ends_with_the_token_that_the_run_file_names(new: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    base = make_base(tmp_path / "base", None, ["</s>"])
    save_fields(base / "special_tokens_map.json", bos_token="<s>", eos_token="</s>")
    end = "<|stop|>" if new else "<|im_end|>"
    named = {"eos_token": end, "new_special_tokens": [end] if new else []}
    section = ModelSection(name=str(base), **named)
    tokenizer = load_tokenizer(section)
    assert tokenizer.eos_token == end
    folder = tmp_path / "result"
    folder.mkdir()
    ResultFiles(section, tokenizer).write(folder)
    again = AutoTokenizer.from_pretrained(folder)
    assert again.eos_token == end
    assert again.eos_token_id == tokenizer.eos_token_id
    ends = fields_of(folder / "generation_config.json")["eos_token_id"]
    assert tokenizer.eos_token_id in ends
    assert fields_of(folder / "special_tokens_map.json") == {"bos_token": "<s>", "eos_token": end}


def test_an_end_token_is_one_of_the_vocabulary(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", None, [])
    with pytest.raises(ModelError, match=r"model.eos_token: '<\|stop\|>' is not a token of"):
        load_tokenizer(ModelSection(name=str(base), eos_token="<|stop|>"))
