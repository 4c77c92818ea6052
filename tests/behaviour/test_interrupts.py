"""Ctrl-C, or an observer that raises, at any line: later steps see no gradient, and the next `close` undoes all."""

from __future__ import annotations

import linecache
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amp_engine
from amp_engine import AmpStateError, Engine, amp
from amp_engine.casting import regions
from tests.conftest import patched_names
from tests.support import assert_bitwise, masters, weights_of

PACKAGE = str(Path(amp_engine.__file__).parent)
STRIDE = 7  # every 7th line, as all of them take 15 s
# An error in a finalizer is printed and ignored.
FINALIZERS = {"__del__", "on_collection"}
# Nothing can guard the exit of a context against an interrupt; torch's own have the same gap. At a `try:` none comes.
# The same holds between the call that makes something and the line that keeps it.
EXITS = (
    "with ",
    "try:",
    "self._is_stepping = False",
    "self._is_within = False",
    "yield joining",
    "cast_models.append(",
)


@contextmanager
def interrupted(line: int, reached: list[int]) -> Iterator[None]:
    """Raise KeyboardInterrupt at the `line`-th executed line of amp_engine; count the lines in `reached`."""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        code = frame.f_code
        file, name = code.co_filename, code.co_name
        if not file.startswith(PACKAGE) or name in FINALIZERS or file == regions.__file__:
            return None
        is_first = True  # a method's first line is no later than its call

        def each(frame: Any, event: str, argument: Any) -> Any:
            nonlocal is_first
            if event == "line" and not linecache.getline(file, frame.f_lineno).strip().startswith(EXITS):
                if not is_first:
                    reached[0] += 1
                    if reached[0] == line:
                        raise KeyboardInterrupt
                is_first = False
            return each

        return each

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def iteration(
    model: nn.Module, optimizer: torch.optim.Optimizer, part: str = "", during: Callable[[], Any] | None = None
) -> None:
    """Run one iteration, its loss too large where a part of it runs in the context that `during` gives."""
    contexts = {name: during if during is not None and name == part else _nothing for name in ("entry", "exit", "step")}
    loss = model(torch.ones(4, 4)).square().mean() * (1.0 if during is None else 1e38)
    context = amp.scale_loss(loss, optimizer)
    with contexts["entry"]():
        scaled_loss = context.__enter__()
    scaled_loss.backward()
    with contexts["exit"]():
        context.__exit__(None, None, None)
    with contexts["step"]():
        optimizer.step()
    optimizer.zero_grad()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def started(level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in finalizers of what was half made
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("part", ["entry", "exit", "step"])
def test_an_interrupt_at_any_line_leaves_no_gradient_behind(part: str, level: str) -> None:
    reached = [0]
    line, lines = 1, STRIDE
    while line <= lines:
        model, optimizer = started(level)
        iteration(model, optimizer)
        reached[0] = 0
        try:
            iteration(model, optimizer, part, lambda: interrupted(line, reached))  # noqa: B023 - is called at once
        except KeyboardInterrupt:
            lines = line + STRIDE
        for _ in range(2):
            iteration(model, optimizer)
        assert all(p.isfinite().all() for p in masters(optimizer)), f"line {line}"
        assert_bitwise(
            [p.to(q.dtype) for p, q in zip(masters(optimizer), model.parameters(), strict=True)], [*model.parameters()]
        )
        amp.close()
        line += STRIDE
    assert line > 50


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_leaves_no_scaled_gradient_to_an_optimizer_that_the_loss_does_not_list() -> None:
    reached = [0]
    line, lines = 1, STRIDE
    while line <= lines:
        torch.manual_seed(0)
        models = [nn.Linear(4, 4), nn.Linear(4, 4)]
        listed, other = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
        amp.initialize(models, [listed, other], opt_level="O1", verbosity=0)
        before = masters(other)
        for is_interrupted in (False, True, False):
            context = amp.scale_loss(models[1](models[0](torch.ones(2, 4))).square().mean(), listed)
            context.__enter__().backward()
            reached[0] = 0
            try:
                with interrupted(line, reached) if is_interrupted else _nothing():
                    context.__exit__(None, None, None)
            except KeyboardInterrupt:
                lines = line + STRIDE
            else:
                listed.step()
                assert not amp.last_step(listed).skipped, f"line {line}"
            with suppress(AmpStateError):
                other.step()
            assert_bitwise(masters(other), before, f"line {line}")
            listed.zero_grad()
            other.zero_grad()
        amp.close()
        line += STRIDE


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_scaler_goes_on_after_an_interrupt_of_its_scale() -> None:
    reached = [0]
    line, lines = 1, STRIDE
    while line <= lines:
        model, optimizer = started("O2")
        scaler = amp.GradScaler()
        reached[0] = 0
        try:
            with interrupted(line, reached):
                scaler.scale(model(torch.ones(4, 4)).sum())
        except KeyboardInterrupt:
            lines = line + STRIDE
        scaler.update()
        scaler.scale(model(torch.ones(4, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        amp.close()
        line += STRIDE


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_log_handler_that_raises_at_an_overflow_leaves_no_gradient_behind(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StopError(Exception):
        pass

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "overflow" in record.getMessage():
                raise StopError

    monkeypatch.setattr(logging.getLogger("amp_engine"), "handlers", [Handler()])
    model, optimizer = started(level)
    amp.close()
    amp.initialize(model, optimizer, opt_level=level)
    iteration(model, optimizer)
    before = masters(optimizer)
    with pytest.raises(StopError):
        iteration(model, optimizer, "none", _nothing)
    assert_bitwise(masters(optimizer), before)
    assert amp.last_step(optimizer).skipped
    with suppress(StopError):
        optimizer.step()  # finds nothing at O2; at O1, what it has skipped
    optimizer.zero_grad()
    iteration(model, optimizer)
    assert all(p.isfinite().all() for p in masters(optimizer))


def test_a_close_that_is_interrupted_gives_everything_back() -> None:
    def update() -> None:
        raise KeyboardInterrupt  # while ranks agree

    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    engine = Engine()
    engine.initialize(models, optimizers, opt_level="O2", verbosity=0)
    with engine.scale_loss(models[1](models[0](torch.ones(2, 4))).sum(), optimizers) as scaled_loss:
        scaled_loss.backward()
    expected = [[p.detach().clone() for p in engine.master_params(optimizer)] for optimizer in optimizers]
    engine.scalers[0].owe(update)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert engine.policy is None
    engine.close()
    assert_bitwise([list(model.parameters()) for model in models], expected)
    for model, optimizer in zip(models, optimizers, strict=True):
        assert [*map(id, weights_of(optimizer))] == [*map(id, model.parameters())]
        assert all(p.grad is None for p in model.parameters()), "nobody knows if they are finite"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("call", ["initialize", "close"])
def test_a_close_undoes_what_an_interrupt_at_any_line_left(call: str, level: str) -> None:
    reached = [0]
    stride = 5 * STRIDE if (call, level) == ("initialize", "O1") else STRIDE  # 5,000 lines, of loops for the most part
    line, lines = 1, stride
    while line <= lines:
        model, optimizer = started(level)
        iteration(model, optimizer)
        expected = [p.detach().clone() for p in masters(optimizer)]
        if call == "initialize":
            amp.close()
        reached[0] = 0
        try:
            with interrupted(line, reached):
                amp.initialize(model, optimizer, opt_level=level, verbosity=0) if call == "initialize" else amp.close()
        except KeyboardInterrupt:
            lines = line + stride
        amp.close()
        assert_bitwise([*model.parameters()], expected)
        assert [*map(id, weights_of(optimizer))] == [*map(id, model.parameters())], f"line {line}"
        assert {*map(id, optimizer.state)} == {*map(id, model.parameters())}, f"line {line}"
        assert not any(name.startswith("_amp") for name in vars(optimizer)), f"line {line}"
        assert not any([optimizer._optimizer_step_pre_hooks, model._state_dict_hooks]), f"line {line}"
        assert patched_names() == [], f"line {line}"
        line += stride
    assert line > 50
