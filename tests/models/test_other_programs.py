"""What other programs make of results: transformers and peft of two ages, and llama.cpp.

Each is asked for the log-probabilities of the next token, which must be those of the trained model.
The programs are in environments of their own (docs/stacks.md); what is not there is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.cli import run as command
from tests.helpers.runs import TINY, run_file, trained_here
from tests.helpers.tiny_tokenizer import make_tokenizer
from tests.models.test_new_tokens import MODEL, rows_of_text

pytestmark = pytest.mark.slow

TEXT = "What is the capital of France? gaugeword"
IDS = list(range(3, 35))
MOVED = 0.2
"""Of log-probabilities: what training changes at least, beside which errors are small."""

ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BASES: dict[str, dict[str, Any]] = {
    "base": {},
    "tied": {"tie_word_embeddings": True},
    "mixture": {"model_type": "qwen3_moe", "head_dim": 8, "norm_topk_prob": True, **ROUTED},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain LoRA": {},
    "rsLoRA": {"rslora": True, "r": 16},
    "groups": {
        "targets": ["q_proj", "v_proj"],
        "groups": [{"targets": ["gate_proj", "up_proj"], "r": 2, "alpha": 16}],
    },
    "DoRA": {"dora": True},
    "PiSSA": {"init": "pissa"},
    "new tokens": {},
    "new tokens, tied": {},
    "whole embeddings": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "whole norms": {"modules_to_save": ["input_layernorm"]},
    "attention, mixture": {},
    "experts, mixture": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "router, mixture": {"modules_to_save": ["mlp.gate"]},
}
MERGED = {name: f"merged {name}" for name in ADAPTERS if name not in ("plain LoRA", "rsLoRA")}
RESULTS = (*ADAPTERS, *MERGED.values(), "model", "model, mixture", "model, drawn")


@dataclass(frozen=True, slots=True)
class Program:
    """A program: variables that name where it is, what it runs as, how far its log-probabilities
    may be from the trained model's, results that it refuses, each with a part of its error, and
    those of which it leaves a part out, with at most a warning (docs/results.md names them)."""

    needs: tuple[str, ...]
    script: str
    close: float
    refuses: Mapping[str, str] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()


NOT_AS_GGUF = ("DoRA", "new tokens", "new tokens, tied", "whole embeddings")
NOT_AS_GGUF += ("experts, mixture", "router, mixture")

CLIENTS = {
    "transformers here": Program((), "transformers", 1e-4),
    "transformers 4.55": Program(
        ("ANYGAUGE_CLIENTS_455",),
        "transformers",
        1e-4,
        # peft 0.17 knows no rows of an output layer that is not the embedding.
        refuses={"new tokens": "no attribute 'embedding_dim'"},
        # There, experts are layers: peft finds none of the tensors that have the factors.
        wrong=("experts, mixture",),
    ),
    "llama.cpp": Program(
        ("ANYGAUGE_CLIENTS_LLAMA", "ANYGAUGE_LLAMA_CPP"),
        "llama",
        1e-2,  # its cache of keys and values has 16 bits
        refuses=dict.fromkeys(NOT_AS_GGUF, "refused: "),
        wrong=("whole norms",),  # the converter writes them, the runtime skips them
    ),
}


def as_published(folder: Path, **changes: Any) -> Path:
    """A base as the hub has most: saved by transformers 4, with a rope of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer(folder, adds_bos=False)
    fields = {**TINY, "vocab_size": len(tokenizer), **changes}
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**fields, rope_parameters=rope, rope_theta=rope["rope_theta"])
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    written = {
        **{"architectures": [type(model).__name__], "rope_theta": 500_000.0, "rope_scaling": None},
        **{"torch_dtype": "float32", "tie_word_embeddings": False, "rms_norm_eps": 1e-6},
        **{"bos_token_id": 0, "eos_token_id": 1, "transformers_version": "4.44.0"},
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(written))
    path = folder / "tokenizer_config.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps({**known, "tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Result -> base, folder."""
    folder = tmp_path_factory.mktemp("results")
    bases = {name: str(as_published(folder / name, **fields)) for name, fields in BASES.items()}
    common: dict[str, Any] = {
        "strategy": {"name": "single"},
        "precision": {"param_dtype": "float32"},
        "train": {"steps": 4, "optimizer": {"lr": 2.0e-2}},
    }
    found: dict[str, tuple[str, str]] = {}
    for name, adapter in ADAPTERS.items():
        base = bases[name.rpartition(", ")[2] if ", " in name else "base"]
        model: dict[str, Any] = {"name": base}
        changes: dict[str, Any] = {"adapter": adapter, "name": f"run-{len(found)}"}
        if name.startswith("new tokens"):
            model |= MODEL
            changes["data"] = {"train": {"path": rows_of_text(folder)}}
        run = trained_here(run_file(folder, **common, **changes, model=model))
        found[name] = (base, str(run.folder / "adapter"))
        if name in MERGED:
            output = str(run.folder.with_name(f"{run.folder.name}-merged"))
            assert command(["merge", str(run.folder), "--output", output]) == 0
            found[MERGED[name]] = (base, output)
    common["train"] = {**common["train"], "optimizer": {"lr": 2.0e-3}}
    for name, model in (
        ("model", {"name": bases["base"]}),
        ("model, mixture", {"name": bases["mixture"]}),
        ("model, drawn", {"config": TINY, "tokenizer": bases["base"]}),
    ):
        changes = {"name": name.replace(", ", "-"), "adapter": None, "model": model}
        run = trained_here(run_file(folder, **common, **changes))
        found[name] = (bases["base"], str(run.folder / "model"))
    assert found.keys() == set(RESULTS)
    return found


@pytest.fixture(scope="module")
def truth(results: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """What each result gives: `generate`'s model, which every run compares with the trained one."""
    from anygauge.config.schema import ModelSection
    from anygauge.models.generate import load_for_inference
    from anygauge.models.tokenizer import load_tokenizer

    found: dict[str, Any] = {}
    for name, (base, folder) in results.items():
        adapter = Path(folder) if (Path(folder) / "adapter_config.json").is_file() else None
        origin = folder if adapter is None else base
        model = load_for_inference(
            ModelSection(name=origin),
            adapter=adapter,
            device=torch.device("cpu"),
            dtype=torch.float32,
            attention="eager",
        )
        ids = torch.tensor([IDS])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, -1]
            if adapter is not None:
                with model.disable_adapter():
                    plain = model(input_ids=ids).logits[0, -1]
                change = (logits.log_softmax(-1) - plain.log_softmax(-1)).abs().max()
                assert change > MOVED, f"{name}: {change}"
        tokens = MODEL if "new tokens" in name else {}
        tokenizer = load_tokenizer(ModelSection(name=base, **tokens))
        found[name] = {
            "logprobs": logits.double().log_softmax(-1).tolist(),
            "encoded": tokenizer(TEXT)["input_ids"],
        }
    return found


