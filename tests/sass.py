"""Reads machine code of sm_90: which matrix instructions it has, and whether the addresses they are given are whole.

A wgmma finds an operand in shared memory by a descriptor of 64 bits in two uniform registers. The upper ones say how
it is laid out, which is known to the compiler: a constant in every kernel. The ptxas of CUDA 12.8, which triton 3.6
brings, has been seen to build them from registers that hold something else by then (`tuning.attention.value_columns`).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

COUNTED = ("HGMMA", "UTCHMMA", "HMMA", "USETMAXREG")


class Instruction(NamedTuple):
    """One line of a listing: where it stands, its name with what follows the dots, and its operands."""

    address: str
    name: str
    operands: list[str]

    @property
    def family(self) -> str:
        return self.name.partition(".")[0]


def listing(cubin: bytes) -> list[Instruction]:
    """The instructions of a kernel, in the order of their addresses."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run(
            [knobs.nvidia.nvdisasm.path, "-c", path], capture_output=True, text=True, check=True
        ).stdout
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d\s+)?([A-Z0-9_.]+)\s*([^;]*);", text)
    return [Instruction(address, name, re.split(r",\s*", rest.strip())) for address, name, rest in found]


def opcodes(code: list[Instruction]) -> dict[str, int]:
    """How often matrix opcodes, and those that move registers between warps, stand in the code."""
    counts = {name: sum(line.family == name for line in code) for name in COUNTED}
    return {name: count for name, count in counts.items() if count}


def lost_descriptors(code: list[Instruction]) -> list[str]:
    """The matrix instructions whose descriptor's upper half is no constant, and where it comes from."""
    complaints = []
    for at, line in enumerate(code):
        if line.family != "HGMMA":
            continue
        for operand in line.operands:
            found = re.match(r"gdesc\[UR(\d+)\]", operand)
            if found is None:
                continue
            # four registers: of both operands, or, where the first lies in registers, of the second alone
            first = int(found[1])
            uppers = (first + 3,) if line.operands[1].startswith("R") else (first + 1, first + 3)
            origins = {upper: _origin(code, at, f"UR{upper}") for upper in uppers}
            complaints += [f"{line.address}: UR{upper} comes from {why}" for upper, why in origins.items() if why]
    return complaints


# their operands but the first are sources
SUMS = ("UMOV", "MOV", "R2UR", "UIADD3", "IADD3", "UIMAD", "IMAD", "USEL", "SEL")
WIDE = re.compile(r"\.(64|WIDE)\b")


def _written(line: Instruction) -> tuple[str, ...]:
    found = re.fullmatch(r"(U?R)(\d+)", line.operands[0])
    if found is None or line.family in ("HGMMA", "LDGSTS", "BAR"):
        return ()
    kind, number = found[1], int(found[2])
    return (f"{kind}{number}", f"{kind}{number + 1}") if WIDE.search(line.name) else (f"{kind}{number}",)


def _is_swap(line: Instruction) -> bool:
    """Whether this is one of the three exclusive ors that exchange two registers."""
    return line.family == "ULOP3" and "0x3c" in line.operands and line.operands[0] in line.operands[1:3]


def _offset(address: str) -> int:
    """Of a word on the stack, as [R1+0xa0]."""
    found = re.fullmatch(r"\[R1(?:\+(0x[0-9a-f]+))?\]", address)
    assert found is not None, address
    return int(found[1] or "0", 16)


def _origin_of_spilled(code: list[Instruction], at: int, offset: int) -> str:
    """What a word of the stack comes from: by the store above."""
    for index in range(at - 1, -1, -1):
        line = code[index]
        if line.family == "STL":
            word = offset - _offset(line.operands[0])
            if word in (0, 4 if ".64" in line.name else 0):
                return _origin(code, index, f"R{int(line.operands[1].lstrip('R').split('.')[0]) + word // 4}")
    return f"the stack at {offset:#x}, where nothing is stored"


def _origin(code: list[Instruction], at: int, register: str) -> str:
    """What a register's value before code[at] comes from, unless it is a constant; lines are taken in their order."""
    register = register.lstrip("-~!").removesuffix(".reuse")
    if register in ("RZ", "URZ") or re.fullmatch(r"0x[0-9a-f]+", register):
        return ""
    for index in range(at - 1, -1, -1):
        line = code[index]
        if register not in _written(line):
            continue
        place = f"{line.address} {line.name} {', '.join(line.operands)}"
        if _is_swap(line):
            pair = set(line.operands[1:3])
            swaps = [i for i in range(index + 1) if _is_swap(code[i]) and set(code[i].operands[1:3]) == pair]
            before = (len(swaps) - 1) % 3  # of the three; after the first of them a register holds neither value
            (other,) = pair - {register}
            return _origin(code, swaps[-1 - before], other) if before else place
        if line.family == "LDL":
            number = int(register.lstrip("R")) - int(line.operands[0].lstrip("R"))
            return _origin_of_spilled(code, index, _offset(line.operands[1]) + 4 * number)
        if line.name == "UIADD3.64" and register != line.operands[0]:  # the upper half of a sum of pairs
            halves = (re.match(r"UR(\d+)", operand) for operand in line.operands[1:])
            sources = [f"UR{int(half[1]) + 1}" for half in halves if half]
        elif line.family in SUMS:
            sources = [operand for operand in line.operands[1:] if not re.fullmatch(r"!?U?P[\dT]", operand)]
        else:
            return place
        return next(filter(None, (_origin(code, index, source) for source in sources)), "")
    return f"{register}, which nothing sets"
