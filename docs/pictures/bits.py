"""Draw why bfloat16 loses 1 + 0.0001: its bits, beside those of FP32."""

import torch
from svg import FAINT, INK, ORANGE, SOFT, TEAL, Picture

CELL, LEFT, TOP, ROW = 21, 158, 76, 62
HEADS = ((0, 0, "sign"), (1, 8, "exponent"), (9, 15, "7 bits"), (16, 31, "16 bits that only FP32 has"))
one, step = torch.tensor(1.0), 1e-4
half = one.bfloat16()
following = torch.nextafter(half, half * 2)
ROWS = (
    ("1", half, ""),
    ("1 + 0.0001", one + step, "the step is in the orange bits"),
    ("1 + 0.0001", half + step, f"rounded to 7 bits this is {float(half + step):g} again: the step is lost"),
    ("the next one", following, f"{float(following):.4f}: steps below half of this distance are lost"),
)


def left_of(place: int) -> float:
    """Where the box of a bit begins."""
    return LEFT + CELL * place + 8 * (place > 0) + 8 * (place > 8) + 12 * (place > 15)


ALT = "The bits of 1, of 1 + 0.0001 in FP32 and in bfloat16, and of the next number of bfloat16"
picture = Picture(880, TOP + ROW * len(ROWS) - 24, ALT)
for first, last, words in HEADS:
    picture.text((left_of(first) + left_of(last) + CELL) / 2, 34, words, 13, SOFT, "middle")
for row, (words, number, note) in enumerate(ROWS):
    y, size = TOP + ROW * row, number.element_size() * 8
    picture.text(20, y, words, 15, weight="bold")
    picture.text(20, y + 18, "bfloat16" if size == 16 else "FP32", 13, SOFT)
    for place, bit in enumerate(f"{number.view(torch.int16 if size == 16 else torch.int32).item():0{size}b}"):
        lost = place > 15 and bit == "1"
        picture.box(left_of(place), y - 22, CELL - 3, 26, ORANGE if lost else "#bfe5e0" if place < 16 else FAINT)
        picture.text(left_of(place) + 9, y - 4, bit, 14, "white" if lost else INK, "middle", kind="mono")
    picture.text(left_of(16), y + (24 if size == 32 else -4), note, 13, SOFT)
picture.box(left_of(16) - 9, 44, 2, ROW * 4 - 24, TEAL)
picture.save(__file__)
