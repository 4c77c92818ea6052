"""Random sequences of what users do: amp_engine and plain PyTorch agree after each action. `make fuzz` runs more."""

from __future__ import annotations

import pytest

from tests.fuzz.sequences import Sequence, draw, run, shrink

CHUNKS, EACH = 10, 20


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_sequences_of_user_actions_agree_with_plain_pytorch(chunk: int) -> None:
    for seed in range(chunk * EACH, (chunk + 1) * EACH):
        sequence = draw(seed)
        if run(sequence) is not None:
            shortest = shrink(sequence)
            pytest.fail(f"seed {seed}, shortened (python -m tests.fuzz --replay FILE): {run(shortest)}{shortest}")


def test_a_sequence_is_read_as_it_was_written() -> None:
    sequence = draw(0)
    assert Sequence.parse(str(sequence)) == sequence
    assert draw(0) == sequence
