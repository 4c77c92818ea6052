"""What half must not touch: FP32 in models that come in half, what a model names itself, tables, decompositions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from amp_engine import AmpStateError, amp
from amp_engine.casting.keep_float import is_kept
from tests.support import HALF, assert_bitwise, backward, weights_of

HALF_LEVELS = ("O3", "O5")
MASTER_LEVELS = ("O2", "O5")
IDS = torch.arange(600).reshape(2, 300) % 16


class Rotary(nn.Module):
    """Positions that turn pairs of features, as language models of transformers have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, width, 2) / width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[-2]).float()[:, None] * self.inv_freq
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        even, odd = x.chunk(2, -1)
        return torch.cat([even * cos - odd * sin, even * sin + odd * cos], -1)


class Attending(nn.Module):
    """A layer of attention with rotary positions, a scan with an FP32 decay, and an FP32 projection out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.rotary = nn.Embedding(16, 8), Rotary(8)
        self.query, self.wi, self.wo = (nn.Linear(8, 8) for _ in range(3))
        self.key = nn.Linear(8, 8, bias=False)
        self.A_log = nn.Parameter(torch.arange(1.0, 9.0).log())
        self.register_buffer("bias", torch.full((8,), 5.0))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k = self.rotary(self.query(x)), self.rotary(self.key(x))
        x = x + nn.functional.scaled_dot_product_attention(q, k, x, is_causal=True)
        x = (x * (-self.A_log.float().exp()).exp()).to(x.dtype)
        x = x + self.wo(self.wi(x).to(self.wo.weight.dtype)) + self.bias
        return self.head(x.to(self.head.weight.dtype))


def loaded(dtype: torch.dtype) -> Attending:
    """The model as a loader gives it: half but for its tables, `A_log` and `wo`."""
    model = Attending()
    for name, param in model.named_parameters():
        param.data = param.data.to(torch.float32 if name.startswith(("A_log", "wo")) else dtype)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in [*model.named_parameters(), *model.named_buffers()]}


# --- a model that came in half -----------------------------------------------------------------------


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_a_half_model_computes_as_it_came_and_its_fp32_stays_fp32(level: str) -> None:
    model = loaded(HALF[level])
    came, expected = dtypes(model), model(IDS)
    amp.initialize(model, adamw(model), opt_level=level, verbosity=0)
    assert dtypes(model) == came
    assert expected.dtype is HALF[level]
    assert_bitwise(model(IDS), expected.float())
    amp.close()
    assert dtypes(model) == came


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_an_fp32_parameter_of_a_half_model_is_its_own_master(level: str) -> None:
    model = loaded(HALF[level])
    optimizer = adamw(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    assert any(p is model.A_log for p in weights_of(optimizer))
    assert any(p is model.wo.weight for p in weights_of(optimizer))
    twin = nn.Parameter(model.A_log.detach().clone())
    plain = torch.optim.AdamW([twin], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model(IDS).square().mean(), optimizer)
        twin.grad = model.A_log.grad.clone()
        optimizer.step()
        plain.step()
        torch.testing.assert_close(model.A_log, twin, rtol=1e-6, atol=0)
    assert dict(amp.named_masters(model))["A_log"] is model.A_log


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_small_updates_of_an_fp32_buffer_are_kept(level: str) -> None:
    model = loaded(HALF[level])
    amp.initialize(model, adamw(model), opt_level=level, verbosity=0)
    for _ in range(10):
        model.bias += 0.001
    torch.testing.assert_close(model.bias, torch.full((8,), 5.01))


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_states_have_the_types_in_which_tensors_came_and_masters_in_fp32(level: str) -> None:
    model = loaded(HALF[level])
    model.register_buffer("scale", torch.ones(2, dtype=HALF[level]))
    model.embedding.weight.requires_grad_(False)
    came = {name: t.dtype for name, t in model.state_dict().items()}
    optimizer = adamw(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    exported = amp.export_state_dict(model)
    assert {name: t.dtype for name, t in exported.items()} == came
    saved = model.state_dict()
    for name in ("scale", "embedding.weight", "bias", "A_log", "wo.weight"):  # without a master beside them
        assert saved[name].dtype is came[name], name
    assert saved["query.weight"].dtype is torch.float32
    twin = copy.deepcopy(model).state_dict()
    assert twin["query.weight"].dtype is HALF[level]
    model.load_state_dict(saved)
    assert {name: t.dtype for name, t in amp.export_state_dict(model).items()} == came


@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("came", [torch.float16, torch.bfloat16])
def test_batch_norms_that_came_in_half_are_exported_so_and_saved_in_fp32(level: str, came: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(came)
    optimizer = adamw(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model(torch.randn(8, 4))
    assert {t.dtype for t in amp.export_state_dict(model).values()} == {came, torch.int64}
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32, torch.int64}


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_what_stays_fp32_of_a_half_model_is_said(level: str, capsys: Any) -> None:
    model = loaded(HALF[level])
    amp.initialize(model, opt_level=level)
    said = capsys.readouterr().out
    half = str(HALF[level])[len("torch.") :]
    assert f"Note:  the model came in {half}, and what came in FP32 stays so: A_log, wo.weight, wo.bias and 2" in said


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_an_fp32_head_on_a_half_model_trains(level: str, checkpoints: bool) -> None:
    """As users put one on a pretrained model: its forward casts nothing, and PyTorch itself refuses it."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)).to(HALF[level])
            self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
            self.last = nn.Linear(2, 2).to(HALF[level])

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            x = checkpoint(self.head, x, use_reentrant=False) if checkpoints else self.head(x)
            return self.last(x)

    torch.manual_seed(0)
    model = Classifier()
    x = torch.randn(8, 4)
    with pytest.raises(RuntimeError, match="dtype"):
        model(x.to(HALF[level]))
    optimizer = adamw(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    assert model.head[0].weight.dtype is torch.float32
    by_hand = model.last.float()(model.head(model.body.float()(x)))
    model.body.to(HALF[level])
    model.last.to(HALF[level])
    torch.testing.assert_close(model(x), by_hand, rtol=0.05, atol=0.05)
    backward(model(x).square().mean(), optimizer)
    before = model.head[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.head[0].weight, before)


def test_a_checkpoint_recomputes_a_part_in_the_type_in_which_it_ran() -> None:
    """The residual stream is FP32 behind `wo`, and the block gets it so, in the backward too."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given: list[torch.dtype] = []
            self.norm, self.linear = nn.LayerNorm(4).bfloat16(), nn.Linear(4, 4).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            self.given.append(x.dtype)
            return x + self.linear(self.norm(x.to(self.norm.weight.dtype)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wo, self.block = nn.Linear(4, 4), Block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.wo(x.float()), use_reentrant=False)

    model = Model()
    optimizer = adamw(model)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    backward(model(torch.randn(2, 4)).square().mean(), optimizer)
    assert model.block.given == 2 * [torch.float32]


# --- a model that came in FP32 -----------------------------------------------------------------------


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_tables_of_an_fp32_model_stay_fp32(level: str) -> None:
    model, x = Attending().eval(), IDS
    with torch.no_grad():
        expected = model(x)
        amp.initialize(model, opt_level=level, verbosity=0)
        ours = model(x)
    assert model.rotary.inv_freq.dtype is torch.float32
    assert model.bias.dtype is HALF[level]
    assert model.query.weight.dtype is HALF[level]
    unit = torch.finfo(HALF[level]).eps
    assert (ours - expected).norm() / expected.norm() < 2 * unit


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("variance", [1e-9, 1e5])
def test_a_frozen_batch_norm_of_buffers_keeps_its_range(level: str, variance: float) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(4))
            self.register_buffer("running_mean", torch.zeros(4))
            self.register_buffer("running_var", torch.full((4,), variance))

        def forward(self, x: Tensor) -> Tensor:
            scale = (self.weight * (self.running_var + 1e-12).rsqrt())[:, None, None]
            return (x - self.running_mean[:, None, None]) * scale

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Frozen(), nn.Conv2d(4, 4, 3))
    with torch.no_grad():
        model[0].weight.mul_(variance**0.5)
        model[0].bias.zero_()
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    amp.initialize(model, opt_level=level, verbosity=0)
    ours = model(x)
    assert ours.dtype is torch.float32
    assert (ours - expected).norm() / expected.norm() < 0.02


class Naming(Attending):
    """Names what stays FP32, as models of transformers and diffusers do: modules, parameters, the end of a path."""

    _keep_in_fp32_modules = ("wo", "A_log")
    _keep_in_fp32_modules_strict = ["key.weight"]  # noqa: RUF012


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: nn.ModuleDict({"inner": model})])
def test_what_a_model_names_stays_fp32_until_close(level: str, wrap: Callable[[Any], Any], capsys: Any) -> None:
    model = Naming()
    with torch.no_grad():
        expected = model(IDS)
    whole = wrap(model)
    amp.initialize(whole, adamw(whole), opt_level=level)
    said = capsys.readouterr().out
    prefix = "" if whole is model else "inner."
    line = f"kept in FP32, as _keep_in_fp32_modules of the model says: {prefix}wo, {prefix}A_log, {prefix}key.weight."
    assert line in said
    assert model.wo.weight.dtype is model.A_log.dtype is model.key.weight.dtype is torch.float32
    assert model.query.weight.dtype is model.wi.weight.dtype is HALF[level]
    assert is_kept(model.wo)
    with torch.no_grad():
        ours = model(IDS)
    assert (ours - expected).norm() / expected.norm() < 4 * torch.finfo(HALF[level]).eps
    amp.close()
    assert not is_kept(model.wo)
    assert set(dtypes(model).values()) == {torch.float32}


def test_a_buffer_that_a_model_names_stays_fp32() -> None:
    class Routed(Attending):
        _keep_in_fp32_modules = ("offset",)

    model = Routed()
    model.register_buffer("offset", torch.full((8,), 5.0))
    amp.initialize(model, adamw(model), opt_level="O5", verbosity=0)
    assert model.offset.dtype is torch.float32
    assert model.bias.dtype is torch.bfloat16


def test_a_module_without_a_forward_that_a_model_names_stays_fp32() -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("embed", torch.rand(4, 4))

    model = nn.Sequential(nn.Linear(4, 4))
    model[0].codebook = Codebook()
    model._keep_in_fp32_modules = ["codebook"]
    amp.initialize(model, opt_level="O5", verbosity=0)
    assert model[0].codebook.embed.dtype is torch.float32


def test_each_module_of_a_list_that_a_model_names_is_kept() -> None:
    class Heads(nn.Module):
        _keep_in_fp32_modules = ("heads",)

        def __init__(self) -> None:
            super().__init__()
            self.base, self.heads = nn.Linear(4, 4), nn.ModuleList(Own(4) for _ in range(2))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [head(self.base(x)) for head in self.heads]

    model = Heads()
    amp.initialize(model, adamw(model), opt_level="O5", verbosity=0)
    assert all(is_kept(head) and head.weight.dtype is torch.float32 for head in model.heads)
    assert {output.dtype for output in model(torch.randn(2, 4))} == {torch.float32}


class Own(nn.Module):
    """Computes with its weight by an operation, which takes one type."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize(
    ("level", "cast_model_type", "keeps"), [("O0", torch.float16, True), ("O2", False, False), ("O2", None, True)]
)
def test_an_override_of_the_models_type_decides_what_is_kept(level: str, cast_model_type: Any, keeps: bool) -> None:
    model = Naming()
    amp.initialize(model, opt_level=level, cast_model_type=cast_model_type, verbosity=0)
    assert is_kept(model.wo) is keeps


