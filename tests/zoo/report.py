"""The page of the zoo, and the lines that a run prints."""

from __future__ import annotations

import platform
import re
import subprocess
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from typing import Any

import torch

from amp_engine.ground.dtypes import cpu_lacks
from tests.zoo.measure import SEEDS
from tests.zoo.reasons import REASONS
from tests.zoo.verdict import LIMIT, findings, is_that_of_half, ratio

LEVELS = ("O5", "O2")
PAGE = """\
# Every architecture

{answer}

`make zoo` wrote this page: {date}, {cpu}, Python {python}, torch {torch}, transformers {transformers},
diffusers {diffusers}, timm {timm}, commit {commit}, {minutes:.0f} minutes of two cores.

## What is measured

Of each architecture a tiny random model is built, without a network. Its weights and statistics are drawn as large as
those of trained models: the branches of some are near zero when they are new.

**As loaded.** The model is saved, and loaded in bfloat16 by its own library. Then `amp.initialize(opt_level="O5")`: the
same inputs have to give the same outputs, bit for bit, but for their cast to FP32.

**Built in FP32.** The relative error of the outputs at O5 and O2 against FP32, as the root mean square over {seeds}
inputs, over the error under `torch.autocast` to the same type. It has to be at most {limit:.0f}, or that of the model
in plain half: a level whose activations are half cannot be closer than its activations.

**A training step** at O5 and O2 must not raise, and must leave finite weights.

{loaded}
{built}
{beyond}
{missing}
## All

Errors in units of autocast's; `half`: that of the model in plain half.

| architecture | class | as loaded | O5 | O2 |
|---|---|---|---|---|
{table}
"""


def line_of(row: Mapping[str, Any]) -> str:
    """One row, short."""
    name = f"{row['architecture']:34} {row['seconds']:4.0f} s"
    if "error" in row:
        return f"{name}  {row['error']}"
    return f"{name}  {row['class']}: {_loaded_of(row)}; O5 {_ratio_of(row, 'O5')}, O2 {_ratio_of(row, 'O2')}"


def _loaded_of(row: Mapping[str, Any]) -> str:
    loaded = row["as_loaded"]
    if "loaded" in loaded:
        return f"raises as loaded: {loaded['loaded']}"
    if "error" in loaded:
        return f"raises at O5: {loaded['error']}"
    if loaded["equal"]:
        return "equal"
    return f"differs by {max(loaded['different'].values(), default=0):.1e}"


def _ratio_of(row: Mapping[str, Any], level: str) -> str:
    value = ratio(row, level)
    if isinstance(value, str):
        return value
    return f"{value:.2f}" + " (half)" * (value > LIMIT and is_that_of_half(row, level))


def page_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The answer, what is beyond the limits and why, what could not be measured, and all rows."""
    ran = [row for row in rows if "error" not in row]
    equal = sum(row["as_loaded"].get("equal", False) for row in ran)
    found = [(row, findings(row)) for row in ran]
    answer = (
        f"{len(ran)} of {len(rows)} architectures ran. Loaded in bfloat16, {equal} of them compute at O5 what they "
        f"computed before, bit for bit. {sum(not texts for _, texts in found)} are within all limits."
    )
    git = ["git", "describe", "--always", "--dirty"]
    emulated = [str(dtype)[6:] for dtype in (torch.bfloat16, torch.float16) if cpu_lacks(dtype)]
    return PAGE.format(
        answer=answer,
        date=date.today(),
        cpu=f"a CPU with {torch.backends.cpu.get_cpu_capability()}, half types that it emulates: "
        f"{', '.join(emulated) or 'none'}",
        python=platform.python_version(),
        torch=torch.__version__,
        commit=subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown",
        minutes=sum(row["seconds"] for row in rows) / 120,
        seeds=len(SEEDS),
        limit=LIMIT,
        loaded="\n".join(_loaded(ran)),
        built="\n".join(_built(ran)),
        beyond="\n".join(_beyond(found)),
        missing="\n".join(_missing(rows)),
        table="\n".join(
            f"| {row['architecture']} | {row['class']} | {_loaded_of(row).partition(':')[0]} "
            f"| {' | '.join(_short(_ratio_of(row, level)) for level in LEVELS)} |"
            for row in ran
        ),
        **{name: version(name) for name in ("transformers", "diffusers", "timm")},
    )


def _short(text: str) -> str:
    return "autocast raises" if text.startswith("autocast") else "raises" if ":" in text else text


def _loaded(ran: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    counts = Counter(_loaded_of(row).partition(":")[0].partition(" by")[0] for row in ran)
    yield "## As loaded in bfloat16\n\n| outputs at O5 | architectures |\n|---|---|"
    yield from (f"| {what} | {count} |" for what, count in counts.most_common())
    yield ""


def _built(ran: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "## Built in FP32\n\nErrors in units of autocast's.\n"
    yield "| level | lowest | median | 90% | 99% | highest | at most 2 |"
    yield "|---|---|---|---|---|---|---|"
    for level in LEVELS:
        values = sorted(value for row in ran if not isinstance(value := ratio(row, level), str) and value == value)
        places = [values[round(part * (len(values) - 1))] for part in (0, 0.5, 0.9, 0.99, 1)] if values else []
        numbers = " | ".join(f"{value:.2f}" for value in places)
        yield f"| {level} | {numbers} | {sum(value <= LIMIT for value in values)} of {len(values)} |"
    yield ""


def _beyond(found: Sequence[tuple[Mapping[str, Any], Mapping[str, str]]]) -> Iterator[str]:
    yield "## Beyond the limits\n"
    lines = [
        f"| {row['architecture']} | {what} | {_cell(text)} "
        f"| {REASONS.get(row['architecture'], {}).get(what, '**not known**')} |"
        for row, texts in found
        for what, text in texts.items()
    ]
    yield "\n".join(["| architecture | of what | how | why |\n|---|---|---|---|", *lines, ""] if lines else ["None.\n"])


def _missing(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "## Not measured\n\n| architecture | why |\n|---|---|"
    yield from (f"| {row['architecture']} | {_cell(row['error'])} |" for row in rows if "error" in row)
    yield ""


def _cell(text: str) -> str:
    """Without the folders of files, and not too wide."""
    text = re.sub(r"\S*/(\w+\.?\w*)", r"\1", text)
    return textwrap.shorten(text, 110, placeholder="...").replace("|", "\\|").replace("<", "&lt;")