@pytest.fixture(scope="module", params=CLIENTS)
def answers(
    request: pytest.FixtureRequest,
    results: dict[str, tuple[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, dict[str, Any]]:
    """A client's name, and what it answers of each result."""
    client = CLIENTS[request.param]
    for variable in client.needs:
        if not os.environ.get(variable):
            pytest.skip(f"{request.param} is not installed here: set {variable} (docs/stacks.md)")
    folder = tmp_path_factory.mktemp("client")
    question = folder / "question.json"
    asked = {"ids": IDS, "text": TEXT, "work": str(folder), "results": results}
    asked["llama_cpp"] = os.environ.get("ANYGAUGE_LLAMA_CPP", "")
    question.write_text(json.dumps(asked))
    python = os.environ[client.needs[0]] if client.needs else sys.executable
    script = Path(__file__).with_name("client.py")
    done = subprocess.run(
        [python, str(script), client.script, str(question)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    return request.param, json.loads(done.stdout)


@pytest.mark.parametrize("result", RESULTS)
def test_a_client_gives_what_was_trained(
    result: str, answers: tuple[str, dict[str, Any]], truth: dict[str, Any]
) -> None:
    client, given = answers
    answer, wanted = given[result], truth[result]
    refused = CLIENTS[client].refuses.get(result)
    if refused is not None:
        assert refused in answer.get("error", ""), "never silently wrong"
        return
    assert "error" not in answer, answer["error"]
    assert len(answer["logprobs"]) == len(wanted["logprobs"])
    both = (torch.tensor(one["logprobs"]) for one in (answer, wanted))
    furthest = float(torch.dist(*both, p=torch.inf))
    print(f"{client}: {result}: {furthest:.1e}")
    assert (furthest < CLIENTS[client].close) is (result not in CLIENTS[client].wrong)
    if "encoded" in answer:
        assert answer["encoded"] == wanted["encoded"]
