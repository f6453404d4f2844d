"""What commands refuse: exit status, one message, nothing written; in this process.

Command lines and run files stand in `messages.txt`, broken models in `MODELS`. The last tests start
real processes, one for each kind of error; Ctrl-C is in `test_nothing_left.py`.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from anygauge import cli
from anygauge.interface import ModelError
from anygauge.models.model_files import WeightFiles
from tests.helpers.gaudi import without_driver
from tests.helpers.runs import TINY, anygauge, called, merged, run_file, save_tiny, train

PATIENCE_S = 300
"""For a loaded machine to start two ranks; what is asserted is never how long it took."""
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], object]


def refused(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[int, str]:
    """The exit status and message of a command line, which must write nothing.

    Args:
        line: RUN stands for the run file.
        folder: the working directory, which the message has as ``DIR``.
        options: of `called`.
    """
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    done = called(line.replace("RUN", "tiny.yaml").split(), **options)
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert sorted(folder.rglob("*")) == before, "nothing was written"
    return done.returncode, done.stderr.replace(str(folder), "DIR")


class Refusal(NamedTuple):
    """A command line of `messages.txt`.

    Attributes:
        changes: of the run file.
        checks: whether model and rows are looked at.
        words: how the message begins.
    """

    line: str
    changes: dict[str, Any]
    checks: bool
    status: int
    words: str


def refusals() -> list[Refusal]:
    found = []
    page = Path(__file__).with_name("messages.txt").read_text(encoding="utf-8")
    for section in page.split("\n## ")[1:]:
        title, *blocks = section.split("\n\n")
        for block in blocks:
            *lines, answer = block.strip().split("\n")
            status, _, words = answer.partition("> ")
            commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            changes = yaml.safe_load("\n".join(lines[: -len(commands)])) or {}
            # A run and its dry run say the same.
            commands += [f"{line} --dry-run" for line in commands] if changes else []
            facts = (changes, "before" not in title, int(status or 2), words)
            found += [Refusal(line, *facts) for line in commands]
    return found


REFUSALS = refusals()


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: " ".join([case.line, *case.changes]))
def test_a_command_line_is_answered(
    case: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = dict(case.changes)
    if "model" in changes:
        changes["model"] = merged({"config": TINY, "tokenizer": "tokenizer"}, changes["model"])
    run_that_is_refused(tmp_path, changes)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text('{"prompt": "a", "completion": " "}\n')
    options = {} if case.checks else {"prepare_with": None}
    status, message = refused(case.line, tmp_path, monkeypatch, **options)
    assert status == case.status, message
    said = message.partition("rror: ")[2]  # behind the usage that typer shows
    assert re.match(".*".join(map(re.escape, case.words.split("..."))), said, re.DOTALL), said


def test_every_command_has_a_wrong_line() -> None:
    assert set(cli.COMMANDS) <= {case.line.split()[0] for case in REFUSALS}


def test_no_command() -> None:
    assert called([]).returncode == 2


def run_that_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    """A run file with what its cases name: paths are in `folder`; None takes a field away."""
    path = run_file(folder, **{"output": "out", **changes})
    fields = yaml.safe_load(path.read_text())
    if fields["adapter"]["r"] is None:
        del fields["adapter"]["r"]
    fields["data"]["cache"] = "off"
    path.write_text(yaml.safe_dump(fields))
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 8)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files, with its tokenizer."""
    return save_tiny(tmp_path_factory.mktemp("sound") / "model", max_shard_size="100KB")


