"""Adds the native kernels to what pyproject.toml says, where torch and a C++ compiler are there.

torch is no build requirement: pip's isolated build environment would fetch a CUDA build of several
GB for a few headers. So `make install` builds without isolation, against the torch that will load
the library, and everywhere else the package is plain Python, which computes the same, slower.
"""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("kernels")
KERNELS = ("copy.cpp", "packed_linear.cpp", "paged_attention.cpp", "rowwise.cpp")
FLAGS = [
    *("-std=c++20", "-O3", "-g0", "-fno-math-errno", "-ffp-contract=fast", "-Wall"),
    # GCC 12 warns of its own header for AVX-512.
    "-Wno-maybe-uninitialized",
]
# For `make asan`: "address" finds reads and writes beyond what is ours.
if SANITIZER := os.environ.get("SPLITSERVE_SANITIZER"):
    SANITIZE = [f"-fsanitize={SANITIZER}", "-fno-omit-frame-pointer", "-g1"]
    FLAGS += SANITIZE
else:
    SANITIZE = []
INSTRUCTION_SETS = {"plain": []}
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS["avx2"] = ["-mavx2", "-mfma"]
    INSTRUCTION_SETS["avx512"] = [
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma"),
        "-mprefer-vector-width=512",
    ]
AMX = ["-mamx-tile", "-mamx-bf16"]


def say(text: str) -> None:
    """One line about the kernels, also where pip hides what goes well."""
    sys.stderr.write(f"splitserve: {text}\n")


class BuildKernels(build_ext):
    """Compiles every kernel once for each instruction set, and what binds them to torch once."""

    def get_ext_filename(self, fullname: str) -> str:
        """Names torch's version and not Python's: on the first it depends, on the other not."""
        return str(Path(*fullname.split("."))) + f"-torch-{torch_version()}.so"

    def build_extension(self, ext: Extension) -> None:
        """One shared object."""
        torch = Path(find_spec("torch").submodule_search_locations[0])
        include = [str(torch / "include"), str(torch / "include/torch/csrc/api/include")]
        objects = []
        for name, flags in INSTRUCTION_SETS.items():
            objects += self.compiler.compile(
                [str(SOURCES / kernel) for kernel in KERNELS],
                output_dir=str(Path(self.build_temp, name)),
                macros=[("SPLITSERVE_ISA", name)],
                extra_postargs=[*FLAGS, *flags],
            )
        if "avx512" in INSTRUCTION_SETS:
            objects += self.compiler.compile(
                [str(SOURCES / "tile_linear.cpp")],
                output_dir=self.build_temp,
                macros=[("SPLITSERVE_ISA", "amx")],
                extra_postargs=[*FLAGS, *INSTRUCTION_SETS["avx512"], *AMX],
            )
        objects += self.compiler.compile(
            [str(SOURCES / "bind.cpp")],
            output_dir=self.build_temp,
            include_dirs=include,
            # torch's threads are started by code in its headers.
            extra_postargs=[*FLAGS, "-fopenmp"],
        )
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # Without -fopenmp: its symbols are then those of the library that torch has loaded, and a
        # second OpenMP runtime can never fight torch's for the cores.
        self.compiler.link_shared_object(
            objects,
            str(target),
            libraries=["c10", "torch_cpu"],
            library_dirs=[str(torch / "lib")],
            extra_postargs=SANITIZE,
            target_lang="c++",
        )
        say(f"native kernels built for {', '.join(INSTRUCTION_SETS)}: {target.name}")


def torch_version() -> str:
    """For example ``2.13.0``."""
    return version("torch").split("+")[0]


def extensions() -> list[Extension]:
    """The kernels, or nothing, and says why."""
    try:
        torch_version()
    except PackageNotFoundError:
        say("no native kernels, since torch is not there to build them against")
        return []
    if sys.platform == "win32":
        say("no native kernels on Windows")
        return []
    sources = [str(SOURCES / name) for name in (*KERNELS, "tile_linear.cpp", "bind.cpp")]
    # Optional: a machine without a compiler gets a warning and the package without kernels.
    return [Extension("splitserve.native", sources, language="c++", optional=True)]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels})
