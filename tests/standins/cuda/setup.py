"""Builds the simulated cards once more, as CUDA's, against a torch that is built without CUDA."""

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

# Whole paths: objects are then put below the build's folder.
HERE = Path(__file__).resolve().parent
CARDS = HERE.parents[2] / "examples/plugins/anygauge-sim/csrc"
# Autocast's rules for CUDA are in every torch.
SOURCES = sorted(str(path) for path in CARDS.glob("*.cpp") if path.name != "autocast.cpp")
SOURCES.append(str(HERE / "timer.cpp"))

setup(
    name="cuda-standin",
    ext_modules=[
        CppExtension(
            "cuda_cards", SOURCES, extra_compile_args=["-O1", "-g0", "-Wall", "-DSIM_AS_CUDA"]
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
