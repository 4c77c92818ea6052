"""Ten architectures of transformers, chosen for their variety: `make zoo` measures all, with the same functions."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from torch import nn

pytest.importorskip("transformers", reason="the extra `zoo` has it")

from tests.zoo.architectures import Model, build
from tests.zoo.measure import LEVELS, as_loaded, errors
from tests.zoo.verdict import LIMIT, is_that_of_half, ratio

# Rotary tables, a bias of attention that is learned, a scan, learned positions, an encoder, images, sound in and text
# out, a router's bias, two towers, and batch norms that are frozen.
SAMPLE = ("llama", "umt5", "mamba", "gpt2", "bert", "vit", "whisper", "deepseek_v3", "clip", "detr")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def clean_module() -> Iterator[None]:
    """Transformers adds a method to torch's class, and adds it again where it is missing."""
    yield
    if hasattr(nn.Module, "smart_apply"):
        del nn.Module.smart_apply


@pytest.fixture(scope="module", params=SAMPLE)
def model(request, tmp_path_factory) -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build(request.param, str(tmp_path_factory.mktemp(request.param)))


def test_a_model_loaded_in_bfloat16_stays_as_it_came(model: Model):
    found = as_loaded(model)
    assert found["repeats"]
    assert found["different"] == {}
    assert found["equal"]
    assert found["exported"] == []


def test_a_model_built_in_fp32_is_at_most_twice_as_far_off_as_under_autocast(model: Model):
    row = {"errors": errors(model)}
    beyond = {level: ratio(row, level) for level in LEVELS if not is_that_of_half(row, level)}
    assert all(value <= LIMIT for value in beyond.values()), row["errors"]
