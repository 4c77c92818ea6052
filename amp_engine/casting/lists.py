"""The functions that O1 casts, and their types. Data only; names that a torch version lacks are skipped.

There are two sources. Functions that apex listed stay as apex had them, even if torch.autocast does otherwise (gelu and
pow in FP32, prelu in half, `half.cpu()` gives FP32). Functions that PyTorch has added since follow torch.autocast's
lists for CUDA (ATen/autocast_mode.h), on every device: the CPU lists lack softmax, layer_norm, exp and pow.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CastLists:
    """Names of functions in one namespace, by how their arguments are cast.

    Attributes:
        half: cast to the low-precision type.
        float: cast to float32.
        promote: cast to float32 if arguments mix float32 and low precision.
        sequence: like `promote`, inside of a sequence of tensors, which is the first argument.
        match_self: in-place methods whose other arguments take the type of the tensor written to.
        refused_in_place: in-place functions that would lose range: an error on float16.
        banned: an error on float16 that says what to use instead.
    """

    half: tuple[str, ...] = ()
    float: tuple[str, ...] = ()
    promote: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    match_self: tuple[str, ...] = ()
    refused_in_place: tuple[str, ...] = ()
    banned: tuple[str, ...] = ()


_CONVOLUTIONS = (*(f"{name}{n}d" for name in ("conv", "conv_transpose") for n in (1, 2, 3)), "conv_tbc")
_MATRIX_PRODUCTS = ("addmm", "addmv", "addr", "matmul", "mm", "mv", "addbmm", "baddbmm", "bmm")

_POINTWISE_OF_WIDE_RANGE = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow",
)
_REDUCTIONS = ("cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var", "renorm")

_LOSSES_AND_NORMS = (
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cosine_similarity",
    "group_norm",
    "hinge_embedding_loss",
    "kl_div",
    "layer_norm",
    "margin_ranking_loss",
    "poisson_nll_loss",
    "triplet_margin_loss",
)

_COMPARISONS = ("eq", "equal", "ge", "gt", "le", "lt", "ne")
_ARITHMETIC = ("addcdiv", "addcmul", "atan2", "cross", "dot", "add", "div", "mul")

# since apex
_FLOAT_SINCE_APEX = ("arccos", "arcsin", "log1p", "log_softmax", "logsumexp", "softmax", "square")
_PROMOTED_SINCE_APEX = ("arctan2", "index_copy", "index_put", "inner", "scatter_add", "vdot")

# torch._VF, which nn.RNN, nn.LSTM, nn.GRU and their cells call; see `recurrent.RecurrentFunctions`.
RECURRENT = ("rnn_relu", "rnn_tanh", "gru", "lstm", "rnn_relu_cell", "rnn_tanh_cell", "gru_cell", "lstm_cell")

FUNCTIONAL = CastLists(
    half=(
        *_CONVOLUTIONS,
        "linear",
        # since apex
        "prelu",
        "scaled_dot_product_attention",
    ),
    float=(
        *_LOSSES_AND_NORMS,
        "interpolate",
        "grid_sample",
        "softplus",
        "softmin",
        "log_softmax",
        "softmax",
        "gelu",
        "local_response_norm",
        "normalize",
        "cross_entropy",
        "l1_loss",
        "mse_loss",
        "multilabel_margin_loss",
        "multilabel_soft_margin_loss",
        "multi_margin_loss",
        "nll_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
        "ctc_loss",
        # since apex
        "huber_loss",
        "pairwise_distance",
        "pdist",
        "rms_norm",
    ),
    promote=("bilinear",),  # since apex
    banned=("binary_cross_entropy",),
)

TORCH = CastLists(
    half=(
        *_CONVOLUTIONS,
        *_MATRIX_PRODUCTS,
        "prelu",
        # since apex
        "_convolution",
        "chain_matmul",
        "convolution",
        "einsum",
        *RECURRENT,
    ),
    float=(
        *_POINTWISE_OF_WIDE_RANGE,
        *_REDUCTIONS,
        # since apex
        *_FLOAT_SINCE_APEX,
        *_LOSSES_AND_NORMS,
        "cdist",
        "cumulative_trapezoid",
        "frobenius_norm",
        "native_layer_norm",
        "norm_except_dim",
        "nuclear_norm",
        "pairwise_distance",
        "pdist",
        "rms_norm",
        "trapezoid",
        "trapz",
    ),
    promote=(
        *_ARITHMETIC,
        *_COMPARISONS,
        "bilinear",
        # since apex
        *_PROMOTED_SINCE_APEX,
        "grid_sampler",
        "tensordot",
    ),
    sequence=("cat", "stack"),
    refused_in_place=tuple(f"{name}_" for name in _POINTWISE_OF_WIDE_RANGE if name not in ("erfinv", "pow")),
)

# since apex
LINALG = CastLists(
    half=("matmul", "multi_dot", "vecdot"),
    float=("matrix_norm", "norm", "vector_norm"),
)

SPECIAL = CastLists(float=("erfinv", "expm1", "log1p", "log_softmax", "logsumexp", "softmax"))

# torch.functional holds the Python functions that torch re-exports: each has a second name there.
TORCH_FUNCTIONAL = CastLists(half=("chain_matmul", "einsum"), float=("cdist", "norm"), promote=("tensordot",))

TENSOR = CastLists(
    half=(
        *_MATRIX_PRODUCTS,
        "prelu",
        "__matmul__",
        "__rmatmul__",  # since apex
    ),
    float=(
        *_POINTWISE_OF_WIDE_RANGE,
        *_REDUCTIONS,
        "__ipow__",
        "__pow__",
        "__rpow__",
        "cpu",
        # since apex
        *_FLOAT_SINCE_APEX,
        "sum_to_size",
    ),
    promote=(
        *_ARITHMETIC,
        *_COMPARISONS,
        *(f"__{name}__" for name in ("add", "div", "mul", "sub", "truediv")),
        *(f"__i{name}__" for name in ("add", "div", "mul", "sub", "truediv")),
        *(f"__r{name}__" for name in ("add", "div", "mul", "sub", "truediv")),
        *(f"__{name}__" for name in ("eq", "ge", "gt", "le", "lt", "ne")),
        *_PROMOTED_SINCE_APEX,
    ),
    match_self=(
        *(f"{name}_" for name in ("addmm", "addmv", "addr", "addbmm", "baddbmm")),
        *(f"{name}_" for name in ("addcdiv", "addcmul", "atan2", "add", "div", "mul")),
        *(f"{name}_" for name in ("eq", "ge", "gt", "le", "lt", "ne")),
        # since apex: torch refuses arguments of another type, and softmax gives FP32
        *(f"index_{name}_" for name in ("add", "copy", "put")),
        *(f"{name}_" for name in ("lerp", "masked_scatter", "put", "scatter", "scatter_add", "scatter_reduce")),
    ),
    refused_in_place=(
        *(f"{name}_" for name in _POINTWISE_OF_WIDE_RANGE),
        *(f"{name}_" for name in ("cumprod", "cumsum", "renorm")),
    ),
)

# Functions of the FP32 list that get `dtype=torch.float32`, as in autocast (fp32_set_opt_dtype): their backward runs in
# FP32, too. The backward of cumsum and cumprod would run in the type of the argument.
FLOAT_BY_DTYPE = frozenset(("log_softmax", "prod", "softmax", "sum"))

# Promoted functions that torch itself computes in the widest type, if no tensor is 0-dim. Without in-place operators,
# which keep the type of the tensor that they write to, and without cat and stack, which torch promotes slowly.
PROMOTED_BY_TORCH = frozenset(
    (
        *("add", "sub", "mul", "div", "atan2", "addcdiv", "addcmul"),
        *(f"__{name}__" for name in ("add", "div", "mul", "sub", "truediv")),
        *("__radd__", "__rmul__", "__rsub__"),  # not __rtruediv__: torch takes a reciprocal first, in its type
        *("eq", "ge", "gt", "le", "lt", "ne"),
        *(f"__{name}__" for name in ("eq", "ge", "gt", "le", "lt", "ne")),
    )
)

# torch.distributions took these names from torch.nn.functional when it was imported.
_LOGITS = CastLists(float=("binary_cross_entropy_with_logits",))

# Namespaces that are patched, by name: a module, or a class in one.
NAMESPACES = (
    ("torch.nn.functional", FUNCTIONAL),
    ("torch", TORCH),
    ("torch.functional", TORCH_FUNCTIONAL),
    ("torch.linalg", LINALG),
    ("torch.special", SPECIAL),
    ("torch.distributions.bernoulli", _LOGITS),
    ("torch.distributions.continuous_bernoulli", _LOGITS),
    ("torch.distributions.geometric", _LOGITS),
    ("torch.distributions.transforms", CastLists(float=("softplus",))),
    ("torch.Tensor", TENSOR),
)
