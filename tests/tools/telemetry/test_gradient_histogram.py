"""`amp.gradient_histogram`: planted gradients are found, counted and drawn, and nothing of the run is changed."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import Engine, amp
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.tools.telemetry.gradient_histogram import GradientHistogram, gradient_histogram
from amp_engine.tools.telemetry.magnitudes import MagnitudeCounter
from amp_engine.tools.telemetry.receipt import receipt
from tests.models import LSTM, NORMED_MLP, TRANSFORMER
from tests.support import LEVELS, assert_bitwise, backward, optimizer_values, started, train

FLOAT16_LEVELS = ("O1", "O2", "O3")


class Gradient(torch.autograd.Function):
    """Gives a number, whose gradient is `values` whatever went in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        ctx.dtype = x.dtype
        return x.float().sum() * 0.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (values,) = ctx.saved_tensors
        return (values.double() * grad.double()).to(ctx.dtype), None


class Planted(nn.Module):
    """One linear layer, whose output has the gradient `values`."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, values.shape[1])
        self.values = values

    def forward(self, x: Tensor) -> Tensor:
        return Gradient.apply(self.layer(x), self.values)


def like_ssd(n: int = 4000) -> Tensor:
    """Gradients of which float16 loses 31 % as they are and 0.1 % once they are shifted by 15 powers of two."""
    exponents = torch.cat([torch.rand(int(n * share)) * (high - low) + low for low, high, share in PARTS])
    return torch.exp2(exponents).reshape(40, -1) * torch.randn(40, len(exponents) // 40).sign()


PARTS = [(-42.0, -40.0, 0.001), (-40.0, -25.01, 0.309), (-25.0, -10.0, 0.69)]


@pytest.mark.parametrize("level", ["O0", *FLOAT16_LEVELS])
@pytest.mark.parametrize("loss_scale", [1.0, 2.0**15])
def test_planted_gradients_are_counted_though_the_present_scale_loses_them(level: str, loss_scale: float) -> None:
    values = like_ssd()
    with Engine() as engine:
        model = Planted(values)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level=level, loss_scale=loss_scale, verbosity=0)
        found = gradient_histogram(engine, lambda: model(torch.randn(40, 4) / 64))
        assert found.loss_scale == loss_scale
        assert found.dtype == "float16"
        assert found.activations.nonfinite == found.weights.nonfinite == 0
        exact = MagnitudeCounter()
        exact.add(values)
        expected = exact.read()
        # Halves are rounded, across a power of two now and then.
        assert found.activations.nonzero == pytest.approx(expected.nonzero, abs=2)
        assert found.activations.lost(torch.float16, 1.0) == pytest.approx(0.31, abs=0.002)
        assert found.activations.lost(torch.float16, 2.0**15) == pytest.approx(0.001, abs=0.0006)
        assert "loses 31.0 % at scale 1" in str(found)
        assert loss_scale == 1.0 or "and 0.1 % at 32768" in str(found)


def test_gradients_of_weights_are_those_of_autograd() -> None:
    for task in (NORMED_MLP, LSTM, TRANSFORMER):
        with Engine() as engine:
            model, optimizer = started("O0", task=task, engine=engine)
            batch = task.batch(0)
            found = gradient_histogram(engine, lambda model=model, task=task, batch=batch: task.loss(model, batch))
            model.zero_grad()
            task.loss(model, batch).backward()
            counter = MagnitudeCounter()
            for p in model.parameters():
                if p.grad is not None:
                    counter.add(p.grad)
            assert found.weights == counter.read()


@pytest.mark.parametrize("level", LEVELS)
def test_whoever_scales_the_loss_the_same_is_counted(level: str) -> None:
    batch = NORMED_MLP.batch(0)
    found = []
    with Engine() as engine:
        model, optimizer = started(level, engine=engine)

        def whole_step() -> None:
            optimizer.zero_grad()
            backward(NORMED_MLP.loss(model, batch), optimizer, engine=engine)
            optimizer.step()

        def without_amp() -> None:
            NORMED_MLP.loss(model, batch).backward()

        found = [
            gradient_histogram(engine, step)
            for step in (lambda: NORMED_MLP.loss(model, batch), whole_step, without_amp)
        ]
    assert found[0] == found[1]
    assert found[2].weights.total == found[0].weights.total == sum(p.numel() for p in model.parameters())
    assert found[2].activations.total == found[0].activations.total


def test_what_a_module_passes_on_counts_once() -> None:
    inner = nn.Sequential(nn.Linear(4, 6), nn.Identity(), nn.ReLU(inplace=True))
    model = nn.Sequential(inner, nn.Linear(6, 2))
    with Engine() as engine:
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
        found = gradient_histogram(engine, lambda: model(torch.randn(5, 4)).square().sum())
    assert found.activations.total == 5 * 6 + 5 * 6 + 5 * 2


@pytest.mark.parametrize("level", FLOAT16_LEVELS)
def test_a_scale_that_overflows_is_lowered_to_count(level: str) -> None:
    with Engine() as engine:
        model, _ = started(level, engine=engine, loss_scale="dynamic")
        engine.scalers[0]._loss_scale = 2.0**24
        found = gradient_histogram(engine, lambda: NORMED_MLP.loss(model, NORMED_MLP.batch(0)))
        assert found.loss_scale == 2.0**24
        assert found.measured_at < 2.0**24
        assert found.activations.nonfinite == found.weights.nonfinite == 0
        assert found.weights.nonzero > 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "loss_scale", ["dynamic", "auto", amp.DynamicLossScale(init_scale=2.0**24, hysteresis=2), 128.0], ids=str
)
def test_everything_is_as_before(level: str, loss_scale: Any) -> None:
    runs: list[Any] = []
    for looks in (False, True):
        torch.manual_seed(0)
        with Engine() as engine:
            model, optimizer = started(level, engine=engine, loss_scale=loss_scale)
            train(NORMED_MLP, model, optimizer, "co", engine=engine)
            if looks:
                gradient_histogram(engine, lambda model=model: NORMED_MLP.loss(model, NORMED_MLP.batch(0)))
                with pytest.raises(KeyError):
                    gradient_histogram(engine, lambda: {}["no batch"])
            losses = train(NORMED_MLP, model, optimizer, "ccc", first=2, engine=engine)
            scales = engine.state_dict(), [scaler.memory() for scaler in engine.scalers]
            hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
            grads = [p.grad for p in model.parameters()]
            runs.append(
                [
                    torch.tensor(losses),
                    scales,
                    hooks,
                    receipt(engine).losses,
                    dict(model.state_dict()),
                    optimizer_values(optimizer),
                    grads,
                    torch.get_rng_state(),
                ]
            )
    assert_bitwise(runs[0], runs[1])


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_bfloat16_loses_nothing_and_float16_can_be_asked_for(level: str) -> None:
    with Engine() as engine:
        model = Planted(like_ssd())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
        found = gradient_histogram(engine, lambda: model(torch.randn(40, 4)))
        assert (found.dtype, found.lost(), found.lost(1.0)) == ("bfloat16", 0.0, 0.0)
        asked = gradient_histogram(engine, lambda: model(torch.randn(40, 4)), torch.float16)
        assert asked.activations.lost(torch.float16) == pytest.approx(0.31, abs=0.002)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules_are_run_first() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.LazyBatchNorm1d(affine=False), nn.Linear(4, 1))
    x = torch.randn(3, 2)
    with Engine() as engine:
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
        with pytest.raises(AmpStateError, match=r"Buffer 1.running_mean .* no shape .*call amp.gradient_histogram"):
            gradient_histogram(engine, lambda: model(x).float().sum())
        with torch.no_grad():
            model(x)
        assert gradient_histogram(engine, lambda: model(x).float().sum()).weights.total > 0


@pytest.mark.parametrize(("dtype", "lost"), [(torch.float8_e5m2, 22 / 40), (torch.float8_e4m3fn, 29 / 40)])
def test_limits_of_eight_bits_are_marked(dtype: torch.dtype, lost: float) -> None:
    values = torch.exp2(-torch.arange(40.0))[:, None]  # E5M2 rounds those below 2^-17 to 0, E4M3 those below 2^-10
    with Engine() as engine:
        model = Planted(values)
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", verbosity=0)
        found = gradient_histogram(engine, lambda: model(torch.randn(40, 4)), dtype)
    assert found.activations.lost(dtype) == lost
    assert f"0 in {str(dtype).removeprefix('torch.')} at scale 1" in str(found)


def test_refusals() -> None:
    engine = Engine()
    with pytest.raises(AmpStateError, match=r"amp\.initialize\(\) was not"):
        gradient_histogram(engine, lambda: None)
    with engine:
        model, optimizer = started("O2", engine=engine)
        with pytest.raises(AmpTypeError, match=r"not a int.*lambda: loss_fn"):
            gradient_histogram(engine, 3)  # type: ignore[arg-type]
        with pytest.raises(AmpTypeError, match=r"torch\.float16"):
            gradient_histogram(engine, lambda: None, "half")  # type: ignore[arg-type]
        with pytest.raises(AmpValueError, match=r"torch\.int64 is not a floating type"):
            gradient_histogram(engine, lambda: None, torch.int64)
        with pytest.raises(AmpStateError, match="saw no gradient"):
            gradient_histogram(engine, lambda: None)
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(0)), optimizer, engine=engine)
        with pytest.raises(AmpStateError, match=r"gradient_histogram\(\).*wait for SGD.step"):
            gradient_histogram(engine, lambda: None)


# --- pictures -------------------------------------------------------------------------------------


def ssd() -> GradientHistogram:
    counter = MagnitudeCounter()
    counter.add(like_ssd())
    counter.add(torch.zeros(400))
    return GradientHistogram("Gradients of SSD at O2", "float16", 2.0**15, 2.0**20, counter.read(), counter.read())


def test_text_has_the_limits_in_their_places() -> None:
    lines = str(ssd()).splitlines()
    marks = [line.strip() for line in lines if " below " in line]
    assert marks == [
        "-- below 2^-14: subnormal in float16 at scale 1 --",
        "-- below 2^-25: 0 in float16 at scale 1 --",
        "-- below 2^-29: subnormal at the loss scale of 32768 --",
        "-- below 2^-40: 0 at the loss scale of 32768 --",
    ]
    (at,) = [i for i, line in enumerate(lines) if "below 2^-25" in line]
    assert lines[at - 1].split()[0] == "2^-25"
    assert lines[at + 1].split()[0] == "2^-26"
    assert max(map(len, lines[:-2])) <= 100
    assert "9.1 % of all were 0" in lines[-1]


def test_many_powers_of_two_become_rows_of_several() -> None:
    counter = MagnitudeCounter()
    counter.add(torch.exp2(torch.linspace(-120, 120, 5000)))
    wide = GradientHistogram("Wide", "float16", 1.0, 1.0, counter.read(), counter.read())
    rows = [line for line in str(wide).splitlines() if line.strip().startswith("2^")]
    assert 20 < len(rows) <= 44


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "gradients.png"
    drawn = ssd().plot(str(path))
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert len(drawn.axes) == 2
    assert "31.0 % at scale 1 and 0.1 % at 32768" in drawn.axes[0].get_title()
    assert len(drawn.axes[0].lines) == 4
    plain = GradientHistogram("Plain", "bfloat16", 1.0, 1.0, ssd().activations, ssd().weights)
    assert plain.plot().axes[0].get_legend() is None


def test_without_matplotlib_it_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install amp_engine\[plots\]"):
        ssd().plot()
    assert "loses 31.0 %" in str(ssd())


def test_a_notebook_and_a_receipt_show_it(tmp_path: Path) -> None:
    found = ssd()
    assert "-- below 2^-40: 0 at the loss scale of 32768 --" in found._repr_html_()
    assert found._repr_html_().count("loses 31.0 % at scale 1") == 2
    with Engine() as engine:
        started("O2", engine=engine)
        page = receipt(engine, gradients=found)
        assert "loses 31.0 % at scale 1" in str(page)
        assert json.loads(page.to_json())["gradients"]["title"] == found.title
        page.save(tmp_path / "run.html")
        for text in (str(page), (tmp_path / "run.html").read_text()):
            assert "-- below 2^-40: 0 at the loss scale of 32768 --" in text
        assert "amp.gradient_histogram(lambda" in str(receipt(engine))
        with pytest.raises(AmpTypeError, match=r"amp\.gradient_histogram"):
            receipt(engine, gradients=3)  # type: ignore[arg-type]


# --- loops of other shapes ------------------------------------------------------------------------


def refs_of_a_run(level: str) -> list[Any]:
    """Return weak references to a weight, and to a result of a function that raised."""
    with Engine() as engine:
        model, _ = started(level, engine=engine)

        def fails() -> None:
            raise KeyError("no targets", weakref.ref(model(NORMED_MLP.batch(0)[0])))

        gradient_histogram(engine, lambda: NORMED_MLP.loss(model, NORMED_MLP.batch(0)))
        with pytest.raises(KeyError) as raised:
            gradient_histogram(engine, fails)
        return [weakref.ref(next(model.parameters())), raised.value.args[1]]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_nothing_of_the_batch_is_held_afterwards(level: str) -> None:
    refs = refs_of_a_run(level)
    gc.collect()
    assert [ref() for ref in refs] == [None, None], "hooks on a graph hold it in a cycle that Python does not see"


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_accumulated_and_delayed_gradients_count_once_and_unscaled(level: str) -> None:
    batches = [NORMED_MLP.batch(i) for i in range(3)]
    with Engine() as engine:
        model, optimizer = started(level, engine=engine, loss_scale=2.0**10)

        def accumulates() -> None:
            for batch in batches:
                backward(NORMED_MLP.loss(model, batch), optimizer, engine=engine)
            optimizer.step()

        def delays(steps: bool) -> None:
            for i, batch in enumerate(batches):
                last = i == 2 and steps
                backward(NORMED_MLP.loss(model, batch), optimizer, engine=engine, delay_unscale=not last)
            if steps:
                optimizer.step()

        def is_left_open() -> None:
            delays(False)

        def steps_while_open() -> None:
            delays(False)
            optimizer.step()

        runs = accumulates, lambda: delays(True), is_left_open, steps_while_open
        found = [gradient_histogram(engine, run).weights for run in runs]
    for one in found:
        assert one.total == sum(p.numel() for p in model.parameters())
        assert one.largest == found[0].largest
        assert dict(one.counts) == pytest.approx(dict(found[0].counts), abs=12), "rounded at other places"


def test_losses_with_scales_of_their_own_are_told_apart() -> None:
    models = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    with Engine() as engine:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        engine.initialize(models, optimizers, opt_level="O1", num_losses=2, verbosity=0)
        engine.scalers[1]._loss_scale = 2.0**6

        def step() -> None:
            losses = [m(torch.eye(4)).sum() for m in models]
            with (
                engine.scale_loss(losses[0], optimizers[0], loss_id=0) as a,
                engine.scale_loss(losses[1], optimizers[1], loss_id=1) as b,
            ):
                a.backward()
                b.backward()

        found = gradient_histogram(engine, step)
    assert found.activations.counts == ((0, 32),)
    assert found.weights.counts == ((0, 32),)
