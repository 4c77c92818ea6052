"""Builds amp_engine._C, the compiled kernels: with CUDA where nvcc fits the installed torch, else for the CPU.

AMP_ENGINE_BUILD=none|cpu|cuda forces one of the three, and fails if that is impossible. Otherwise no failure stops the
install: it builds less, down to plain PyTorch. A JSON file beside the extension says what was built, and why not more;
`python -m amp_engine info` prints it.
"""

import importlib
import json
import os
import re
import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))
from toolchain import best_mode, find_compiler, find_toolkit, find_torch, plan  # noqa: E402

NAME = "amp_engine._C"
SUFFIXES = (".cpp", ".cu")
# Linked without -fopenmp: its symbols are found in the libgomp that torch has loaded, so that there is one thread pool.
# An optimization level in CFLAGS replaces -O3.
CXX = "" if "-O" in os.environ.get("CFLAGS", "") else "-O3 "
CXX += "-g1 -std=c++20 -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fvisibility=hidden"
NVCC = "-O3 -std=c++20 -fmad=false -Xcompiler=-ffp-contract=off,-fvisibility=hidden"


def index_page():
    """README.md for a package index: without pictures, and only the text of links into the repository."""
    text = re.sub(r"^!\[.*\n\n?", "", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


def extension(mode):
    """The extension for CPU or CUDA; for "none" an empty one."""
    if mode == "none":
        return Extension(NAME, [])
    cuda = mode == "cuda"
    cpp_extension = importlib.import_module("torch.utils.cpp_extension")
    return (cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension)(
        NAME,
        sorted(str(p) for p in Path("csrc").rglob("*") if p.suffix in SUFFIXES and (cuda or p.parent.name != "cuda")),
        include_dirs=[str(ROOT / "csrc")],
        define_macros=[("AMP_WITH_CUDA", None)] if cuda else [],
        extra_compile_args={"cxx": CXX.split(), "nvcc": NVCC.split()},
    )


def sources():
    """The digest of csrc, which an import compares to notice kernels that were built from other sources."""
    return runpy.run_path(str(ROOT / "amp_engine/kernels/sources.py"))["digest"](ROOT / "csrc")


def build_tag(mode, torch):
    """The build tag in the file name of a wheel, such as "1cpu.torch2.13.0"; "" without kernels."""
    if mode == "none":
        return ""
    kind = "cpu" if mode == "cpu" else f"cu{torch.version.cuda.replace('.', '')}"
    return f"1{kind}.torch{torch.__version__.split('+')[0]}"


class NamedWheel(bdist_wheel):
    """Gives a wheel with kernels a build tag; a wheel without kernels fits every Python and has none.

    A local version cannot tell them apart: it is in the metadata, which pip reads before anything is compiled.
    """

    def get_tag(self):
        """Python, ABI and platform, for the file name."""
        kernels = getattr(self.distribution, "kernels", None)  # None: not built, as for an editable install
        self.build_number = kernels or self.build_number
        return ("py3", "none", "any") if kernels == "" else super().get_tag()


def build_command(torch, toolkit, modes, why):
    """The build_ext that tries the modes until one builds. Only a failure of the last one is an error."""
    if toolkit:
        os.environ["CUDA_HOME"] = toolkit.home
    if torch:
        os.environ["PATH"] += (
            f"{os.pathsep}{Path(sys.executable).parent}"  # has ninja, if the environment is not activated
        )
        if not torch.cuda.is_available():
            os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    base = importlib.import_module("torch.utils.cpp_extension").BuildExtension if torch else build_ext

    class BuildNative(base):
        def run(self):
            self.force, inplace, reason = True, self.inplace, why
            for mode in modes:
                try:
                    vars(self.extensions[0]).update(vars(extension(mode)))
                    self.compiler, self.inplace = None, inplace
                    self.build_temp = f"build/{mode}-{torch and torch.__version__}-{sys.implementation.cache_tag}"
                    if mode != "none":
                        super().run()
                    break
                except Exception as error:
                    if mode == modes[-1]:
                        raise
                    reason = f"the build for {mode} failed, {error}: see `pip install -v .`"
            self.distribution.kernels = build_tag(mode, torch) if torch else ""
            self.warn(f"compiled kernels: {mode}" + (f", because {reason}" if reason else ""))

            file = Path(self.get_ext_filename(NAME))
            record = {"mode": mode, "torch": torch and torch.__version__, "sources": sources(), "reason": reason}
            for folder in [self.build_lib, "."] if inplace else [self.build_lib]:
                if mode == "none":
                    Path(folder, file).unlink(missing_ok=True)
                Path(folder, file.parent).mkdir(parents=True, exist_ok=True)
                Path(folder, file).with_suffix(".json").write_text(json.dumps(record) + "\n")

    return BuildNative


if __name__ == "__main__":
    found, tools = find_torch(), find_toolkit()
    chosen = plan(os.environ.get("AMP_ENGINE_BUILD", ""), *best_mode(found, find_compiler(), tools))
    commands = {"build_ext": build_command(found, tools, *chosen), "bdist_wheel": NamedWheel}
    setup(
        ext_modules=[extension("none")],
        cmdclass=commands,
        long_description=index_page(),
        long_description_content_type="text/markdown",
    )
