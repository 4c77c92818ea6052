"""Compiles each kernel for sm_80 and sm_90 and prints what it costs: `python csrc/tools/report.py`.

With `--table FILE` it also writes docs/cuda_kernels.md, which needs an nvdisasm.

Exits with 1 where a kernel spills, has a stack frame, takes more registers than its occupancy allows, or reads or
writes through generic addresses (LD, ST instead of LDG, STG). Needs nvcc, not a GPU. The machine code is read with
nvdisasm, from the toolkit or from Triton's wheel; without one the PTX is read instead, which is said so.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "cuda"
ARCHITECTURES = ("sm_80", "sm_90")
FLAGS = ["-std=c++20", "-O3", "-fmad=false", "-I", str(FOLDER.parent)]
# 65,536 registers over the threads of the resident blocks that each kernel was designed for.
REGISTERS = {
    "map": 80,
    "map<true,false>": 48,
    "apply": 64,
    "update": 80,
    "moments": 128,
    "total": 64,
    "gradient_norm": 64,
}
OTHERS = 128
# Size, the register of its address, what is added to that.
WIDE_LOAD = re.compile(r"LDG\.E(?:\.NA)?\.(128|64) \w+, (?:desc\[\w+\])?\[(\w+)\.64(?:\+(0x[0-9a-f]+))?\]")


class Loops(NamedTuple):
    """What the innermost loops of a kernel load."""

    loads_16: int
    loads_8: int
    halves: bool


@dataclass
class Kernel:
    """One kernel in one architecture.

    Attributes:
        name, mangled, architecture: of it.
        registers: a thread.
        stack, spills: bytes a thread.
        loops: of those in its loops the most loads of 16 bytes, and of 8, and whether a load takes half of each sector.
    """

    name: str
    mangled: str
    architecture: str
    registers: int = 0
    stack: int = 0
    spills: int = 0
    loops: Loops | None = None

    @property
    def faults(self) -> list[str]:
        """What is wrong with it, in words."""
        limit = REGISTERS.get(self.name, REGISTERS.get(self.name.partition("<")[0], OTHERS))
        faults = [f"{self.registers} registers, more than {limit}"] if self.registers > limit else []
        faults += [f"a stack frame of {self.stack} bytes"] if self.stack else []
        return faults + ([f"{self.spills} bytes of spills"] if self.spills else [])


def kernel_name(mangled: str) -> str:
    """`update<Adam>` from the mangled name of a kernel in an anonymous namespace."""
    names, rest = [], mangled.removeprefix("_ZN")
    while match := re.match(r"(\d+)", rest):
        start = match.end()
        end = start + int(match[1])
        names.append(rest[start:end])
        rest = rest[end:]
    arguments = re.match(r"I(?:(?P<flags>(?:Lb\dE)+)|NS_\d+(?P<type>[A-Za-z]+?)E)E", rest)
    if not arguments:
        return names[-1]
    flags = [("false", "true")[int(flag)] for flag in re.findall(r"Lb(\d)E", arguments["flags"] or "")]
    return f"{names[-1]}<{arguments['type'] or ','.join(flags)}>"


def compiled(source: Path, architecture: str, cubin: Path) -> list[Kernel]:
    """Compiles a file into `cubin`; its kernels with what ptxas said of them."""
    command = ["nvcc", *FLAGS, "-cubin", f"-arch={architecture}", "-Xptxas", "-v", "-o", str(cubin), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{source.name} does not compile for {architecture}:\n{result.stderr}")
    kernels: list[Kernel] = []
    for line in result.stderr.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernels.append(Kernel(kernel_name(match[1]), match[1], architecture))
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            kernels[-1].stack = int(match[1])
            kernels[-1].spills = int(match[2]) + int(match[3])
        elif match := re.search(r"Used (\d+) registers", line):
            kernels[-1].registers = int(match[1])
    return kernels


def disassembler() -> str | None:
    """The path of an nvdisasm."""
    if found := shutil.which("nvdisasm"):
        return found
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(folder, "backends", "nvidia", "bin", "nvdisasm")
        if candidate.exists():
            candidate.chmod(candidate.stat().st_mode | 0o111)
            return str(candidate)
    return None


def loops_of(code: str) -> Loops:
    """What the innermost loops of a function load, from its machine code: those to which a later branch leads back."""
    lines = code.splitlines()
    labels = {line.rstrip(":"): i for i, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    branches = [(labels[m[1]], i) for i, line in enumerate(lines) if (m := re.search(r"BRA `\((\.L_x_\d+)\)", line))]
    loops = [(begin, end) for begin, end in branches if begin < end]
    innermost = [(begin, end) for begin, end in loops if not any(begin < other and last < end for other, last in loops)]
    found = Loops(0, 0, False)
    for begin, end in innermost:
        loads = [(m[1], m[2], int(m[3] or "0", 16)) for line in lines[begin:end] if (m := WIDE_LOAD.search(line))]
        wide = {(base, offset) for size, base, offset in loads if size == "128"}
        halves = any((base, offset + 16) in wide for base, offset in wide)
        sizes = Counter(size for size, _, _ in loads)
        found = Loops(max(found[0], sizes["128"]), max(found[1], sizes["64"]), found.halves or halves)
    return found


def functions(cubin: Path) -> dict[str, str]:
    """The machine code of each kernel by its mangled name; nothing without an nvdisasm."""
    tool = disassembler()
    if tool is None:
        return {}
    code = subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    sections = re.split(r"\t\.section\t\.text\.(\w+),.*\n", code)
    return dict(zip(sections[1::2], sections[2::2], strict=True))


def table(kernels: Sequence[Kernel]) -> str:
    """The page docs/cuda_kernels.md."""
    told = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    version = re.search(r"release ([\d.]+)", told)
    lines = [
        "# What the CUDA kernels compile to",
        "",
        "Made by `python csrc/tools/report.py --table docs/cuda_kernels.md` with nvcc "
        f"{version[1] if version else '?'}. Nothing here has run on a GPU.",
        "",
        "* blocks: of 256 threads, as many as fit a multiprocessor by their registers;",
        "* loads: in the innermost loops, those for the other types of a list included;",
        "* sectors: of 32 bytes, that a warp's load of 16 bytes a lane touches in the worst of the loops. 16 is the",
        "  least; where it is 32, in octets of float32, the other half of each sector is found in L1.",
        "",
        "| kernel | architecture | registers | blocks | spilled bytes | loads of 16 B | of 8 B | sectors a load |",
        f"|{'---|' * 8}",
    ]
    for k in kernels:
        loops = k.loops or Loops(0, 0, False)
        if loops.loads_16 == 0:
            continue
        blocks = min(8, 65536 // (-(-k.registers // 8) * 8 * 256))
        cells = (k.name, k.architecture, k.registers, blocks, k.spills, *loops[:2], 32 if loops.halves else 16)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def accesses(source: Path, architecture: str, cubin: Path) -> Counter[str]:
    """How often each kind of memory instruction occurs in the code of a file."""
    if tool := disassembler():
        code = subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
        return Counter(re.findall(r"\s((?:LDG|STG|LDL|STL|LD|ST)(?:\.[A-Z0-9]+)*)\s", code))
    ptx = cubin.with_suffix(".ptx")
    target = architecture.replace("sm", "compute")
    subprocess.run(["nvcc", *FLAGS, "-ptx", f"-arch={target}", "-o", str(ptx), str(source)], check=True)
    return Counter(re.findall(r"\s((?:ld|st)(?:\.[A-Za-z0-9:_]+)+)\s", ptx.read_text()))


def is_generic_or_local(access: str) -> bool:
    """Whether an instruction of `accesses` uses a generic address or a thread's own memory."""
    if access.isupper():
        return access.split(".")[0] in ("LD", "ST", "LDL", "STL")
    return not {"global", "param", "shared", "const"} & set(access.split("."))


