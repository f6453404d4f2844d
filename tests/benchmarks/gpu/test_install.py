"""An environment beside the machine's torch: which interpreters do, what stays, what is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import install


@pytest.mark.parametrize(
    ("version", "torch", "said"),
    [
        ((3, 10), "2.13.0", "Python 3.10 is not of 3.11 to 3.14"),
        ((3, 15), "2.13.0", "Python 3.15 is not"),
        ((3, 12), None, "has no torch"),
        ((3, 12), "2.10.0+cu128", "2.11 or newer"),
    ],
)
def test_interpreters_that_cannot_be_used(
    version: tuple[int, int], torch: str | None, said: str
) -> None:
    with pytest.raises(install.InstallError, match=said):
        install.check_interpreter(version, torch)


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_interpreters_that_can(minor: int) -> None:
    install.check_interpreter((3, minor, 1), "2.11.0a0+git1234")


def test_torch_and_what_it_brought_stay_as_they_are() -> None:
    found = [
        ("torch", "2.13.0+cu130"),
        ("nvidia_nccl_cu13", "2.28.9"),
        ("numpy", "2.1"),
        ("triton", "3.9.0"),
        ("torch", "2.13.0+cu130"),
        ("torchvision", "0.28"),
        ("nvidia-ml-py", "13"),
    ]
    assert install.constraints(found).splitlines() == [
        "nvidia-ml-py==13",
        "nvidia-nccl-cu13==2.28.9",
        "torch==2.13.0+cu130",
        "triton==3.9.0",
    ]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("deepspeed-0.19.8.tar.gz", "deepspeed"),
        ("nvidia_ml_py-13.590-py3-none-any.whl", "nvidia-ml-py"),
        ("trl-1.16.0-py3-none-any.whl", "trl"),
    ],
)
def test_files_are_known_by_their_distribution(file: str, name: str) -> None:
    assert install.name_of(file) == name


def test_extras_are_those_whose_needs_are_there() -> None:
    assert install.extras(["torch"]) == ["testing"]
    assert install.extras(["trl", "deepspeed"]) == ["testing", "zero", "bench"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(install.InstallError, match="is not a folder"):
        install.main(tmp_path / "absent", tmp_path / "environment")
    assert not (tmp_path / "environment").exists()