def first(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


def first_has(content: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: first(folder).write_bytes(content(first(folder).read_bytes()))


def index_has(change: Callable[[dict[str, str]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        fields = json.loads((folder / INDEX).read_text())
        change(fields["weight_map"])
        (folder / INDEX).write_text(json.dumps(fields))

    return damage


def in_another(weights: dict[str, str]) -> None:
    files = sorted(set(weights.values()))
    weights[next(name for name in sorted(weights) if weights[name] == files[0])] = files[1]


def json_has(name: str, **changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**fields, **changes}))

    return damage


def config(**changes: Any) -> Damage:
    return json_has("config.json", **changes)


def written(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def instead(name: str, make: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def removed(*patterns: str) -> Damage:
    return lambda folder: [path.unlink() for each in patterns for path in folder.glob(each)]


def one_file(content: bytes, name: str = "pytorch_model.bin") -> Damage:
    """Weights in one file, by default in torch's own format."""

    def damage(folder: Path) -> None:
        removed("*.safetensors", INDEX)(folder)
        (folder / name).write_bytes(content)

    return damage


def archive(new: bool = True) -> bytes:
    saved = io.BytesIO()
    weights = {"model.norm.weight": torch.zeros(2000)}
    torch.save(weights, saved, _use_new_zipfile_serialization=new)
    return saved.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 5000\n"
ANOTHER = {
    **{"model_type": "gpt_neox", "hidden_size": 32, "intermediate_size": 64, "vocab_size": 512},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256},
}
NOT_WHOLE = "Git LFS pointer, not the file itself"
NO_TENSOR = r"names 1 tensors that its files do not have, first "
MODELS: dict[str, tuple[Damage, str]] = {
    "a file that was cut": (
        first_has(lambda data: data[:-1000]),
        r"model-00001-.* cannot be read as weights \(.*not fully covered\); is it whole",
    ),
    "a header that was cut": (
        first_has(lambda data: data[:20]),
        r"model-00001-.* cannot be read as weights.*is it whole",
    ),
    "a page": (first_has(lambda data: b"<html>not found</html>"), "cannot be read as weights"),
    "a pointer": (
        one_file(POINTER, "model.safetensors"),
        f"cannot be read as weights.*{NOT_WHOLE}",
    ),
    "an archive that was cut": (
        one_file(archive()[:5000]),
        r"pytorch_model\.bin cannot be read as weights.*it was cut",
    ),
    "a pointer to an archive": (one_file(POINTER), f"cannot be read as weights.*{NOT_WHOLE}"),
    "an archive of an older torch": (
        one_file(archive(new=False)),
        "cannot be read as weights.*since 1.6, but of an older torch",
    ),
    "a page in place of an archive": (
        one_file(b"<html>not found</html>"),
        "cannot be read as weights.*since 1.6; get the model's .safetensors",
    ),
    "a file that is missing": (
        lambda folder: first(folder).unlink(),
        r"index\.json names 'model-00001-.*', but its folder has no such file",
    ),
    "an index of another file": (index_has(in_another), rf"{NO_TENSOR}'.*' in model-00002-"),
    "a tensor that is nowhere": (
        index_has(lambda weights: weights.update({"no.such": min(weights.values())})),
        rf"{NO_TENSOR}'no\.such' in model-0000",
    ),
    "an index that is a pipe": (instead(INDEX, os.mkfifo), "is not an index of weights"),
    "another architecture": (
        written("config.json", json.dumps(ANOTHER)),
        r"parameters have no tensor, first 'gpt_neox",
    ),
    "other sizes": (
        config(hidden_size=64),
        r"tensor model\.embed_tokens\.weight has shape \(512, 32\), but config\.json needs",
    ),
    "more layers": (
        config(num_hidden_layers=3),
        r"9 of the model's 30 parameters have no tensor, first 'model\.layers\.2\.",
    ),
    "an unknown architecture": (
        config(model_type="llamma"),
        r"^model\.name: .*model type `llamma`",
    ),
    "a size below 0": (config(hidden_size=-4), "-4"),
    "a size in words": (config(hidden_size="many"), "many"),
    "no vocabulary": (config(vocab_size=0), "vocab_size is 0; it must be a whole number from 1"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "a format that is not read": (
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
        "'gptq'.*Use the model that these weights were made from",
    ),
    "a small vocabulary": (
        config(vocab_size=99),
        r"the tokenizer has \d+ tokens, the model only 99 rows in its embedding",
    ),
    "no configuration": (removed("config.json"), r"config\.json cannot be read"),
    "a configuration that is not JSON": (
        written("config.json", "{ no"),
        r"config\.json cannot be read as JSON \(Expecting property",
    ),
    "a configuration that is a pipe": (
        instead("config.json", os.mkfifo),
        r"config\.json cannot be read as JSON \(it is a named pipe, not a regular file\)",
    ),
    "a configuration without end": (
        instead("config.json", lambda path: path.symlink_to("/dev/zero")),
        r"config\.json cannot be read as JSON \(it is a device or socket",
    ),
    "a configuration of brackets": (
        written("config.json", "[" * 200_000),
        r"config\.json cannot be read as JSON \(nested too deeply\)",
    ),
    "a configuration that is a list": (written("config.json", "[1]"), r"config\.json holds a list"),
    "generation settings that are a pipe": (
        instead("generation_config.json", os.mkfifo),
        r"generation_config\.json cannot be read as JSON \(it is a named pipe",
    ),
    "a tokenizer's configuration of brackets": (
        written("tokenizer_config.json", "[" * 200_000),
        r"tokenizer_config\.json cannot be read as JSON \(nested too deeply",
    ),
    "a tokenizer that is not JSON": (
        written("tokenizer.json", "{"),
        r"model\.tokenizer: no tokenizer could be loaded from .*Give a folder",
    ),
    "no tokenizer": (removed("token*"), "no tokenizer could be loaded from .*Give a folder"),
    "a template that is a pipe": (
        instead("chat_template.jinja", os.mkfifo),
        r"chat_template\.jinja cannot be read: it is not a regular file",
    ),
    "a template that is not valid": (
        json_has("tokenizer_config.json", chat_template="{% for turn in %}"),
        "the tokenizer's chat template, line 1: not a valid",
    ),
}
STATUSES = {"a format that is not read": 1}
NAMELESS = {"a small vocabulary", "a template that is not valid", "a format that is not read"}
"""Messages that do not name the folder."""


@pytest.mark.parametrize("case", MODELS)
def test_a_broken_model(
    case: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, expected = MODELS[case]
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    damage(folder)
    data = {"train": {"path": "chats.jsonl"}} if "template" in case else {}
    run_that_is_refused(tmp_path, {"model": {"name": str(folder)}, "data": data})
    status, message = refused("train RUN", tmp_path, monkeypatch)
    assert status == STATUSES.get(case, 2)
    said = message.removeprefix("error: ").rstrip("\n")
    assert re.search(expected, said) and "\n" not in said, said
    assert ("DIR/model" in said) == (case not in NAMELESS)
    if "cannot be read as weights" in said and not (folder / INDEX).exists():
        with pytest.raises(ModelError, match="cannot be read as weights"):
            WeightFiles(folder)  # and ranks refuse it


def test_a_sound_model(sound: Path, tmp_path: Path) -> None:
    path = run_file(tmp_path, model={"name": str(sound)}, strategy={"name": "single"})
    done = called(["train", path, "--dry-run"])
    assert done.returncode == 0
    assert "no problem found in model, tokenizer and rows" in done.stdout


def test_more_layers_than_the_weights_have_where_the_model_must_be_built(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    config(num_hidden_layers=3)(folder)
    targets = {"targets": ".*q_proj"}
    run_that_is_refused(tmp_path, {"model": {"name": str(folder)}, "adapter": targets})
    status, message = refused("train RUN", tmp_path, monkeypatch)
    assert status == 2 and "9 of the model's 30 parameters have no tensor" in message


# From here on real processes.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": {"stesp": 3}}, r"tiny\.yaml:\d+: train\.stesp: .*did you mean 'steps'"),
        ({"adapter": {"targets": ["q_porj"]}}, "adapter.targets: no layer is called 'q_porj'"),
    ],
    ids=["run file", "model"],
)
def test_a_command_that_refuses(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    run = train(run_file(tmp_path, **changes))
    assert (run.status, run.out) == (2, "")
    assert run.err.startswith("error: ") and re.search(said, run.err)
    assert "Traceback" not in run.err
    assert not (tmp_path / "out").exists()


@without_driver
def test_a_device_that_this_machine_lacks(tmp_path: Path) -> None:
    """Refused before anything heavy is imported."""
    every_import = {"PYTHONPROFILEIMPORTTIME": "1"}
    refusal = anygauge(["train", run_file(tmp_path), "--backend", "hpu"], environment=every_import)
    assert refusal.returncode == 1 and "Traceback" not in refusal.stderr
    for looked_for in ("vendor 0x1da3", "/sys/module/habanalabs", "habana-torch-plugin"):
        assert looked_for in refusal.stderr
    imported = {line.rpartition("|")[2].strip() for line in refusal.stderr.splitlines()}
    assert "anygauge_hpu.probe" in imported and "torch" not in imported
    assert not (tmp_path / "out").exists()


DIVERGES = {"optimizer": {"lr": 1.0e6}, "max_grad_norm": 0.0, "steps": 8}


def test_an_error_of_two_ranks_is_one_message(tmp_path: Path) -> None:
    run = train(run_file(tmp_path, train=DIVERGES), "--devices", "2", timeout_s=PATIENCE_S)
    assert run.status == 1
    assert len(re.findall("(?:the loss|norm) became", run.err)) == 1, run.err
    assert re.search(r"rows\.jsonl:\d+", run.err)
    assert "Traceback" not in run.out + run.err
    assert not (run.folder / "adapter").exists()
