"""Compiles each kernel for sm_80 and sm_90 and prints what it costs: `python csrc/tools/report.py`.

Exits with 1 if a kernel spills registers, has a stack frame, fits fewer blocks on a multiprocessor than it was designed
for, uses generic addresses (LD, ST instead of LDG, STG), touches more sectors than its bytes fill, or has too few loads
in flight. Needs nvcc, but no GPU. Reads the machine code with nvdisasm, from the toolkit or from Triton's wheel.
Without it, the report says so, takes addresses from the PTX, and leaves out the loops.
`--table docs/cuda_kernels.md` writes the table to that file.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "cuda"
ARCHITECTURES = ("sm_80", "sm_90")
FLAGS = ["-std=c++20", "-O3", "-fmad=false", "-I", str(FOLDER.parent)]

# For kernels that visit every element: the threads of a block, and the resident blocks that each is designed for.
THREADS = dict.fromkeys(("apply", "update", "moments"), 512)
OTHER_THREADS = 256  # in blocks that sum
BLOCKS = {
    **{"map<Check>": 5, "map": 4, "apply": 2, "update": 2, "moments": 2, "adopting_moments": 3},
    **{"narrow": 3, "narrow_apply": 3, "narrow_moments": 2},
}
REGISTERS = 65536  # per multiprocessor
MOST_THREADS = 2048

# Bytes that memory delivers to a multiprocessor of an H200 during one load: 4.2 TB/s over 132 multiprocessors, for
# 800 ns, an estimate of a load's time under load. An A100 delivers 19 bytes/ns to each multiprocessor.
DEMAND = 31.8 * 800
LEAST_IN_FLIGHT = (
    1.5  # times DEMAND, because a block also computes and stores; with twice as much, the update was slower on an H200
)
MOST_SECTORS = 16  # of 32 bytes, per 512 bytes

HEAD = """\
# What the CUDA kernels cost

How much of a GPU does each kernel take? This is read from the machine code; nothing was measured. Made by
`python csrc/tools/report.py --table docs/cuda_kernels.md` with nvcc {version}; a test holds it to that.

No kernel spills registers or touches more sectors than its bytes fill. Loads have 16 bytes (float32) or 8 (float16,
bfloat16) in lists aligned to four elements, else those of an element. In flight is what a multiprocessor's threads load
before any of it is used; the demand, {demand} KB, is what an H200's memory delivers to it while one load takes, an
estimate. Two figures are the least and the most of all loops and both architectures.

"""


@dataclass(frozen=True)
class Loop:
    """A loop over elements: bytes of its widest load, most loads and bytes in flight, sectors per 512 bytes."""

    width: int
    loads: int
    bytes: int
    sectors: int


@dataclass
class Kernel:
    """One kernel for one architecture. Registers are per thread; stack and spills are in bytes per thread."""

    name: str
    architecture: str
    registers: int = 0
    stack: int = 0
    spills: int = 0
    loops: list[Loop] = field(default_factory=list)

    @property
    def designed_blocks(self) -> int | None:
        """The number of blocks that must fit on a multiprocessor; None for kernels that do not visit every element."""
        return BLOCKS.get(self.name) or BLOCKS.get(self.name.partition("<")[0])

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return THREADS.get(self.name.partition("<")[0], OTHER_THREADS)

    @property
    def blocks(self) -> int:
        """The number of blocks that fit on a multiprocessor. Registers are allocated in units of eight."""
        return min(MOST_THREADS // self.threads, REGISTERS // (-(-self.registers // 8) * 8 * self.threads))

    def in_flight(self, loop: Loop) -> float:
        """The loop's bytes in flight on a multiprocessor, relative to DEMAND."""
        return loop.bytes * self.threads * self.blocks / DEMAND

    @property
    def faults(self) -> list[str]:
        """The faults of the kernel, in words."""
        faults = [f"a stack frame of {self.stack} bytes"] if self.stack else []
        faults += [f"{self.spills} bytes of spills"] if self.spills else []
        if self.designed_blocks:
            if self.blocks < self.designed_blocks:
                faults.append(f"{self.registers} registers, so {self.blocks} blocks, not {self.designed_blocks}")
            for loop in self.loops:
                if (times := self.in_flight(loop)) < LEAST_IN_FLIGHT:
                    faults.append(f"a loop of {loop.width}-byte loads has {times:.1f} of the demand in flight")
                if loop.sectors > MOST_SECTORS:
                    faults.append(f"a loop of {loop.width}-byte loads touches {loop.sectors} sectors for 512 bytes")
        return faults


