"""torch.compile(fullgraph=True) under every level: one graph, eager's numbers, before and after `initialize`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensor

from amp_engine import Engine, amp
from amp_engine.casting import FunctionCasts
from tests.compile.models import ATTENTION, BOOL, CNN, FUNCTIONAL, LOW, TINY, operators
from tests.models import Task
from tests.support import HALF, WEIGHT_DTYPE, assert_bitwise, backward, frozen

pytestmark = [
    # inductor
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated"),
]


class Run(NamedTuple):
    """The results of some steps: losses, outputs, gradients of the first step, weights, buffers."""

    losses: list[Tensor]
    outputs: list[Tensor]
    gradients: list[Tensor | None]
    weights: dict[str, Tensor]


def compiled(target: Any, backend: Any = "aot_eager", **keywords: Any) -> Any:
    return torch.compile(target, fullgraph=True, backend=backend, **keywords)


def train(task: Task, level: str | None, transform: Callable[[nn.Module], Any] = lambda m: m, steps: int = 3) -> Run:
    """Training from the same start; `level` None is without amp."""
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    run, outputs, losses, gradients = transform(model), [], [], []
    for index in range(steps):
        inputs, targets = task.batch(index)
        outputs.append(run(inputs))
        losses.append(task.criterion(outputs[-1], targets))
        optimizer.zero_grad()
        if level is None:
            losses[-1].backward()
        else:
            backward(losses[-1], optimizer)
        gradients = gradients or [frozen(p.grad) for p in amp.master_params(optimizer)]
        optimizer.step()
    result = Run(frozen(losses), frozen(outputs), gradients, frozen(model.state_dict()))
    amp.close()
    return result


def output_types(run: Run) -> set[torch.dtype]:
    return {output.dtype for output in run.outputs}


# --- training -------------------------------------------------------------------------------------

CASES = [
    *((FUNCTIONAL, level) for level in ("O0", "O2")),
    (ATTENTION, "O1"),
    *((CNN, level) for level in ("O1", "O5")),
]


@pytest.mark.parametrize(("task", "level"), CASES, ids=[f"{task.name}-{level}" for task, level in CASES])
def test_training_in_one_graph_is_eager_training_bit_for_bit(task: Task, level: str) -> None:
    """aot_eager runs the kernels of eager mode, and no weight here is used twice, so that no sum has two orders."""
    run = train(task, level, compiled)
    assert counters["stats"]["unique_graphs"] == 1
    assert_bitwise(run, train(task, level))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_with_inductor_is_eager_training_within_rounding(level: str) -> None:
    """Inductor keeps intermediate values in FP32 where eager mode rounds them."""
    eager, run = train(TINY, level), train(TINY, level, lambda m: compiled(m, "inductor"))
    assert output_types(run) == output_types(eager)
    tolerance = 4 * torch.finfo(HALF[level]).eps
    assert_near = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    assert_near(run.losses, eager.losses)
    assert_near(run.outputs, eager.outputs)
    assert_near(run.weights, eager.weights)
    assert not torch.equal(run.outputs[-1].float(), train(TINY, None).outputs[-1]), "nothing ran in low precision"


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_model_compiled_in_place_trains_as_eager(level: str) -> None:
    def in_place(model: nn.Module) -> nn.Module:
        model.compile(fullgraph=True, backend="aot_eager")
        return model

    run = train(FUNCTIONAL, level, in_place)
    assert counters["stats"]["unique_graphs"] == 1
    assert_bitwise(run, train(FUNCTIONAL, level))


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_casts_of_inputs_and_outputs_are_part_of_one_graph(level: str) -> None:
    with torch._dynamo.config.patch(wrap_top_frame=True):
        run = train(FUNCTIONAL, level, compiled, steps=1)
        assert counters["stats"]["unique_graphs"] == 1
    assert_bitwise(run, train(FUNCTIONAL, level, steps=1))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_in_a_compiled_model_skips_the_step(level: str) -> None:
    model = FUNCTIONAL.model()
    optimizer = torch.optim.AdamW(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    run = compiled(model)
    for index, overflow in enumerate((False, True, False)):
        before = frozen(list(amp.master_params(optimizer)))
        optimizer.zero_grad()
        backward(FUNCTIONAL.loss(run, FUNCTIONAL.batch(index)), optimizer, overflow=overflow)
        optimizer.step()
        moved = [not torch.equal(p, b) for p, b in zip(amp.master_params(optimizer), before, strict=True)]
        assert any(moved) is not overflow
    assert counters["stats"]["unique_graphs"] == 1


# --- when the model is compiled -------------------------------------------------------------------


def outputs_of(level: str | None, wrap: Callable[[nn.Module], Any] = lambda m: m) -> Tensor:
    model = FUNCTIONAL.model()
    if level is not None:
        amp.initialize(model, opt_level=level, verbosity=0)
    output = wrap(model)(FUNCTIONAL.batch()[0])
    amp.close()
    return output.detach()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_model_may_be_compiled_before_or_after_initialize(moment: str, level: str) -> None:
    x, model = FUNCTIONAL.batch()[0], FUNCTIONAL.model()
    plain, expected = outputs_of(None), outputs_of(level)
    run = None if moment == "after" else compiled(model)
    if moment == "before":
        assert_bitwise(run(x), plain)
    amp.initialize(model, opt_level=level, verbosity=0)
    run = compiled(model) if run is None else run
    for _ in range(2):
        assert_bitwise(run(x), expected)
    assert not torch.equal(expected.float(), plain), "the level changes nothing, so the test sees nothing"
    amp.close()
    assert next(model.parameters()).dtype == torch.float32
    if WEIGHT_DTYPE[level] == torch.float32:
        assert_bitwise(run(x), plain)
    else:
        assert run(x).dtype == torch.float32
        torch.testing.assert_close(run(x), model(x), rtol=0, atol=0)


def test_the_compiled_module_itself_may_be_passed_to_initialize() -> None:
    x, model = FUNCTIONAL.batch()[0], FUNCTIONAL.model()
    run = compiled(model)
    run(x)
    assert amp.initialize(run, opt_level="O1", verbosity=0) is run
    assert_bitwise(run(x), model(x))
    assert run(x).dtype == torch.float16


def test_a_compiled_model_follows_the_level_through_initialize_and_close() -> None:
    x, model = FUNCTIONAL.batch()[0], FUNCTIONAL.model()
    run = compiled(model)
    for level, dtype in (("O1", torch.float16), (None, torch.float32), ("O4", torch.bfloat16), (None, torch.float32)):
        if level is None:
            amp.close()
        else:
            amp.initialize(model, opt_level=level, verbosity=0)
        assert run(x).dtype == dtype, level
        assert_bitwise(run(x), model(x))


@pytest.mark.parametrize("product", [lambda x: x @ x, lambda x: x.matmul(x)], ids=["operator", "method"])
def test_a_compiled_operator_follows_initialize_and_close(product: Callable[[Tensor], Tensor]) -> None:
    """Dynamo guards functions of a module, but neither operators nor methods."""
    x, run = torch.eye(3), compiled(product)
    for _ in range(2):
        assert run(x).dtype == torch.float32
        amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
        assert run(x).dtype == torch.bfloat16
        amp.close()
    assert run(x).dtype == torch.float32


# --- switching casts off --------------------------------------------------------------------------


def test_disable_casts_around_a_compiled_call_runs_it_in_fp32() -> None:
    x, model, plain = FUNCTIONAL.batch()[0], FUNCTIONAL.model(), outputs_of(None)
    amp.initialize(model, opt_level="O4", verbosity=0)
    run = compiled(model)
    for _ in range(2):
        assert run(x).dtype == torch.bfloat16
        with amp.disable_casts():
            assert_bitwise(run(x), plain)
        assert run(x).dtype == torch.bfloat16
    assert counters["stats"]["unique_graphs"] == 2, "one graph with casts and one without are enough"


def test_casts_that_were_off_at_the_first_call_come_on() -> None:
    x, model = FUNCTIONAL.batch()[0], FUNCTIONAL.model()
    amp.initialize(model, opt_level="O1", verbosity=0)
    run = compiled(model)
    with amp.disable_casts():
        assert run(x).dtype == torch.float32
    assert_bitwise(run(x), model(x))
    assert run(x).dtype == torch.float16


# --- functions, operators, methods ----------------------------------------------------------------


def operands() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    x, y, w = (torch.randn(4, 4, generator=generator) for _ in range(3))
    return x, y, w, torch.tensor(0.3)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_functions_operators_and_methods_run_in_their_types(low: torch.dtype) -> None:
    casts = FunctionCasts(low)
    casts.install()
    try:
        eager, run = operators(*operands()), compiled(operators)
        actual = run(*operands())
        types = {name: low if name in LOW else torch.bool if name in BOOL else torch.float32 for name in eager}
        assert {name: value.dtype for name, value in eager.items()} == types
        assert {name: value.dtype for name, value in actual.items()} == types
        assert_bitwise(actual, eager)
        with casts.disabled():
            assert not [name for name, value in run(*operands()).items() if value.dtype == low]
    finally:
        casts.remove()
    assert not [name for name, value in run(*operands()).items() if value.dtype == low]


def test_a_decorated_and_a_registered_function_are_cast_in_a_graph() -> None:
    @amp.half_function
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    model = FUNCTIONAL.model()
    amp.register_half_function(torch, "relu")
    amp.initialize(model, opt_level="O1", verbosity=0)
    x = torch.randn(3, 3)
    run = compiled(lambda x: (product(x, x), torch.relu(x)))
    assert [y.dtype for y in run(x)] == [torch.float16] * 2
    with amp.disable_casts():
        assert [y.dtype for y in run(x)] == [torch.float32] * 2


def test_the_refusal_of_a_banned_function_reaches_the_user() -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    x = torch.rand(3, dtype=torch.float16)
    with pytest.raises(Exception, match="binary_cross_entropy_with_logits"):
        compiled(F.binary_cross_entropy)(x, x)
    assert compiled(F.softmax)(x, -1).dtype == torch.float32  # and the next call works


# --- what tracing leaves behind -------------------------------------------------------------------


def test_no_cast_is_kept_while_tracing() -> None:
    kept = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        kept.append(len(engine.function_casts.casts.cache.kept()))
        return graph.forward

    with Engine() as engine:
        model, x = FUNCTIONAL.model(), FUNCTIONAL.batch()[0]
        engine.initialize(model, opt_level="O1", verbosity=0)
        compiled(model, backend)(x)  # which runs the graph in eager mode, after it was traced
        engine.function_casts.casts.cache.clear()
        run = compiled(model)
        run(x).float().sum().backward()
        assert (kept, len(engine.function_casts.casts.cache.kept())) == ([0], 0)
        eager = model(x)
        assert type(eager) is Tensor
        assert not isinstance(eager, FakeTensor)
        assert_bitwise(run(x), eager)


def test_casts_that_eager_mode_keeps_are_not_baked_into_a_graph() -> None:
    model, x = FUNCTIONAL.model(), FUNCTIONAL.batch()[0]
    amp.initialize(model, opt_level="O1", verbosity=0)
    model(x)  # the cache is warm
    run = compiled(model)
    run(x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    assert_bitwise(run(x), model(x))


def test_one_graph_serves_all_batch_sizes() -> None:
    model = FUNCTIONAL.model()
    amp.initialize(model, opt_level="O1", verbosity=0)
    run = compiled(model, dynamic=True)
    for size in (4, 5, 9):
        x = torch.randn(size, 8)
        assert_bitwise(run(x), model(x))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_compiled_model_computes_the_same_inside_of_amp_explain_which_does_not_see_it() -> None:
    model = FUNCTIONAL.model()
    amp.initialize(model, opt_level="O1", verbosity=0)
    run, x = compiled(model), FUNCTIONAL.batch()[0]
    with amp.explain() as explanation:
        outputs = run(x)
    assert explanation.records == []
    assert_bitwise(outputs, model(x))


def test_dynamo_knows_torch_again_after_it_looked_functions_up_while_they_were_patched() -> None:
    """torch.distributed.init_process_group clears the table."""
    casts = FunctionCasts(torch.bfloat16)
    casts.install()
    torch._dynamo.trace_rules.clear_lru_cache()
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    casts.remove()
    casts.install()
    try:
        result = torch.compile(lambda x: torch.mul(x, x.bfloat16()), fullgraph=True, backend="aot_eager")(torch.ones(2))
        assert result.dtype == torch.float32
    finally:
        casts.remove()


class InContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, kind: str) -> Any:
        y = self.layer(x)
        return {"dict": {"y": y}, "tuple": (y, 1)}[kind]


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_a_model_and_its_bound_forward_cast_outputs_in_containers(level: str, kind: str) -> None:
    model = InContainers()
    amp.initialize(model, opt_level=level, verbosity=0)
    x = torch.randn(2, 4)
    for call in (model, model.forward):
        output = compiled(call, "eager")(x, kind)
        y = output["y"] if kind == "dict" else output[0]
        assert y.dtype is torch.float32
        expected = model(x, kind)
        assert_bitwise(y, expected["y"] if kind == "dict" else expected[0])


class Nested(nn.Module):
    """A list of layers, in each of which a graph may break."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), Breaks(breaks)) for _ in range(10)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Breaks(InContainers):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks

    def forward(self, x: Tensor, kind: str = "") -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        self.got = x.dtype
        y: Tensor = self.layer(x)
        return y


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by Dynamo
@pytest.mark.parametrize(("level", "breaks"), [("O2", False), ("O2", True)])
def test_parts_are_cast_where_a_script_calls_them_compiled_and_not_within_a_compiled_model(
    level: str, breaks: bool
) -> None:
    model = Nested(breaks)
    amp.initialize(model, opt_level=level, verbosity=0)
    x, half = torch.randn(2, 4), model.layers[0][0].weight.dtype
    for part in (model.layers[3][0], model.layers[2], model.layers[1].forward):
        y = torch.compile(part, backend="eager", fullgraph=not breaks)(x)
        assert y.dtype is torch.float32
        assert_bitwise(y, part(x))
    counter = CompileCounter()
    whole = torch.compile(model, backend=counter)
    for _ in range(3):
        assert_bitwise(whole(x), model(x))
        assert model.layers[5][1].got is half
    assert counter.frame_count <= (8 if breaks else 1)
    counters["graph_break"].clear()


def test_evaluation_before_and_between_training_gives_the_weights_their_gradient() -> None:
    x, model = FUNCTIONAL.batch()[0], FUNCTIONAL.model()
    amp.initialize(model, opt_level="O1", verbosity=0)
    run = compiled(model)
    for _ in range(2):
        with torch.no_grad():
            run(x)
        model.zero_grad()
        run(x).float().sum().backward()
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad()
        model(x).float().sum().backward()
        assert_bitwise(gradients, [p.grad for p in model.parameters()])