def main() -> int:
    """Prints the report; 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, help="write the page that docs/cuda_kernels.md is")
    args = parser.parse_args()
    faults = []
    kernels: list[Kernel] = []
    print(f"| kernel | architecture | registers | stack | spills |\n|{'---|' * 5}")
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for source in sorted(FOLDER.glob("*.cu")):
            for architecture in ARCHITECTURES:
                cubin = Path(folder, f"{source.stem}.{architecture}.cubin")
                here = compiled(source, architecture, cubin)
                code = functions(cubin)
                for k in here:
                    if k.mangled in code:
                        k.loops = loops_of(code[k.mangled])
                kernels += here
                for k in here:
                    print(f"| {k.name} | {k.architecture} | {k.registers} | {k.stack} | {k.spills} |")
                    faults += [f"{k.name}, {k.architecture}: {fault}" for fault in k.faults]
                found = accesses(source, architecture, cubin)
                counts += found
                generic = {access: n for access, n in found.items() if is_generic_or_local(access)}
                faults += [f"{source.name}, {architecture}: {n} times {access}" for access, n in generic.items()]
    read = "machine code" if disassembler() else "PTX, for want of an nvdisasm"
    print(f"\nMemory instructions, from the {read}: {', '.join(f'{n} {access}' for access, n in counts.most_common())}")
    if not counts:
        faults.append("no memory instruction was found")
    if args.table and disassembler() is None:
        faults.append("no nvdisasm was found, which the table needs")
    elif args.table:
        args.table.write_text(table(kernels))
    print("\n".join(["", *faults]) if faults else "\nNo faults.")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
