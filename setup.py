"""Builds the native kernels and the relay of emulated links. Everything else about the project is in pyproject.toml.

Both are plain C++ behind C functions and are loaded with ctypes: they depend neither on a torch version nor on a
Python version, and so one wheel per platform serves every Python. Where there is no compiler the installation goes on
without them, and thinwire uses its plain-torch kernels.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildNative(build_ext):
    """A shared library instead of a Python module: one file name everywhere, no module init function."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


class PlatformWheel(bdist_wheel):
    """Tagged for any Python 3 of this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "thinwire.kernels._native",
            sources=[
                f"native/{name}.cpp"
                for name in ("accumulate", "select", "quantize", "ternary", "pack", "lists", "server", "two_bits")
            ],
            depends=["native/cut.h", "native/listing.h", "native/mix.h", "native/parallel.h"],
            # No contraction: the same rounding as plain torch, so that all kernels give the same bits.
            extra_compile_args=[
                "-O3",
                "-g0",
                "-std=c++17",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fno-trapping-math",
            ],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        ),
        Extension(
            "thinwire.lab.emulation._relay",
            sources=["native/relay.cpp"],
            extra_compile_args=["-O2", "-g0", "-std=c++17"],
            language="c++",
            optional=True,
        ),
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
