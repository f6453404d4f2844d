"""Builds the cards' C++ against the torch that is installed."""

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCES = sorted(str(path) for path in Path("csrc").glob("*.cpp"))

setup(
    ext_modules=[
        # Little optimized: the time goes into torch's own kernels, and this builds sooner.
        CppExtension("anygauge_sim._C", SOURCES, extra_compile_args=["-O1", "-g0", "-Wall"])
    ],
    cmdclass={"build_ext": BuildExtension},
)
