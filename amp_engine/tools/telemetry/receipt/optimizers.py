"""The section about optimizers: the code that steps each, the reason, and skipped steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from amp_engine import kernels
from amp_engine.engine import Engine
from amp_engine.ground.dtypes import dtype_name
from amp_engine.optimizers.fused_step import fused_step_so_far
from amp_engine.optimizers.rules import TORCH_RULES, rule_of
from amp_engine.stepping.beside import HostMaster, Remainder
from amp_engine.stepping.record import Record
from amp_engine.tools.page.page import Block, Section, Sentence
from amp_engine.tools.telemetry.wording import number, plural

COMPILED, OWN = "compiled kernels", "its own class"


@dataclass(frozen=True)
class Stepped:
    """An optimizer.

    Attributes:
        class_name: class of the optimizer.
        weights: number of the tensors that it steps.
        by: the code that steps it: "compiled kernels" or "its own class".
        why: the reason.
        masters: its masters and the type of its moments, in words; "" without masters and narrow moments.
        steps: number of calls of `step` since `initialize`.
        skips: number of skipped steps.
        skips_in_a_row: number of skipped steps since the last step that was taken.
    """

    class_name: str
    weights: int
    by: str
    why: str
    masters: str
    steps: int
    skips: int
    skips_in_a_row: int


def described(engine: Engine) -> tuple[Stepped, ...]:
    """Describe the code that steps each optimizer. Changes nothing. No host sync."""
    has_part = engine._scaling.is_active or engine.function_casts.casts is not None
    return tuple(_described(one, has_part) for one in engine.records.all)


def _described(record: Record, has_part: bool) -> Stepped:
    by, why = _answer(record, has_part)
    pending, rows = record.pending, record.rows
    return Stepped(
        class_name=type(record.optimizer).__name__,
        weights=len(rows.columns.weights),
        by=by,
        why=why,
        masters=_masters(record),
        steps=pending.steps,
        skips=pending.skips,
        skips_in_a_row=pending.skips_in_a_row,
    )


def section(optimizers: Sequence[Stepped]) -> Section:
    """Each optimizer in words; one that skipped its last steps stands out."""
    blocks = [block for one in optimizers for block in _blocks(one)]
    return Section(
        "Optimizers",
        blocks or [Sentence("There is no optimizer: none was passed to amp.initialize, or it is gone.", "soft")],
    )


def _blocks(one: Stepped) -> Iterator[Block]:
    skipped = f"{number(one.skips)} of {plural(one.steps, 'step')} skipped"
    in_a_row = f", the last {one.skips_in_a_row} in a row" if one.skips_in_a_row > 1 else ""
    line = f"{one.class_name}: {plural(one.weights, 'tensor')}, stepped by {one.by}; {skipped}{in_a_row}"
    yield Sentence(line, "bad" if in_a_row else "title")
    yield Sentence(one.why, "soft", indent=1)
    if one.masters:
        yield Sentence(one.masters, "soft", indent=1)


def _answer(record: Record, has_part: bool) -> tuple[str, str]:
    optimizer, rows, columns = record.optimizer, record.rows, record.rows.columns
    name, rule = type(optimizer).__name__, rule_of(optimizer)
    device = columns.weights[0].device if columns.weights else torch.device("cpu")
    if rule is None:
        return OWN, (
            f"The kernels do not know {name}: they step exactly Adam, AdamW and SGD of torch.optim, no subclasses, and "
            "amp_engine.optimizers."
        )
    is_ours = type(optimizer) not in TORCH_RULES
    if not (has_part or rows.kind is not None or record.needs_kernels):
        if is_ours:
            return COMPILED, "The class is one of amp_engine.optimizers, which is stepped by them with or without amp."
        return OWN, "Nothing is scaled and there are no masters, so amp leaves the step alone."
    if not kernels.has_native(device):
        return OWN, f"There are no compiled kernels for {device.type}; see Software for why."
    if not all(rule.supports(group) for group in optimizer.param_groups):
        return (
            OWN,
            "A group asks for amsgrad, differentiable, or betas that are tensors, which the kernels do not compute.",
        )
    if columns.has_shards and rule.reads_sums:
        return OWN, "It needs the norms of whole tensors, of which this rank has shards."
    trained = [w for p, w in zip(columns.params, columns.weights, strict=True) if p.requires_grad]
    if not is_ours and any(w.dtype is not torch.float32 for w in trained) and not rows.splits:
        return OWN, "It steps weights in half, without masters; of torch.optim's classes the kernels step FP32."
    fused = fused_step_so_far(optimizer)
    if (fused is None or not fused.has_stepped) and record.pending.steps > record.pending.skips:
        return OWN, (
            "Gradients, state or weights were not as the kernels take them (dense, of one shape and device, FP32 or "
            "half), or step() was called with arguments."
        )
    return COMPILED, "One pass unscales gradients, steps, and writes what the model computes with."


def _masters(record: Record) -> str:
    rows = record.rows
    parts = []
    if rows.masters:
        parts.append(plural(len(rows.masters), "FP32 master"))
    if on_host := sum(isinstance(one, HostMaster) for one in rows.columns.beside):
        parts.append(f"{plural(on_host, 'FP32 master')} on the CPU")
    if rows.splits:
        parts.append(plural(sum(isinstance(one, Remainder) for one in rows.columns.beside), "split master"))
    fused = fused_step_so_far(record.optimizer)
    if fused is not None and fused.moment_dtype is not torch.float32:
        parts.append(
            "moments in " + ("8 bits" if fused.moment_dtype is kernels.CODES else dtype_name(fused.moment_dtype))
        )
    return ", ".join(parts)
