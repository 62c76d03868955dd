"""The reader of machine code that the compile gate trusts, on listings written down here."""

from __future__ import annotations

import pytest
import sass

PRODUCT = "HGMMA.64x16x16.F32.BF16 R56, R28, gdesc[UR16].tnspB, R56"  # its address stands in UR18 and UR19


def code(*lines: str) -> list[sass.Instruction]:
    split = [line.partition(" ") for line in lines]
    return [sass.Instruction(f"{n:04x}", name, rest.split(", ")) for n, (name, _, rest) in enumerate(split)]


@pytest.mark.parametrize(
    "lines",
    [
        ("UMOV UR19, 0xc0000010",),
        ("UMOV UR5, URZ", "UIADD3.X UR19, UR5, -0x3ffffff0, URZ, UP0, !UPT"),
        ("UMOV UR9, 0x40000040", "USGXT.U32 UR8, UR4, 0xe", "UIADD3.64 UR18, UR8, 0x2, URZ"),
        (
            "UMOV UR19, UR4",
            "UMOV UR18, 0x80000020",
            "ULOP3.LUT UR19, UR19, UR18, URZ, 0x3c, !UPT",
            "ULOP3.LUT UR18, UR19, UR18, URZ, 0x3c, !UPT",
            "ULOP3.LUT UR19, UR19, UR18, URZ, 0x3c, !UPT",
        ),
        (
            "UMOV UR18, UR4",
            "UMOV UR10, 0x80000020",
            "ULOP3.LUT UR10, UR10, UR19, URZ, 0x3c, !UPT",
            "ULOP3.LUT UR19, UR10, UR19, URZ, 0x3c, !UPT",
            "ULOP3.LUT UR10, UR10, UR19, URZ, 0x3c, !UPT",
        ),
        ("MOV R7, 0x40000040", "STL.64 [R1+0x10], R6", "MOV R7, R3", "LDL.64 R8, [R1+0x10]", "R2UR UR19, R9"),
    ],
)
def test_a_constant_upper_half_is_found(lines: tuple[str, ...]) -> None:
    assert sass.lost_descriptors(code(*lines, PRODUCT)) == []


@pytest.mark.parametrize(
    "lines, why",
    [
        (("ULDC UR11, c[0x0][0x298]", "UIADD3.X UR19, UR11, -0x3ffffff0, URZ, UP0, !UPT"), "ULDC UR11"),
        (("LDG.E R4, desc[UR4][R2.64]", "STL [R1], R4", "LDL R8, [R1]", "R2UR UR19, R8"), "LDG.E R4"),
        (("UMOV UR19, URZ", "UMOV UR18, URZ", "ULOP3.LUT UR19, UR19, UR18, URZ, 0x3c, !UPT"), "ULOP3.LUT UR19"),
        (("STL [R1], R4", "LDL R8, [R1+0x8]", "R2UR UR19, R8"), "the stack at 0x8"),
        (("UIADD3.X UR19, UR27, -0x3ffffff0, URZ, UP0, !UPT",), "UR27, which nothing sets"),
        (("ULDC UR12, c[0x0][0x2d0]", "UIMAD.WIDE UR18, UR12, UR28, URZ"), "ULDC UR12"),
    ],
)
def test_an_upper_half_of_anything_else_is_reported(lines: tuple[str, ...], why: str) -> None:
    (complaint,) = sass.lost_descriptors(code(*lines, PRODUCT))
    assert complaint.startswith(f"{len(lines):04x}: UR19 comes from") and why in complaint


def test_both_operands_in_shared_memory_are_asked_about() -> None:
    lines = code("UMOV UR19, 0xc0000010", "ULDC UR17, c[0x0][0x298]", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], R24")
    (complaint,) = sass.lost_descriptors(lines)
    assert "UR17" in complaint


def test_matrix_opcodes_are_counted() -> None:
    assert sass.opcodes(code(PRODUCT, PRODUCT, "HMMA.16816.F32 R0, R4, R8, R0", "FADD R0, R1, R2")) == {
        "HGMMA": 2,
        "HMMA": 1,
    }
