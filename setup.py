"""Maps the top-level folders to sub-packages of `headrace`; builds the native kernels where there is a compiler."""

import copy
import glob
import os
import platform

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

TOP = ("cli", "engine", "platforms")

# One shared object for each instruction set, chosen at run time (platforms/cpu/builds.py). Plain C interface: they
# are loaded with ctypes, so neither torch's nor Python's version matters.
X86 = {
    "amx": ["-march=cooperlake", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    "avx512_bf16": ["-march=cooperlake"],
    "avx512": ["-march=cascadelake"],
    "avx2": ["-march=haswell"],
    "portable": [],
}
ARM = {"neon_dot": ["-march=armv8.2-a+dotprod+fp16"], "neon": []}
MACHINE = platform.machine().lower()
BUILDS = X86 if MACHINE in ("x86_64", "amd64") else ARM if MACHINE in ("aarch64", "arm64") else {}
COMMON = ["-std=c++20", "-O3", "-fno-math-errno", "-fvisibility=hidden", "-pthread", "-Wno-psabi"]


class BuildExt(build_ext):
    """Objects of one source for several instruction sets have one name: each extension gets a folder of its own.

    Else extensions that are built at the same time overwrite each other's objects.
    """

    def build_extension(self, ext):
        own = copy.copy(self)
        own.build_temp = os.path.join(self.build_temp, ext.name)
        build_ext.build_extension(own, ext)


setup(
    cmdclass={"build_ext": BuildExt},
    package_dir={f"headrace.{top}": top for top in TOP},
    packages=[
        name
        for top in TOP
        for name in (f"headrace.{top}", *(f"headrace.{top}.{sub}" for sub in find_packages(top)))
    ],
    package_data={"": ["py.typed"]},
    ext_modules=[
        Extension(
            f"headrace.platforms.cpu._native_{name}",
            ["platforms/cpu/native/native.cpp"],
            depends=sorted(glob.glob("platforms/cpu/native/*.h")),
            extra_compile_args=[*COMMON, *flags],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,  # a failed build leaves PyTorch's operators, and `headrace doctor` says so
        )
        for name, flags in BUILDS.items()
    ],
    options={"build_ext": {"parallel": os.cpu_count()}},
)
