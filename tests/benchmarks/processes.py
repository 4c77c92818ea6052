"""Contestants in processes of their own: what one patches, compiles or caches is not there for the other."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

Block = Callable[[], float]
Contestant = Callable[[], AbstractContextManager[Block]]


class ContestantError(Exception):
    """A contestant failed; the message is its error."""


def race(contestants: Sequence[Contestant], rounds: int, warmup: int = 2) -> list[list[float]]:
    """Return the results of each contestant's block in each round. One runs at a time.

    Contestants are forked, so they start from the same memory at the same addresses. A round runs the block of each
    once, every other round in reverse, so that all see the same neighbours.

    Args:
        contestants: each gives a context, entered in the process, with a block that returns seconds.
        rounds: how many count.
        warmup: how many are run before them.

    Raises ContestantError if one fails, which ends the others.
    """
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    processes = []
    try:
        for contestant in contestants:
            pipe, end = context.Pipe()
            pipes.append(pipe)
            process = context.Process(target=_serve, args=(contestant, end, tuple(pipes)), daemon=True)
            process.start()
            processes.append(process)
            end.close()
        for pipe in pipes:
            _answer(pipe)  # ready: that is, entered and compiled
        seconds: list[list[float]] = [[] for _ in pipes]
        for i in range(-warmup, rounds):
            order = range(len(pipes))
            for j in order if i % 2 else reversed(order):
                pipes[j].send("go")
                answer = _answer(pipes[j])
                if i >= 0:
                    seconds[j].append(answer)
        return seconds
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def interleaved(contestants: Sequence[Contestant], rounds: int, warmup: int = 2) -> list[list[float]]:
    """Like `race`, but all contestants take turns in one process, each in its context while its block runs.

    Two processes differ by a few percent for as long as they live. This one is started anew for each call: CPython
    gives a class a limited number of version tags, and torch.Tensor, patched too often, loses the caches of its
    attributes for the rest of the process.

    Raises ContestantError if one fails.
    """
    context = multiprocessing.get_context("fork")
    pipe, end = context.Pipe()
    process = context.Process(target=_take_turns, args=(contestants, rounds, warmup, end), daemon=True)
    process.start()
    end.close()
    try:
        return _answer(pipe)
    finally:
        pipe.close()
        process.join(10)
        if process.is_alive():
            process.kill()


def _take_turns(contestants: Sequence[Contestant], rounds: int, warmup: int, end: Connection) -> None:
    try:
        gc.collect()
        gc.freeze()
        seconds: list[list[float]] = [[] for _ in contestants]
        for i in range(-warmup, rounds):
            order = range(len(contestants))
            for j in order if i % 2 else reversed(order):
                with contestants[j]() as block:
                    answer = block()
                if i >= 0:
                    seconds[j].append(answer)
        end.send(seconds)
    except BaseException as error:
        end.send(f"{type(error).__name__}: {error}")


def _serve(contestant: Contestant, end: Connection, of_parent: Sequence[Connection]) -> None:
    for pipe in of_parent:
        pipe.close()  # else the child would not hear that the parent is gone
    try:
        with contestant() as block:
            gc.collect()
            gc.freeze()  # else a contestant that imported more collects more
            end.send(0.0)
            while end.recv() == "go":
                end.send(block())
    except (EOFError, BrokenPipeError):
        return
    except BaseException as error:
        end.send(f"{type(error).__name__}: {error}")


def _answer(pipe: Connection) -> Any:
    try:
        answer = pipe.recv()
    except EOFError:
        raise ContestantError("the process ended without a word") from None
    if isinstance(answer, str):
        raise ContestantError(answer)
    return answer
