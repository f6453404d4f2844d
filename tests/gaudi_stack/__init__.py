"""What can only be tested where optimum-habana and its versions are installed: the second stack."""

import importlib.metadata

import pytest


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_optimum_habana = pytest.mark.skipif(
    not _installed("optimum-habana"),
    reason="optimum-habana is not installed (make test-gaudi-stack)",
)
