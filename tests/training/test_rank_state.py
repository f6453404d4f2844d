"""What an engine's ranks have of their own is in the checkpoint and comes back, or is left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge.interface import AnygaugeError, Backend
from anygauge.strategies.shared.torch_engine import TorchEngine
from anygauge.training.checkpoints.checkpoint_files import Checkpoint
from anygauge.training.checkpoints.manager import find_checkpoint
from anygauge.training.setup import Rank
from tests.helpers.checkpoints import ALONE, FakeEngine, a_manager, reseal, write
from tests.helpers.run_ranks import on_ranks
from tests.helpers.runs import run_file, trained_here

WORLD = 3


def own(rank: int) -> dict[str, Tensor]:
    """Rank 0 has least; among the tensors are an empty one, a scalar, and one with gaps."""
    if rank == 0:
        return {"error": torch.tensor([-0.0, float("nan"), 1e-45])}
    return {
        "error": torch.arange(12.0).reshape(3, 4).t()[:: rank + 1],
        "outer/momentum": torch.full((rank, 2), rank, dtype=torch.bfloat16),
        "count": torch.tensor(2**40 + rank),
        "flags": torch.tensor([True, False]),
        "none": torch.zeros(0, 3),
    }


class OwnEngine(FakeEngine):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def export_rank_state(self) -> Mapping[str, Tensor]:
        return own(self.rank)

    def import_rank_state(self, tensors: Mapping[str, Tensor]) -> None:
        raise AssertionError("it is read back from the file alone")


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Bit by bit."""

    def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, list[int]]:
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        return tensor.dtype, tensor.shape, raw.tolist()

    return found.keys() == wanted.keys() and all(bits(found[n]) == bits(wanted[n]) for n in wanted)


def written(backend: Backend, folder: str) -> bool:
    """Every rank writes and reads back."""
    import torch.distributed as dist

    rank = dist.get_rank()
    a_manager(Path(folder), engine=OwnEngine(rank), backend=backend, rank=rank).save(3, None)
    backend.collectives.barrier()
    found = find_checkpoint("auto", Path(folder), rank, backend.collectives)
    assert found.checkpoint is not None, found.skipped
    return same(found.checkpoint.rank_state(rank), own(rank))


def test_what_each_rank_has_is_written_by_rank_0_and_read_back_bit_by_bit(tmp_path: Path) -> None:
    assert on_ranks(written, str(tmp_path), world=WORLD) == [True] * WORLD
    opened = Checkpoint(tmp_path / "checkpoints/step-00000003")
    assert opened.record["rank_state"] == 1 + 2 * 5
    assert opened.names() == ["layer.0.weight", "layer.1.weight"], "the rest is as without it"
    assert opened.rank_state(WORLD) == {}


@pytest.mark.parametrize("shard_bytes", [1, 2**30])
def test_a_damaged_or_missing_part_makes_the_checkpoint_passed_over(
    shard_bytes: int, tmp_path: Path
) -> None:
    write(tmp_path / "checkpoints/step-00000003")
    states = [
        (f"{rank}/{name}", t.contiguous()) for rank in (0, 1) for name, t in own(rank).items()
    ]
    newest = write(
        tmp_path / "checkpoints/step-00000004",
        rank_states=states,
        shard_bytes=shard_bytes,
        record={"rank_state": len(states), "world_size": 2},
    )
    files = sorted(newest.glob("rank-state-*"))
    assert len(files) == (len(states) if shard_bytes == 1 else 1)

    def skipped() -> tuple[str, ...]:
        return find_checkpoint("auto", tmp_path, 0, ALONE).skipped

    assert same(Checkpoint(newest).rank_state(1), own(1)) and not skipped()
    whole = files[-1].read_bytes()
    files[-1].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert f"{files[-1].name}: its SHA-256 is not that of the manifest" in skipped()[0]
    files[-1].unlink()
    assert f"{files[-1].name}: No such file or directory" in skipped()[0]
    reseal(newest, files[-1].name, None)
    assert "checkpoint.json: rank_state is 6, and there are " in skipped()[0]
    (newest / "rank-state-00009.safetensors").write_bytes(whole)
    assert "manifest.json does not list rank-state-00009.safetensors" in skipped()[0]


# -- a run ---------------------------------------------------------------------------------------


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """Engines keep count of their updates in a state of their own; what is given back to them."""
    back: list[dict[str, Tensor]] = []

    def export(engine: Any) -> Mapping[str, Tensor]:
        return {"error": torch.full((3,), engine.counters().updates / 3)}

    def take(engine: Any, tensors: Mapping[str, Tensor]) -> None:
        assert engine.counters().updates == 2, "the rest is there already"
        if tensors["error"].isnan().any():
            raise KeyError("a name")
        back.append(dict(tensors))

    monkeypatch.setattr(TorchEngine, "export_rank_state", export, raising=False)
    monkeypatch.setattr(TorchEngine, "import_rank_state", take, raising=False)
    return back


def test_a_run_gets_it_back_where_strategy_and_ranks_are_the_same(
    tmp_path: Path, given_back: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Rank, "log", lambda rank, text: said.append(text))
    constant = {"schedule": {"name": "constant"}}

    def trained(steps: int, **changes: Any) -> list[float]:
        said.clear()
        train = {"steps": steps, **constant}
        return trained_here(run_file(tmp_path, train=train, **changes)).steps("loss")

    single = {"strategy": {"name": "single"}}
    whole = trained(4, name="whole", **single)
    trained(2, checkpoint={"every": 2}, **single)
    folder = tmp_path / "out/tiny/checkpoints/step-00000002"
    resume = {"checkpoint": {"resume": str(folder)}}
    assert trained(4, name="same", **single, **resume) == whole[2:]
    (tensors,) = given_back
    assert same(tensors, {"error": torch.full((3,), 2 / 3)})
    assert not [text for text in said if "left out" in text]
    # The losses show that the rest resumes.
    assert trained(4, name="other", strategy={"name": "ddp"}, **resume) == pytest.approx(whole[2:])
    assert len(given_back) == 1
    assert [text for text in said if "left out" in text] == [
        "left out: what each rank had of its own, since strategy.name: single -> ddp; the rest "
        "resumes"
    ]
    record = (folder / "checkpoint.json").read_text()
    reseal(folder, "checkpoint.json", record.replace('"world_size": 1', '"world_size": 2').encode())
    trained(4, name="ranks", **single, **resume)
    assert "left out: what each rank had of its own, since ranks: 2 -> 1; the rest resumes" in said
    assert len(given_back) == 1


def test_one_that_does_not_fit_is_refused_in_words(
    tmp_path: Path, given_back: list[dict[str, Tensor]]
) -> None:
    """A stranger may have made it."""
    from safetensors.torch import save

    single = {"strategy": {"name": "single"}}
    trained_here(run_file(tmp_path, train={"steps": 2}, checkpoint={"every": 2}, **single))
    folder = tmp_path / "out/tiny/checkpoints/step-00000002"
    nan = {"0/error": torch.full((3,), float("nan"))}
    reseal(folder, "rank-state-00001.safetensors", save(nan))
    said = r"step-00000002: what rank 0 had of its own does not fit this run: KeyError"
    with pytest.raises(AnygaugeError, match=said):
        trained_here(run_file(tmp_path, name="next", checkpoint={"resume": str(folder)}, **single))