def test_what_a_half_model_names_stays_as_the_loader_left_it() -> None:
    model = Naming().bfloat16()
    amp.initialize(model, adamw(model), opt_level="O5", verbosity=0)
    assert model.wo.weight.dtype is model.A_log.dtype is torch.bfloat16
    assert not is_kept(model.wo)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_levels_that_cast_no_model_keep_no_module(level: str) -> None:
    model = Naming()
    amp.initialize(model, adamw(model), opt_level=level, verbosity=0)
    assert not is_kept(model.wo)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_a_call_that_is_refused_keeps_nothing_that_the_model_names(level: str) -> None:
    model = Naming()
    with pytest.raises(AmpStateError):
        amp.initialize(model, adamw(model), opt_level=level, verbosity=0, patch_torch_functions=True)
    assert not is_kept(model.wo)
    assert not any(name.startswith("_amp_engine") for module in model.modules() for name in vars(module))


# --- decompositions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("came", [torch.float32, None])
@pytest.mark.parametrize("kind", ["orthogonal", "spectral_norm"])
def test_decompositions_of_parametrizations_run_in_fp32(level: str, came: torch.dtype | None, kind: str) -> None:
    torch.manual_seed(0)
    layer = getattr(parametrizations, kind)(nn.Linear(6, 6))
    model = nn.Sequential(nn.Linear(4, 6), layer)
    x = torch.randn(8, 4)
    expected = model(x)
    expected.square().mean().backward()
    original = layer.parametrizations.weight.original
    gradient = original.grad
    original.grad = None
    if came is None:
        model.to(HALF[level])
    optimizer = adamw(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    assert original.dtype is layer.weight.dtype is HALF[level]
    ours = model(x)
    torch.testing.assert_close(ours, expected, rtol=0.05, atol=0.05)
    backward(ours.square().mean(), optimizer)
    found = next(m.grad for m in amp.master_params(optimizer) if m.shape == gradient.shape and m.grad is not None)
    assert found.isfinite().all()
    assert (found - gradient).norm() / gradient.norm() < 0.1


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("stays", ["as loaded", "kept", "named"])
@pytest.mark.parametrize("kind", ["orthogonal", "spectral_norm"])
def test_an_fp32_layer_with_a_decomposition_stays_fp32(level: str, stays: str, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), getattr(parametrizations, kind)(nn.Linear(6, 6)), nn.Linear(6, 6))
    if stays == "as loaded":
        model.to(HALF[level])[1].float()
    elif stays == "kept":
        amp.keep_float(model[1])
    else:
        model._keep_in_fp32_modules = ["1"]
    amp.initialize(model, adamw(model), opt_level=level, verbosity=0)
    assert model[1].weight.dtype is torch.float32
    assert model(torch.randn(8, 6)).dtype is torch.float32


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("kind", ["orthogonal", "spectral_norm", "weight_norm"])
def test_a_parametrized_model_is_given_back_in_half(level: str, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), getattr(parametrizations, kind)(nn.Linear(6, 6))).to(HALF[level])
    before, values = dtypes(model), {name: t.clone() for name, t in model.state_dict().items()}
    optimizer = adamw(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert level == "O3" or {m.dtype for m in amp.master_params(optimizer)} == {torch.float32}
    amp.close()
    assert dtypes(model) == before
    for name, tensor in model.state_dict().items():
        assert_bitwise(tensor, values[name])


# --- what a cast loses is named ------------------------------------------------------------------------


def said_of(model: nn.Module, level: str, capsys: Any) -> str:
    amp.initialize(model, opt_level=level)
    return str(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("level", "value", "words"),
    [
        ("O3", 1e5, "values beyond 65504, the largest float16, become infinite, of 1.running_var"),
        ("O3", 1e-9, "values below 6e-08, the smallest float16, become 0, of 1.running_var"),
        ("O3", 2049.0, "whole numbers beyond 2048, of which float16 has not all, change, of 1.running_var"),
        ("O5", 257.0, "whole numbers beyond 256, of which bfloat16 has not all, change, of 1.running_var"),
        ("O5", 1e-9, None),
        ("O5", 256.0, None),
        ("O3", 0.1, None),
    ],
)
def test_buffers_that_a_cast_changes_are_named(level: str, value: float, words: str | None, capsys: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    model[1].running_var.fill_(value)
    said = said_of(model, level, capsys)
    if words is None:
        assert "Warning" not in said
    else:
        assert f"Warning:  at {level} {words}" in said
        assert "amp.keep_float(module)" in said


def test_a_parameter_that_becomes_0_is_named_and_single_values_are_not(capsys: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.fill_(1e-9)
        model[1].weight[0, 0] = 1e-9
    assert "become 0, of 0.weight.  Take opt_level='O5'" in said_of(model, "O2", capsys)


# --- torch's own options and changes of a model ----------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
@pytest.mark.parametrize("option", ["overwrite_module_params_on_conversion", "swap_module_params_on_conversion"])
def test_options_of_torch_for_conversions_change_no_object(level: str, option: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = adamw(model)
    before = [*model.parameters()]
    switch = getattr(torch.__future__, f"set_{option}")
    switch(True)
    try:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
        values = [p.detach().clone() for p in model.parameters()]
        backward(model(torch.randn(8, 4)).square().mean(), optimizer)
        optimizer.step()
        assert not any(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))
        amp.close()
        assert getattr(torch.__future__, f"get_{option}")()
    finally:
        switch(False)
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert all(p is q for p, q in zip(weights_of(optimizer), before, strict=True))
    assert set(dtypes(model).values()) == {torch.float32, torch.int64}


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_close_gives_frozen_parameters_their_types_whatever_their_names_are_by_then(level: str) -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.down = base, nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.down(x)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    model.requires_grad_(False)
    amp.initialize(model, opt_level=level, verbosity=0)
    model[0] = Adapter(model[0])
    parametrizations.weight_norm(model[1])
    amp.close()
    assert {t.dtype for t in [*model.parameters(), *model.buffers()]} == {torch.float32, torch.int64}
    model(torch.randn(8, 4))
