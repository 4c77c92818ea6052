"""The CUDA sources without a GPU: on a simulator of one, against the CPU backend, and as nvcc compiles them."""

import importlib.util
import os
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


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("report", CSRC / "tools" / "report.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["report"] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules["report"]


@pytest.fixture(scope="module")
def compiled(report):
    return report.report()


@pytest.mark.slow
@needs_nvcc
def test_kernels_neither_spill_nor_waste_memory(compiled):
    """With an nvdisasm, also: no generic addresses, at most 16 sectors for 512 bytes, twice the demand in flight."""
    assert not compiled.faults


@pytest.mark.slow
@needs_nvcc
def test_the_table_is_what_the_command_makes(report, compiled):
    page = (ROOT / "docs" / "cuda_kernels.md").read_text()
    if not compiled.disassembled:
        pytest.skip("needs nvdisasm")
    if f"with nvcc {report.compiler_version()};" not in page:
        pytest.skip(f"the table was made by another nvcc than {report.compiler_version()}")
    assert page == report.page(compiled)


def test_the_report_tells_kinds_of_access_apart(report):
    good = ["LDG.E.NA.128", "STG.E", "ld.global.L1::no_allocate.v4.u32", "st.shared.f64", "ld.param.u64"]
    bad = ["LD.E.128", "ST.E", "LDL.64", "STL", "ld.u32", "st.v4.u32", "ld.local.u32", "st.local.f32"]
    assert not any(map(report.is_generic_or_local, good))
    assert all(map(report.is_generic_or_local, bad))
    mangled = "_ZN10amp_engine4cuda3abc6updateINS_4AdamEEEvNS_8StepArgsE"
    assert report.kernel_name(mangled) == "update<Adam>"
    assert (
        report.kernel_name("_ZN10amp_engine4cuda3abc3mapINS1_13ScaleAndCheckEEEvNS_9CheckArgsE") == "map<ScaleAndCheck>"
    )


# Four loads of float32, or two of a 16-bit type; then something that needs one of them.
MACHINE_CODE = """
\t.section\t.text.kernel,"ax",@progbits
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_1:
        /*0010*/                   IMAD.WIDE R2, R0, 0x10, R4 ;
        /*0020*/              @P0 LDG.E.NA.64 R8, desc[UR4][R2.64] ;
        /*0030*/              @P0 LDG.E.NA.64 R12, desc[UR4][R2.64+0x800] ;
        /*0040*/             @!P0 LDG.E.NA.128 R8, desc[UR4][R2.64] ;
        /*0050*/             @!P0 LDG.E.NA.128 R12, desc[UR4][R2.64+{apart}] ;
        /*0060*/                   LDG.E.NA.128 R16, desc[UR4][R6.64] ;
        /*0070*/                   {early} ;
        /*0080*/                   LDG.E.NA.128 R20, desc[UR4][R6.64+0x1000] ;
        /*0090*/                   FADD R24, R8, R20 ;
        /*00a0*/                   STG.E.NA.128 desc[UR4][R2.64], R24 ;
        /*00b0*/              @!P1 BRA `(.L_x_1) ;
        /*00c0*/                   EXIT ;
"""


@pytest.mark.parametrize(("apart", "early", "loads", "sectors"), [
    ("0x1000", "NOP", 4, 16),
    ("0x10", "NOP", 4, 32),  # both halves of a thread's 32 bytes
    ("0x1000", "FADD R24, R24, R17", 3, 16),  # waits for the third
])  # fmt: skip
def test_the_report_reads_loops(report, apart, early, loads, sectors):
    code = MACHINE_CODE.replace("{apart}", apart).replace("{early}", early)
    (loop,) = report.loops_of(report.functions(code)["kernel"])
    assert loop == report.Loop(width=16, loads=loads, bytes=16 * loads, sectors=sectors)


def test_only_one_file_holds_instructions():
    holders = {p.name for p in CSRC.glob("cuda/*.*") if "asm(" in p.read_text() or "asm volatile" in p.read_text()}
    assert holders == {"memory.cuh"}


def test_no_file_of_nvccs_includes_torch():
    for path in [*CSRC.glob("cuda/*.cu"), *CSRC.glob("cuda/*.cuh"), *CSRC.glob("math/*.h"), CSRC / "backend.h"]:
        assert "ATen" not in path.read_text(), path
        assert "torch/" not in path.read_text(), path
