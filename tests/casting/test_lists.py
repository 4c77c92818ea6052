"""Each listed function is called with FP32 and low inputs; the type of the result shows the type that it ran in."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from amp_engine.casting import FunctionCasts
from amp_engine.casting.lists import FUNCTIONAL, LINALG, NAMESPACES, SPECIAL, TENSOR, TORCH, TORCH_FUNCTIONAL

f32 = torch.float32
Cast = Callable[[Tensor], Tensor]

X = torch.tensor([[0.25, 0.5], [0.75, 0.125]])
V = torch.tensor([0.5, 0.25])
BATCH = X.expand(2, 2, 2)
SIGNS = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
CLASSES = torch.tensor([0, 1])
IMAGE = {n: torch.full((1, 1, *[2] * n), 0.5) for n in (1, 2, 3)}
GRID = torch.zeros(1, 2, 2, 2)

# Arguments of every listed function: `c` casts those that are to have the type under test.
CONVOLUTIONS = {
    **{f"conv{n}d": lambda c, n=n: (c(IMAGE[n]), c(IMAGE[n])) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": lambda c, n=n: (c(IMAGE[n]), c(IMAGE[n])) for n in (1, 2, 3)},
    "conv_tbc": lambda c: (c(BATCH), c(BATCH), c(V)),
}
PRODUCTS = {
    "addmm": lambda c: (c(X), c(X), c(X)),
    "addmv": lambda c: (c(V), c(X), c(V)),
    "addr": lambda c: (c(X), c(V), c(V)),
    "matmul": lambda c: (c(X), c(X)),
    "mm": lambda c: (c(X), c(X)),
    "mv": lambda c: (c(X), c(V)),
    "addbmm": lambda c: (c(X), c(BATCH), c(BATCH)),
    "baddbmm": lambda c: (c(BATCH), c(BATCH), c(BATCH)),
    "bmm": lambda c: (c(BATCH), c(BATCH)),
    "prelu": lambda c: (c(X), c(V[:1])),
}
WIDE_NAMES = "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan".split()  # noqa: SIM905
WIDE_RANGE = {
    **{name: lambda c: (c(X),) for name in WIDE_NAMES},
    "pow": lambda c: (c(X), 2),
}
REDUCTIONS = {
    "cumprod": lambda c: (c(X), 0),
    "cumsum": lambda c: (c(X), 0),
    "dist": lambda c: (c(X), c(X)),
    "logsumexp": lambda c: (c(X), 0),
    "log_softmax": lambda c: (c(X), 0),
    "norm": lambda c: (c(X),),
    "prod": lambda c: (c(X),),
    "renorm": lambda c: (c(X), 2, 0, 1.0),
    "softmax": lambda c: (c(X), 0),
    "std": lambda c: (c(X),),
    "sum": lambda c: (c(X),),
    "var": lambda c: (c(X),),
}
LOSSES = {
    "binary_cross_entropy_with_logits": lambda c: (c(X), c(X)),
    "cosine_embedding_loss": lambda c: (c(X), c(X), c(SIGNS[0])),
    "cosine_similarity": lambda c: (c(X), c(X)),
    "hinge_embedding_loss": lambda c: (c(X), c(SIGNS)),
    "kl_div": lambda c: (c(X), c(X)),
    "margin_ranking_loss": lambda c: (c(X), c(X), c(SIGNS)),
    "triplet_margin_loss": lambda c: (c(X), c(X), c(X)),
}
NORMS = {
    "group_norm": lambda c: (c(X), 1),
    "layer_norm": lambda c: (c(X), (2,)),
    "rms_norm": lambda c: (c(X), (2,)),
}


def cell(gates: int, states: int) -> Callable[[Cast], tuple[Any, ...]]:
    weights = torch.full((2 * gates, 2), 0.5), torch.full((2 * gates, 2), 0.5)
    return lambda c: (c(X), (c(X), c(X)) if states == 2 else c(X), *map(c, weights))


def layer(gates: int, states: int) -> Callable[[Cast], tuple[Any, ...]]:
    def arguments(c: Cast) -> tuple[Any, ...]:
        input, hidden, *weights = cell(gates, 1)(c)
        hidden = hidden[None]
        return (input[None], (hidden, hidden) if states == 2 else hidden, weights, False, 1, 0.0, False, False, False)

    return arguments


RECURRENT_CELLS = {
    "gru_cell": cell(3, 1),
    "lstm_cell": cell(4, 2),
    "rnn_relu_cell": cell(1, 1),
    "rnn_tanh_cell": cell(1, 1),
}
RECURRENT_LAYERS = {"gru": layer(3, 1), "lstm": layer(4, 2), "rnn_relu": layer(1, 1), "rnn_tanh": layer(1, 1)}
PLAIN_CONVOLUTION = ([1], [0], [1], False, [0], 1)
JOINED = {
    "chain_matmul": lambda c: (c(X), c(X)),
    "einsum": lambda c: ("ij,jk", c(X), c(X)),
}

ALWAYS_HALF: dict[Any, dict[str, Any]] = {
    F: {
        **CONVOLUTIONS,
        "linear": lambda c: (c(X), c(X), c(V)),
        "prelu": PRODUCTS["prelu"],
        "scaled_dot_product_attention": lambda c: (c(BATCH), c(BATCH), c(BATCH)),
    },
    torch: {
        **CONVOLUTIONS,
        **PRODUCTS,
        **JOINED,
        **RECURRENT_CELLS,
        **RECURRENT_LAYERS,
        "convolution": lambda c: (c(IMAGE[1]), c(IMAGE[1]), None, *PLAIN_CONVOLUTION),
        "_convolution": lambda c: (c(IMAGE[1]), c(IMAGE[1]), None, *PLAIN_CONVOLUTION, False, False, True),
    },
    torch.functional: JOINED,
    torch.linalg: {
        "matmul": lambda c: (c(X), c(X)),
        "multi_dot": lambda c: ([c(X), c(X)],),
        "vecdot": lambda c: (c(X), c(X)),
    },
    torch.special: {},
    torch.Tensor: {**PRODUCTS, "__matmul__": PRODUCTS["mm"], "__rmatmul__": PRODUCTS["mm"]},
}
QUOTIENTS = ("__rdiv__", "__rtruediv__")
ALWAYS_FLOAT: dict[Any, dict[str, Any]] = {
    F: {
        **LOSSES,
        **NORMS,
        "cross_entropy": lambda c: (c(X), CLASSES),
        "ctc_loss": lambda c: (c(BATCH), CLASSES[None, 1:].repeat(2, 1), (2, 2), (1, 1)),
        "gelu": lambda c: (c(X),),
        "grid_sample": lambda c: (c(IMAGE[2]), c(GRID), "bilinear", "zeros", False),
        "huber_loss": lambda c: (c(X), c(X)),
        "interpolate": lambda c: (c(IMAGE[2]), 4),
        "l1_loss": lambda c: (c(X), c(X)),
        "local_response_norm": lambda c: (c(IMAGE[2]), 1),
        "log_softmax": lambda c: (c(X), 0),
        "mse_loss": lambda c: (c(X), c(X)),
        "multi_margin_loss": lambda c: (c(X), CLASSES),
        "multilabel_margin_loss": lambda c: (c(X), torch.tensor([[0, -1], [1, -1]])),
        "multilabel_soft_margin_loss": lambda c: (c(X), c(X)),
        "nll_loss": lambda c: (c(X), CLASSES),
        "normalize": lambda c: (c(X),),
        "pairwise_distance": lambda c: (c(X), c(X)),
        "pdist": lambda c: (c(X),),
        "poisson_nll_loss": lambda c: (c(X), c(X)),
        "smooth_l1_loss": lambda c: (c(X), c(X)),
        "soft_margin_loss": lambda c: (c(X), c(SIGNS)),
        "softmax": lambda c: (c(X), 0),
        "softmin": lambda c: (c(X), 0),
        "softplus": lambda c: (c(X),),
    },
    torch: {
        **WIDE_RANGE,
        **REDUCTIONS,
        **LOSSES,
        **NORMS,
        "arccos": lambda c: (c(X),),
        "arcsin": lambda c: (c(X),),
        "cdist": lambda c: (c(X), c(X)),
        "cumulative_trapezoid": lambda c: (c(X),),
        "frobenius_norm": lambda c: (c(X), (0, 1)),
        "native_layer_norm": lambda c: (c(X), (2,), c(V), c(V), 1e-5),
        "norm_except_dim": lambda c: (c(X),),
        "nuclear_norm": lambda c: (c(X),),
        "pairwise_distance": lambda c: (c(X), c(X)),
        "pdist": lambda c: (c(X),),
        "poisson_nll_loss": lambda c: (c(X), c(X), True, False, 1e-8, 1),
        "square": lambda c: (c(X),),
        "trapezoid": lambda c: (c(X),),
        "trapz": lambda c: (c(X),),
    },
    torch.functional: {"cdist": lambda c: (c(X), c(X)), "norm": lambda c: (c(X),)},
    torch.linalg: {
        "matrix_norm": lambda c: (c(X),),
        "norm": lambda c: (c(X),),
        "vector_norm": lambda c: (c(X),),
    },
    torch.special: {
        **{name: WIDE_RANGE[name] for name in ("erfinv", "expm1", "log1p")},
        **{name: REDUCTIONS[name] for name in ("log_softmax", "logsumexp", "softmax")},
    },
    torch.Tensor: {
        **WIDE_RANGE,
        **REDUCTIONS,
        "__ipow__": lambda c: (c(X), 2),
        "__pow__": lambda c: (c(X), 2),
        "__rpow__": lambda c: (c(X), 2.0),
        "arccos": lambda c: (c(X),),
        "arcsin": lambda c: (c(X),),
        "cpu": lambda c: (c(X),),
        "square": lambda c: (c(X),),
        "sum_to_size": lambda c: (c(X), 1, 2),
        # torch computes them by way of `reciprocal`.
        **{name: lambda c: (c(X), 2.0) for name in QUOTIENTS},
    },
}

BINARY = {name: lambda c, d: (c(X), d(X)) for name in ("add", "atan2", "div", "mul")}
COMPARISONS = {name: lambda c, d: (c(X), d(X + 2**-20)) for name in ("eq", "ge", "gt", "le", "lt", "ne")}
THREE = torch.ones(2, 3)
FEW = {
    "addcdiv": lambda c, d: (c(X), d(X), c(X)),
    "addcmul": lambda c, d: (c(X), d(X), c(X)),
    "arctan2": lambda c, d: (c(X), d(X)),
    "cross": lambda c, d: (c(THREE), d(THREE), 1),
    "dot": lambda c, d: (c(V), d(V)),
    "index_copy": lambda c, d: (c(V), 0, CLASSES, d(V)),
    "index_put": lambda c, d: (c(V), (CLASSES,), d(V)),
    "inner": lambda c, d: (c(V), d(V)),
    "scatter_add": lambda c, d: (c(V), 0, CLASSES, d(V)),
    "vdot": lambda c, d: (c(V), d(V)),
}
BILINEAR = {"bilinear": lambda c, d: (c(X), c(X), d(BATCH), d(V))}
OPERATORS = {f"__{r}{op}__" for r in ("", "i", "r") for op in ("add", "mul", "sub", "truediv")} - set(QUOTIENTS)
PROMOTE_OPERATORS = {name: lambda c, d: (c(X), d(X)) for name in sorted(OPERATORS)}
PROMOTE: dict[Any, dict[str, Any]] = {
    F: BILINEAR,
    torch: {
        **BINARY,
        **FEW,
        **BILINEAR,
        "grid_sampler": lambda c, d: (c(IMAGE[2]), d(GRID), 0, 0, False),
        "tensordot": lambda c, d: (c(X), d(X), 1),
    },
    torch.functional: {"tensordot": lambda c, d: (c(X), d(X), 1)},
    torch.Tensor: {**BINARY, **FEW, **PROMOTE_OPERATORS},
}
COMPARE: dict[Any, dict[str, Any]] = {
    torch: {**COMPARISONS, "equal": COMPARISONS["eq"]},
    torch.Tensor: {
        **COMPARISONS,
        "equal": COMPARISONS["eq"],
        **{f"__{name}__": call for name, call in COMPARISONS.items()},
    },
}
MATCH_SELF = {
    **{f"{name}_": call for name, call in (BINARY | COMPARISONS).items()},
    "addbmm_": lambda c, d: (c(X), d(BATCH), d(BATCH)),
    "addcdiv_": lambda c, d: (c(X), d(X), d(X)),
    "addcmul_": lambda c, d: (c(X), d(X), d(X)),
    "addmm_": lambda c, d: (c(X), d(X), d(X)),
    "addmv_": lambda c, d: (c(V), d(X), d(V)),
    "addr_": lambda c, d: (c(X), d(V), d(V)),
    "baddbmm_": lambda c, d: (c(BATCH), d(BATCH), d(BATCH)),
    "index_add_": lambda c, d: (c(V), 0, CLASSES, d(V)),
    "index_copy_": lambda c, d: (c(V), 0, CLASSES, d(V)),
    "index_put_": lambda c, d: (c(V), (CLASSES,), d(V)),
    "lerp_": lambda c, d: (c(V), d(V), 0.5),
    "masked_scatter_": lambda c, d: (c(V), V > 0.3, d(V)),
    "put_": lambda c, d: (c(V), CLASSES, d(V)),
    "scatter_": lambda c, d: (c(V), 0, CLASSES, d(V)),
    "scatter_add_": lambda c, d: (c(V), 0, CLASSES, d(V)),
    "scatter_reduce_": lambda c, d: (c(V), 0, CLASSES, d(V), "sum"),
}
REFUSED_METHODS = {
    **{f"{name}_": call for name, call in WIDE_RANGE.items() if name != "log1p"},
    **{f"{name}_": REDUCTIONS[name] for name in ("cumprod", "cumsum", "renorm")},
}
REFUSED_FUNCTIONS = {name: call for name, call in REFUSED_METHODS.items() if name in TORCH.refused_in_place}
MATCH_INPUT: dict[Any, dict[str, Any]] = {
    F: {
        "avg_pool2d": lambda c: (c(IMAGE[2]), 2),
        "dropout": lambda c: (c(X), 0.5),
        "elu": lambda c: (c(X),),
        "embedding": lambda c: (CLASSES, c(X)),
        "leaky_relu": lambda c: (c(X),),
        "max_pool2d": lambda c: (c(IMAGE[2]), 2),
        "pad": lambda c: (c(X), (1, 1)),
        "relu": lambda c: (c(X),),
        "sigmoid": lambda c: (c(X),),
        "silu": lambda c: (c(X),),
        "tanh": lambda c: (c(X),),
    },
    torch: {name: lambda c: (c(X),) for name in ("abs", "mean", "max", "relu", "sigmoid", "sqrt", "tanh")},
    torch.Tensor: {
        name: lambda c: (c(X),) for name in ("abs", "clone", "mean", "max", "neg", "relu", "t", "sigmoid", "tanh")
    },
}


def rows(table: dict[Any, dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(space, name, make, id=f"{space.__name__.removeprefix('torch.')}.{name}")
        for space, calls in table.items()
        for name, make in calls.items()
    ]


def rows_of(space: Any, calls: dict[str, Any]) -> list[Any]:
    return rows({space: calls})


def to(dtype: torch.dtype) -> Cast:
    return lambda tensor: tensor.to(dtype, copy=True)


def call(space: Any, name: str, args: Any) -> Any:
    return getattr(space, name)(*args)


def results(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


@pytest.mark.filterwarnings("ignore::UserWarning")  # kl_div's mean, chain_matmul's and frobenius_norm's successors
@pytest.mark.parametrize(("space", "name", "make"), rows(ALWAYS_HALF))
def test_always_half(space: Any, name: str, make: Any, casts: FunctionCasts) -> None:
    for dtype in (f32, casts.dtype):
        assert all(result.dtype == casts.dtype for result in results(call(space, name, make(to(dtype)))))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("space", "name", "make"), rows(ALWAYS_FLOAT))
def test_always_float(space: Any, name: str, make: Any, casts: FunctionCasts) -> None:
    for dtype in (f32, casts.dtype):
        assert all(result.dtype == f32 for result in results(call(space, name, make(to(dtype)))))


@pytest.mark.parametrize(("space", "name", "make"), rows(MATCH_INPUT))
def test_match_input(space: Any, name: str, make: Any, casts: FunctionCasts) -> None:
    for dtype in (f32, casts.dtype):
        assert call(space, name, make(to(dtype))).dtype == dtype


@pytest.mark.parametrize(("space", "name", "make"), rows(PROMOTE))
def test_promote_runs_in_the_widest_type(space: Any, name: str, make: Any, casts: FunctionCasts) -> None:
    low, wide = to(casts.dtype), to(f32)
    assert call(space, name, make(low, low)).dtype == casts.dtype
    for first, second in ((low, wide), (wide, low), (wide, wide)):
        assert call(space, name, make(first, second)).dtype == f32


@pytest.mark.parametrize(("space", "name", "make"), rows(COMPARE))
def test_comparisons_are_made_in_the_widest_type(space: Any, name: str, make: Any, casts: FunctionCasts) -> None:
    if name != "equal":
        number = torch.tensor(0.25 + 2**-20)  # 0-dim: torch would compare in low precision, where it is 0.25
        expected = call(space, name, (X, number))
        assert torch.equal(call(space, name, (X.to(casts.dtype), number)), expected)
    expected = call(space, name, make(to(f32), to(f32)))
    mixed = call(space, name, make(to(casts.dtype), to(f32)))
    assert mixed == expected if name == "equal" else torch.equal(mixed, expected)


@pytest.mark.parametrize(
    ("space", "name", "make"), [*rows_of(torch, BINARY), *rows_of(torch.Tensor, BINARY | PROMOTE_OPERATORS)]
)
def test_promote_counts_0_dim_tensors_but_not_numbers(space: Any, name: str, make: Any, casts: FunctionCasts) -> None:
    low, _ = make(to(casts.dtype), to(f32))
    assert call(space, name, (low, torch.tensor(0.5))).dtype == f32
    if name != "atan2":
        assert call(space, name, (low, 0.5)).dtype == casts.dtype


@pytest.mark.parametrize(("space", "name", "make"), rows_of(torch.Tensor, MATCH_SELF))
def test_in_place_methods_cast_to_the_type_of_what_they_write(
    space: Any, name: str, make: Any, casts: FunctionCasts
) -> None:
    for first, second in ((f32, casts.dtype), (casts.dtype, f32)):
        written, *others = make(to(first), to(second))
        result = call(space, name, (written, *others))
        assert result is written
        assert result.dtype == first


@pytest.mark.parametrize(
    ("space", "name", "make"), [*rows_of(torch, REFUSED_FUNCTIONS), *rows_of(torch.Tensor, REFUSED_METHODS)]
)
def test_in_place_functions_that_lose_range_are_refused_on_float16(
    space: Any, name: str, make: Any, casts: FunctionCasts
) -> None:
    kind = "function {} with fp16 arguments" if space is torch else "method {} on fp16 Tensors"
    if casts.dtype is torch.float16:
        with pytest.raises(NotImplementedError, match="^Cannot call in-place " + kind.format(name)):
            call(space, name, make(to(torch.float16)))
    for dtype in (torch.bfloat16, f32, torch.float64):
        if name == "erfinv_" and dtype is torch.bfloat16:
            continue  # no kernel of its own
        args = make(to(dtype))
        assert call(space, name, args) is args[0]
        assert args[0].dtype == dtype
    with casts.disabled():
        call(space, name, make(to(torch.float16)))


def test_binary_cross_entropy_is_refused_on_float16_with_the_ways_out(casts: FunctionCasts) -> None:
    if casts.dtype is torch.bfloat16:
        assert F.binary_cross_entropy(X.bfloat16(), X).dtype == f32
        return
    for args in ((X.half(), X), (X, X.half())):
        with pytest.raises(NotImplementedError) as refusal:
            F.binary_cross_entropy(*args)
        text = str(refusal.value)
        assert text.startswith(
            "\namp does not work out-of-the-box with `F.binary_cross_entropy` or `torch.nn.BCELoss.` "
        )
        for way_out in ("BCEWithLogitsLoss", "register_float_function(torch, 'sigmoid')", "allow_banned=True"):
            assert way_out in text
    assert F.binary_cross_entropy(X, X).dtype == f32
    with casts.disabled():
        assert F.binary_cross_entropy(X.half(), X.half()).dtype == torch.float16


def test_allow_banned_computes_binary_cross_entropy_in_float(low: torch.dtype) -> None:
    casts = FunctionCasts(low, allow_banned=True)
    casts.install()
    loss = F.binary_cross_entropy(X.to(low), X.to(low))
    casts.remove()
    assert loss.dtype == f32
    torch.testing.assert_close(loss, F.binary_cross_entropy(X, X))


@pytest.mark.parametrize("name", ["cat", "stack"])
def test_sequences_are_joined_in_the_widest_type(name: str, casts: FunctionCasts) -> None:
    fn, low = getattr(torch, name), X.to(casts.dtype)
    for kind in (list, tuple):
        assert fn(kind([low, low])).dtype == casts.dtype
        assert fn(kind([low, X])).dtype == f32
        assert fn(tensors=kind([X, low]), dim=1).dtype == f32
        assert fn(kind([low, X.double()])).dtype == torch.float64


@pytest.mark.parametrize(
    "table",
    [ALWAYS_HALF, ALWAYS_FLOAT, {torch.Tensor: {"mul": lambda c: (c(X), c(X))}}],
    ids=["half", "float", "promote"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_double_and_complex_are_never_touched(table: Any, dtype: torch.dtype, casts: FunctionCasts) -> None:
    for name in {"mm", "sum", "mul"} & set(table[torch.Tensor]):
        args = table[torch.Tensor][name](to(dtype))
        assert getattr(torch.Tensor, name)(*args).dtype == dtype


def test_integers_are_never_touched(casts: FunctionCasts) -> None:
    ones = torch.ones(2, 2, dtype=torch.int64)
    assert torch.mm(ones, ones).dtype == torch.int64
    assert ones.sum().dtype == torch.int64
    assert (ones + ones).dtype == torch.int64
    assert ones.cpu() is ones
    assert (ones * X.to(casts.dtype)).dtype == casts.dtype


# --- the lists themselves -------------------------------------------------------------------------

# Names that torch had once, kept since apex lists them.
GONE = {"__div__", "__idiv__"}


@pytest.mark.parametrize(
    ("space", "lists"),
    [
        (F, FUNCTIONAL),
        (torch, TORCH),
        (torch.functional, TORCH_FUNCTIONAL),
        (torch.linalg, LINALG),
        (torch.special, SPECIAL),
        (torch.Tensor, TENSOR),
    ],
    ids=["F", "torch", "functional", "linalg", "special", "Tensor"],
)
class TestEveryListedName:
    def test_exists(self, space: Any, lists: Any) -> None:
        missing = {name for names in vars(lists).values() for name in names if not hasattr(space, name)}
        assert missing <= GONE

    def test_is_listed_once(self, space: Any, lists: Any) -> None:
        names = [name for names in vars(lists).values() for name in names]
        assert len(names) == len(set(names))

    def test_has_its_row_above(self, space: Any, lists: Any) -> None:
        promoted = set(PROMOTE.get(space, {})) | set(COMPARE.get(space, {}))
        assert set(lists.half) == set(ALWAYS_HALF[space])
        assert set(lists.float) == set(ALWAYS_FLOAT[space]) - set(QUOTIENTS)
        assert set(lists.promote) - GONE - set(QUOTIENTS) == promoted
        assert set(lists.match_self) == (set(MATCH_SELF) if space is torch.Tensor else set())
        refused = {torch: REFUSED_FUNCTIONS, torch.Tensor: REFUSED_METHODS}.get(space, {})
        assert set(lists.refused_in_place) == set(refused)


def test_every_namespace_exists_with_the_names_listed_in_it() -> None:
    for space, lists in NAMESPACES:
        for names in vars(lists).values():
            assert set(names) - GONE <= set(dir(pkgutil.resolve_name(space))), space


def test_distributions_use_the_cast_functions_that_they_imported_by_name(casts: FunctionCasts) -> None:
    logits, zeros = X.to(casts.dtype), torch.zeros(2, 2, dtype=casts.dtype)
    for name in ("Bernoulli", "ContinuousBernoulli", "Geometric"):
        distribution = getattr(torch.distributions, name)(logits=logits, validate_args=False)
        assert distribution.log_prob(zeros).dtype == f32, name
    assert torch.distributions.transforms.SoftplusTransform()(logits).dtype == f32
