"""What the pictures share: words and boxes in an SVG with a white ground, and a terminal with what was printed."""

import textwrap
from html import escape
from pathlib import Path

INK, SOFT, FAINT = "#1f2933", "#66727f", "#e6eaee"
TEAL, ORANGE, BLUE, PURPLE = "#009485", "#e8590c", "#2b7bba", "#8a63b5"
SANS, MONO = "system-ui, 'DejaVu Sans', sans-serif", "ui-monospace, 'DejaVu Sans Mono', monospace"


class Picture:
    """An SVG that grows by `text` and `box`; `alt` is its title."""

    def __init__(self, width: int, height: int, alt: str, ground: str = "white") -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">',
            f"<title>{escape(alt)}</title>",
            f"<style>text {{ font-family: {SANS} }} .mono {{ font-family: {MONO} }}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{ground}"/>',
        ]

    def text(
        self, x: float, y: float, words: str, size: int = 14, color: str = INK, anchor: str = "start", **more: str
    ) -> None:
        """Words with their baseline at `y`; `weight="bold"`; `kind="mono"` gives each character 0.6 of the size."""
        exact = (
            f' class="mono" textLength="{len(words) * size * 0.6:.1f}" xml:space="preserve"' if "kind" in more else ""
        )
        style = f'font-size="{size}" fill="{color}" text-anchor="{anchor}" font-weight="{more.get("weight", "normal")}"'
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}{exact}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, color: str, round: int = 3) -> None:
        """A rectangle."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect {place} rx="{round}" fill="{color}"/>')

    def save(self, script: str) -> None:
        """Write the picture beside its script."""
        Path(script).with_suffix(".svg").write_text("\n".join([*self.parts, "</svg>\n"]))


def terminal(script: str, alt: str, printed: str, columns: int = 100) -> None:
    """Draw what a command printed; a line that begins with `>>>` is what was typed."""
    lines = [part for line in printed.splitlines() for part in textwrap.wrap(line, columns) or [""]]
    picture = Picture(int(columns * 8.4 + 40), len(lines) * 20 + 64, alt, ground="#16202a")
    for place, color in enumerate(("#ff5f57", "#febc2e", "#28c840")):
        picture.box(18 + 20 * place, 16, 12, 12, color, round=6)
    for row, line in enumerate(lines):
        color = "#ffb088" if line.startswith("Gradient overflow") else "#e6edf3"
        color = "#7ee0d2" if line.startswith(">>>") else color
        if line:
            picture.text(20, 60 + 20 * row, line, color=color, kind="mono")
    picture.save(script)