def row(kernels: Sequence[Kernel]) -> str:
    """The row in the table of a kernel, which is given for each architecture."""
    cells = [kernels[0].name, span(kernel.registers for kernel in kernels)]
    if kernels[0].designed_blocks:
        flights = [kernel.in_flight(loop) for kernel in kernels for loop in kernel.loops]
        widths = sorted({loop.width for kernel in kernels for loop in kernel.loops}, reverse=True)
        cells += [span(kernel.blocks for kernel in kernels), ", ".join(map(str, widths))]
        cells += [span(f"{flight * DEMAND / 1000:.0f}" for flight in flights), span(f"{n:.1f}" for n in flights)]
    else:
        cells += ["-"] * 4
    return f"| {' | '.join(cells)} |"


def span(values: Iterable[int | str]) -> str:
    """The least and the most of them, or the only one."""
    ordered = sorted(map(str, values), key=float)
    return " to ".join(dict.fromkeys((ordered[0], ordered[-1]))) if ordered else "-"


def kernel_name(mangled: str) -> str:
    """`update<Adam>` from the mangled name of a kernel in an anonymous namespace."""
    names, rest = [], mangled.removeprefix("_ZN")
    while match := re.match(r"(\d+)", rest):
        start = match.end()
        end = start + int(match[1])
        names.append(rest[start:end])
        rest = rest[end:]
    argument = re.match(r"INS\d*_\d+(?P<type>[A-Za-z]+?)EE", rest)
    return f"{names[-1]}<{argument['type']}>" if argument else names[-1]


@dataclass(frozen=True)
class Instruction:
    """An instruction of the machine code. `goes_on` is True if the next instruction may follow."""

    opcode: str
    registers: tuple[int, ...]
    base: int | None  # for a global access: the register of its address; `offset` is added to it
    offset: int
    targets: tuple[str, ...]
    goes_on: bool

    @property
    def width(self) -> int:
        """The bytes that a global access moves per thread."""
        match = re.search(r"\.(?:U|S)?(8|16|64|128)(?:\.|$)", self.opcode)
        return int(match[1]) // 8 if match else 4

    @property
    def is_load(self) -> bool:
        """True if it loads from global memory."""
        return self.opcode.startswith("LDG")

    @property
    def is_store(self) -> bool:
        """True if it stores to global memory."""
        return self.opcode.startswith("STG")


def instruction(text: str) -> Instruction:
    """Parses a line of nvdisasm without the address in front and the semicolon."""
    match = re.match(r"(?P<predicate>@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>.*)", text)
    assert match, text
    opcode, operands = match["opcode"], match["operands"]
    address = re.search(r"\[R(\d+)(?:\.64)?(?:\.U32)?(?:\+UR\d+)?(?:\+(-?0x[0-9a-f]+))?\]", operands)
    ends = opcode in ("EXIT", "BRX", "RET.REL.NODEC") or (opcode in ("BRA", "BRA.U") and operands.startswith("`"))
    return Instruction(
        opcode,
        tuple(int(n) for n in re.findall(r"\bR(\d+)", operands)),
        int(address[1]) if address else None,
        int(address[2] or "0", 16) if address else 0,
        tuple(re.findall(r"\.L\w+", operands)) if opcode.startswith("BR") else (),
        bool(match["predicate"]) or not ends,
    )


def functions(code: str) -> dict[str, list[Instruction | str]]:
    """The lines of each kernel by mangled name: instructions, and labels as strings. `code` is nvdisasm's output."""
    found: dict[str, list[Instruction | str]] = {}
    lines: list[Instruction | str] = []
    for line in code.splitlines():
        if match := re.match(r"\s*\.section\s+\.text\.(\w+)", line):
            lines = found[match[1]] = []
        elif match := re.match(r"(\.L\w+):", line):
            lines.append(match[1])
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(.*?)\s*;", line):
            lines.append(instruction(match[1]))
    return found


@dataclass
class Block:
    """Consecutive instructions, and the indices of the blocks that may follow."""

    instructions: list[Instruction]
    next: list[int] = field(default_factory=list)


def blocks_of(lines: list[Instruction | str]) -> list[Block]:
    """The control flow graph of a function. The first block is the entry."""
    blocks, labels = [Block([])], dict[str, int]()
    for line in lines:
        if isinstance(line, str):
            if blocks[-1].instructions:
                blocks.append(Block([]))
            labels[line] = len(blocks) - 1
        else:
            blocks[-1].instructions.append(line)
            if line.targets or not line.goes_on:
                blocks.append(Block([]))
    for i, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else None
        block.next += [labels[target] for target in (last.targets if last else ()) if target in labels]
        if (not last or last.goes_on) and i + 1 < len(blocks):
            block.next.append(i + 1)
    return blocks


