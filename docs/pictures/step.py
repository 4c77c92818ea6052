"""Draw what each pass of a clipped step of AdamW reads and writes, in bytes a parameter: docs/design/stepping.md."""

from svg import BLUE, FAINT, INK, ORANGE, SOFT, Picture

ARRAYS = ("half weight", "weight or master", "half gradient", "FP32 gradient", "two moments")
OURS = (("check and norm", "..r.."), ("clip and step", "wmr.m"))
CASTS = (("cast weights", "wr..."), ("cast gradients", "..rw."))
THEIRS = (*CASTS, ("unscale, check", "...m."), ("norm", "...r."), ("clip", "...m."), ("step", ".m.rm"))
BYTES = (2, 4, 2, 4, 8)
MARKS = {".": ("", FAINT, 0), "r": ("reads", BLUE, 1), "w": ("writes", ORANGE, 1)}
LEFT, WIDTH, ROW, TOP = 170, 120, 34, 70
ALT = "A step at O5 takes two passes and 30 bytes a parameter; autocast, GradScaler and AdamW take six and 60"
picture = Picture(LEFT + WIDTH * 5 + 100, TOP + ROW * (len(OURS) + len(THEIRS)) + 56, ALT)
for column, name in enumerate(ARRAYS):
    picture.text(LEFT + WIDTH * (column + 0.5), 32, name, 13, SOFT, "middle")
y = TOP - 20
for title, passes in (("O5: two passes", OURS), ("autocast, GradScaler, AdamW: six passes", THEIRS)):
    picture.text(20, y + 14, title, 15, weight="bold")
    y += 26
    whole = 0
    for name, marks in passes:
        moved = 0
        picture.text(20, y + 20, name, 14)
        for column, (mark, size) in enumerate(zip(marks, BYTES, strict=True)):
            x = LEFT + WIDTH * column
            words, color, times = ("reads, writes", ORANGE, 2) if mark == "m" else MARKS[mark]
            picture.box(x, y, WIDTH - 6, ROW - 6, color)
            picture.text(x + WIDTH / 2 - 3, y + 19, f"{words} {size * times}" if words else "", 13, "white", "middle")
            moved += size * times
        picture.text(LEFT + WIDTH * 5 + 34, y + 20, str(moved), 14, INK, "end")
        whole += moved
        y += ROW
    picture.text(LEFT + WIDTH * 5 + 42, y - ROW + 20, f"= {whole}", 16, weight="bold")
    y += 20
picture.save(__file__)
