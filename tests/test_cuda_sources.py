"""The CUDA sources without a GPU: on a simulator of one, against the CPU backend, and as nvcc compiles them."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
SIMULATOR = Path(__file__).parent / "cuda_simulator"
CXX = shutil.which(os.environ.get("CXX", "g++"))
NVCC = shutil.which("nvcc")

# The simulator's folder comes first: it stands in for CUDA's headers and for the two that hold instructions.
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-fno-math-errno"]
FLAGS += ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-missing-field-initializers"]
FLAGS += ["-I", str(SIMULATOR), "-I", str(CSRC)]

SANITIZE = "-fsanitize=address"  # not of the CPU backend, which `make sanitize` runs

needs_compiler = pytest.mark.skipif(not CXX or sys.platform != "linux", reason="needs a C++ compiler on Linux")
needs_nvcc = pytest.mark.skipif(not NVCC, reason="needs nvcc")


def program(sources, folder):
    def compiled(source):
        target = folder / f"{source.parent.name}_{source.name}.o"
        flags = FLAGS if source.parent.name == "cpu" else [*FLAGS, SANITIZE]
        subprocess.run([CXX, *flags, "-x", "c++", "-c", str(source), "-o", str(target)], check=True)
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    executable = folder / "program"
    subprocess.run([CXX, SANITIZE, *objects, "-o", str(executable)], check=True)
    return executable


def run(executable):
    # The simulator's fibers are more than the sanitizer's stack checks understand.
    environment = os.environ | {"ASAN_OPTIONS": "detect_stack_use_after_return=0:detect_leaks=0"}
    result = subprocess.run([str(executable)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@needs_compiler
def test_kernels_equal_the_cpu_backend_to_the_bit_on_the_simulator(tmp_path):
    sources = [SIMULATOR / "test_kernels.cpp", *sorted(CSRC.glob("cuda/*.cu")), *sorted(CSRC.glob("cpu/*.cpp"))]
    run(program(sources, tmp_path))


@needs_compiler
def test_tables_are_uploaded_when_they_changed_and_never_under_a_graph(tmp_path):
    run(program([SIMULATOR / "test_mirror.cpp", CSRC / "cuda" / "mirror.cpp"], tmp_path))


@needs_compiler
def test_tables_and_scratch_are_those_of_a_device_a_stream_and_a_graph(tmp_path):
    sources = [CSRC / "cuda" / f"{name}.cpp" for name in ("tables", "mirror", "device")]
    run(program([SIMULATOR / "test_tables.cpp", *sources, CSRC / "chunking.cpp"], tmp_path))


@pytest.mark.slow
@needs_nvcc
def test_kernels_neither_spill_nor_use_generic_addresses(report, tmp_path):
    command = [sys.executable, str(CSRC / "tools" / "report.py")]
    if report.disassembler() is None:
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        return
    result = subprocess.run([*command, "--table", str(tmp_path / "table.md")], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    made, committed = (path.read_text() for path in (tmp_path / "table.md", ROOT / "docs/cuda_kernels.md"))
    rows = [line.split(" | ") for line in made.splitlines() if "| sm_" in line]
    assert {row[1] for row in rows} == {"sm_80", "sm_90"}
    assert {row[4] for row in rows} == {"0"}  # spills
    assert {row[-1] for row in rows if row[0].startswith(("| update", "| apply"))} == {"16 |"}  # sectors
    version = re.compile(r"with nvcc ([\d.]+)")
    if version.search(made)[1] == version.search(committed)[1]:  # another compiler may take other registers
        assert made == committed


LOOP = """
.L_x_1:
        /*0000*/ LDG.E.NA.128 R4, desc[UR4][R2.64] ;
        /*0010*/ LDG.E.NA.128 R8, [R2.64+0x{offset:x}] ;
        /*0020*/ @P0 LDG.E.64 R12, desc[UR4][R6.64+0x8] ;
        /*0030*/ LDG.E R14, desc[UR4][R6.64] ;
        /*0040*/ @P1 BRA `(.L_x_1) ;
        /*0050*/ LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0060*/ BRA `(.L_x_2) ;
.L_x_2:
"""


def test_the_report_counts_what_loops_load(report):
    assert report.loops_of(LOOP.format(offset=4096)) == (2, 1, False)
    assert report.loops_of(LOOP.format(offset=16)) == (2, 1, True)
    assert report.loops_of("") == (0, 0, False)


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("report", CSRC / "tools" / "report.py")
    report = importlib.util.module_from_spec(spec)
    sys.modules["report"] = report
    try:
        spec.loader.exec_module(report)
    finally:
        del sys.modules["report"]
    return report


def test_the_report_tells_kinds_of_access_apart(report):
    good = ["LDG.E.NA.128", "STG.E", "ld.global.L1::no_allocate.v4.u32", "st.shared.f64", "ld.param.u64"]
    bad = ["LD.E.128", "ST.E", "LDL.64", "STL", "ld.u32", "st.v4.u32", "ld.local.u32", "st.local.f32"]
    assert not any(map(report.is_generic_or_local, good))
    assert all(map(report.is_generic_or_local, bad))
    mangled = "_ZN10amp_engine4cuda3abc6updateINS_4AdamEEEvNS_8StepArgsE"
    assert report.kernel_name(mangled) == "update<Adam>"
    assert report.kernel_name("_ZN10amp_engine4cuda3abc3mapILb1EEEvNS_9CheckArgsE") == "map<true>"
    assert report.kernel_name("_ZN10amp_engine4cuda3abc3mapILb1ELb0EEEvNS_9CheckArgsE") == "map<true,false>"


def test_only_one_file_holds_instructions():
    holders = {p.name for p in CSRC.glob("cuda/*.*") if "asm(" in p.read_text() or "asm volatile" in p.read_text()}
    assert holders == {"memory.cuh"}


def test_no_file_of_nvccs_includes_torch():
    for path in [*CSRC.glob("cuda/*.cu"), *CSRC.glob("cuda/*.cuh"), *CSRC.glob("math/*.h"), CSRC / "backend.h"]:
        assert "ATen" not in path.read_text(), path
        assert "torch/" not in path.read_text(), path
