"""Another program's view of results: run by the Python of an environment that has it.

``client.py transformers|llama QUESTION``: the question is a JSON file, the answer goes to stdout:
for each result the log-probabilities of the token after the question's, or why there are none.
Imports nothing of anygauge, which need not be there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def with_transformers(question: dict[str, Any], base: str, folder: str) -> dict[str, Any]:
    """By transformers and peft alone."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    is_adapter = (Path(folder) / "adapter_config.json").is_file()
    kind = AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM
    model = kind.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([question["ids"]])).logits[0, -1]
    try:
        encoded = AutoTokenizer.from_pretrained(folder)(question["text"])["input_ids"]
    except Exception as error:
        encoded = f"{type(error).__name__}: {str(error)[:300]}"
    return {"logprobs": logits.double().log_softmax(-1).tolist(), "encoded": encoded}


def with_llama(question: dict[str, Any], base: str, folder: str) -> dict[str, Any]:
    """By llama.cpp: its converters, then its runtime."""
    if not (Path(folder) / "adapter_config.json").is_file():
        return {"logprobs": answered(converted(question, "hf", folder), question)}
    model = converted(question, "hf", base)
    adapter = converted(question, "lora", folder, "--base", base)
    return {"logprobs": answered(model, question, adapter)}


def converted(question: dict[str, Any], kind: str, folder: str, *options: str) -> str:
    """The GGUF file of a folder, in float32."""
    output = Path(question["work"]) / (folder.strip("/").replace("/", "-") + ".gguf")
    if not output.exists():
        sys.path.insert(0, question["llama_cpp"])
        import conversion.base  # here, since each process would need seconds for it

        # No converter knows the tokenizer of a test; the token numbers are given.
        conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
        script = Path(question["llama_cpp"]) / f"convert_{kind}_to_gguf.py"
        arguments = [*options, "--outtype", "f32", "--outfile", str(output), folder]
        log = output.with_suffix(".log")
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=convert, args=(str(script), arguments, log))
        child.start()
        child.join()
        if child.exitcode:
            output.unlink(missing_ok=True)
            lines = [line for line in log.read_text().splitlines() if line.strip()]
            raise RuntimeError(f"refused: {lines[-1]}")
    return str(output)


def convert(script: str, arguments: list[str], log: Path) -> None:
    """Run a converter in this process; what it reports goes to a file."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def answered(model: str, question: dict[str, Any], adapter: str | None = None) -> list[float]:
    """Log-probabilities by the runtime, in the order of the vocabulary."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_ctx, parameters.n_gpu_layers, parameters.warmup = 128, 0, False
    parameters.n_parallel, parameters.cpuparams.n_threads = 1, 1
    if adapter is not None:
        parameters.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(adapter, 1.0)]
    # A token that is no text, such as an end, would come without probabilities.
    text = {"logit_bias": [[question["ids"][-1], 100.0]]}
    asked = {"prompt": question["ids"], "n_predict": 1, "n_probs": 100_000, **text}
    answer = xllamacpp.Server(parameters).handle_completions(asked)
    if isinstance(answer, str):
        answer = json.loads(answer)
    (token,) = answer["choices"][0]["logprobs"]["content"]
    found = {one["id"]: one["logprob"] for one in token["top_logprobs"]}
    return [found[number] for number in range(len(found))]


def main() -> None:
    clients = {"transformers": with_transformers, "llama": with_llama}
    question = json.loads(Path(sys.argv[2]).read_text())
    answers: dict[str, Any] = {}
    # What libraries print to the terminal is not the answer.
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name, (base, folder) in question["results"].items():
        try:
            answers[name] = clients[sys.argv[1]](question, base, folder)
        except Exception as error:
            answers[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    print(json.dumps(answers), file=answer_to, flush=True)


if __name__ == "__main__":
    main()
