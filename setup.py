"""Finds the packages and compiles the native kernels; pyproject.toml has all else.

A checkout (`pip install --editable .`) gets the variant of the kernels that this machine runs, a wheel all of them.
"""

import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNELS = "engine/kernels/cpu"
sys.path.insert(0, KERNELS)
import variants  # noqa: E402


class BuildKernels(build_ext):
    def run(self) -> None:
        if self.inplace or self.editable_mode:
            variants.install(Path(KERNELS), "best")
        else:
            variants.install(Path(self.build_lib, "weft", KERNELS), "all")

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class PlainWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]  # the kernels know nothing of Python


names = [f"weft.{top}" for top in ("server", "engine")]
names += [f"weft.{top}.{name}" for top in ("server", "engine") for name in find_packages(top)]
kernels = Extension("weft.engine.kernels.cpu.all", sources=[])
setup(packages=names, ext_modules=[kernels], cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlainWheel})