def innermost_loops(blocks: list[Block]) -> list[tuple[int, set[int]]]:
    """Heads and members of the natural loops that contain no other loop."""
    everything = set(range(len(blocks)))
    before: list[list[int]] = [[i for i in everything if j in blocks[i].next] for j in range(len(blocks))]
    dominators = [{0} if i == 0 else everything for i in range(len(blocks))]
    changed = True
    while changed:
        changed = False
        for i in range(1, len(blocks)):
            new = {i} | (set.intersection(*(dominators[j] for j in before[i])) if before[i] else set())
            changed |= new != dominators[i]
            dominators[i] = new
    loops: dict[int, set[int]] = {}
    for i, block in enumerate(blocks):
        for head in block.next:
            if head in dominators[i] and before[i]:
                members, todo = loops.setdefault(head, {head}), [i]
                while todo:
                    if (j := todo.pop()) not in members:
                        members.add(j)
                        todo += before[j]
    return [(h, m) for h, m in loops.items() if not any(other != h and other in m for other in loops)]


def most_in_flight(blocks: list[Block], head: int, members: set[int]) -> tuple[int, int]:
    """Bytes and number of the loads of one round that nothing has waited for yet: the maximum over all branches.

    In the machine code, short branches are predicates. Loads of opposite predicates, such as those of float32 and of a
    16-bit type, write the same registers, so only one of them is counted.
    """
    most = (0, 0)
    start: tuple[int, frozenset[tuple[int, int]]] = (head, frozenset())
    seen, todo = {start}, [start]
    while todo:
        number, flying = todo.pop()
        loads = set(flying)  # first register, bytes
        for one in blocks[number].instructions:
            touched = set(one.registers)
            if one.is_load:
                touched |= set(range(one.registers[0], one.registers[0] + -(-one.width // 4)))
            loads = {(r, n) for r, n in loads if touched.isdisjoint(range(r, r + -(-n // 4)))}
            if one.is_load:
                loads.add((one.registers[0], one.width))
                # At equal bytes, fewer loads count.
                most = max(most, (sum(n for _, n in loads), -len(loads)))
        for i in blocks[number].next:
            state = (i, frozenset(loads))
            if i in members and i != head and state not in seen:
                seen.add(state)
                todo.append(state)
    return most[0], -most[1]


def most_sectors(blocks: list[Block], members: set[int]) -> int:
    """The most sectors that a warp's access touches per 512 bytes, if addresses are aligned.

    Two accesses with the same address register that are less than a warp's bytes apart belong to one thread. The
    addresses of the next thread come after both.
    """
    most = 0
    for stores in (False, True):
        places: dict[tuple[int, int, int], set[int]] = {}
        writes: Counter[int] = Counter()  # number of writes to each register
        for one in (one for i in sorted(members) for one in blocks[i].instructions):
            if one.base is not None and (one.is_store if stores else one.is_load):
                places.setdefault((one.base, writes[one.base], one.width), set()).add(one.offset)
            if one.registers and not one.is_store:
                n = -(-one.width // 4) if one.is_load else 1 + ("WIDE" in one.opcode or ".64" in one.opcode)
                writes.update(range(one.registers[0], one.registers[0] + n))
        for (_, _, width), offsets in places.items():
            ordered = sorted(offsets)
            near = [b - a for a, b in zip(ordered, ordered[1:], strict=False) if b - a < 32 * width]
            stride = min(near) + width if near else width
            most = max(most, min(32, stride) * 16 // width)
    return most


def loops_of(lines: list[Instruction | str]) -> list[Loop]:
    """The loops of a kernel that load elements: at least four, because loops over chunks load less."""
    found = []
    blocks = blocks_of(lines)
    for head, members in innermost_loops(blocks):
        loads = [one for i in members for one in blocks[i].instructions if one.is_load]
        if len(loads) >= 4:
            bytes_in_flight, number = most_in_flight(blocks, head, members)
            width = max(load.width for load in loads)
            found.append(Loop(width, number, bytes_in_flight, most_sectors(blocks, members)))
    return found


def disassembler() -> str | None:
    """The path of nvdisasm, or None."""
    if found := shutil.which("nvdisasm"):
        return found
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(folder, "backends", "nvidia", "bin", "nvdisasm")
        if candidate.exists():
            if not os.access(candidate, os.X_OK):
                candidate.chmod(candidate.stat().st_mode | 0o111)
            return str(candidate)
    return None


def compiler_version() -> str:
    """The version of nvcc, such as "13.0.88"."""
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return text.split(", V")[1].split()[0]


def is_generic_or_local(access: str) -> bool:
    """True if an instruction uses a generic address or local memory."""
    if access.isupper():
        return access.split(".")[0] in ("LD", "ST", "LDL", "STL")
    return not {"global", "param", "shared", "const"} & set(access.split("."))


@dataclass
class Report:
    """All kernels. `accesses` counts each kind of memory instruction."""

    kernels: list[Kernel]
    accesses: Counter[str]
    disassembled: bool

    @property
    def faults(self) -> list[str]:
        """The faults of all kernels, in words."""
        faults = [f"{k.name}, {k.architecture}: {fault}" for k in self.kernels for fault in k.faults]
        faults += [f"{n} times {access}" for access, n in self.accesses.items() if is_generic_or_local(access)]
        if not self.accesses:
            faults.append("no memory instruction was found")
        if self.disassembled:
            loopless = [k for k in self.kernels if k.designed_blocks and not k.loops]
            faults += [f"{k.name}, {k.architecture}: no loop was found" for k in loopless]
        return faults

    @property
    def table(self) -> str:
        """The table, in Markdown."""
        names = ["kernel", "registers", "blocks per SM", "bytes of a load", "KB in flight", "times the demand"]
        ordered = sorted(self.kernels, key=lambda kernel: (not kernel.designed_blocks, kernel.name))
        rows = [row(list(group)) for _, group in groupby(ordered, lambda kernel: kernel.name)]
        return "\n".join([f"| {' | '.join(names)} |", f"|{'---|' * len(names)}", *rows])


def compiled(source: Path, architecture: str, folder: Path) -> Report:
    """Compiles one file for one architecture."""
    cubin = folder / f"{source.stem}.{architecture}.cubin"
    command = ["nvcc", *FLAGS, "-cubin", f"-arch={architecture}", "-Xptxas", "-v", "-o", str(cubin), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{source.name} does not compile for {architecture}:\n{result.stderr}")
    kernels: dict[str, Kernel] = {}
    for line in result.stderr.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = kernels[match[1]] = Kernel(kernel_name(match[1]), architecture)
        elif match := re.search(r"Function properties for (\w+)", line):
            kernel = kernels.get(match[1], Kernel("", architecture))  # a device function, not a kernel
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            kernel.stack = int(match[1])
            kernel.spills = int(match[2]) + int(match[3])
        elif match := re.search(r"Used (\d+) registers", line):
            kernel.registers = int(match[1])
    if tool := disassembler():
        code = subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
        accesses = Counter(re.findall(r"\s((?:LDG|STG|LDL|STL|LD|ST)(?:\.[A-Z0-9]+)*)\s", code))
        for name, lines in functions(code).items():
            if name in kernels and kernels[name].designed_blocks:
                kernels[name].loops = loops_of(lines)
        return Report(list(kernels.values()), accesses, True)
    ptx = cubin.with_suffix(".ptx")
    target = architecture.replace("sm", "compute")
    subprocess.run(["nvcc", *FLAGS, "-ptx", f"-arch={target}", "-o", str(ptx), str(source)], check=True)
    accesses = Counter(re.findall(r"\s((?:ld|st)(?:\.[A-Za-z0-9:_]+)+)\s", ptx.read_text()))
    return Report(list(kernels.values()), accesses, False)


def report() -> Report:
    """Reports on all files, and compiles two at a time."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        sources = [(s, a) for s in sorted(FOLDER.glob("*.cu")) for a in ARCHITECTURES]
        parts = list(pool.map(lambda one: compiled(one[0], one[1], Path(folder)), sources))
    accesses = sum((part.accesses for part in parts), Counter[str]())
    return Report([k for part in parts for k in part.kernels], accesses, all(part.disassembled for part in parts))


def page(made: Report) -> str:
    """The text that --table writes."""
    return HEAD.format(version=compiler_version(), demand=f"{DEMAND / 1000:.1f}") + made.table + "\n"


def main() -> int:
    """Prints the report, and with --table writes it. Returns 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", type=Path, help="a file to write the table to")
    path = parser.parse_args().table
    made = report()
    print(made.table)
    read = "machine code" if made.disassembled else "PTX, for want of an nvdisasm"
    counts = ", ".join(f"{n} {access}" for access, n in made.accesses.most_common())
    print(f"\nMemory instructions, from the {read}: {counts}")
    if path and not made.disassembled:
        raise SystemExit("The table needs an nvdisasm.")
    if path:
        path.write_text(page(made))
    print("\n".join(["", *made.faults]) if made.faults else "\nNo faults.")
    return int(bool(made.faults))


if __name__ == "__main__":
    sys.exit(main())
