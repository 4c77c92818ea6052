"""Every operator of PyTorch against torch.autocast's lists for CUDA; docs/casts.md holds each difference.

The operators are PyTorch's own database of them (op_db), and `CASES` for those that it lacks. Their sample inputs are
given in four mixes of types to each public name of the operator, once under autocast's CUDA kernels and once
under the casts, and the types of the results, and of every computation on the way, are compared.
"""

from __future__ import annotations

import importlib
import itertools
import operator
import pkgutil
import re
import sys
import types
import unittest
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_engine.casting import FunctionCasts
from amp_engine.casting.lists import NAMESPACES, TORCH, TORCH_FUNCTIONAL
from tests.casting.cuda_autocast import (
    Computation,
    cuda_autocast,
    floating_types,
    mapped,
    on_cuda,
    pretended_cuda,
    tensors_in,
)

f32 = torch.float32
LOW = f16, bf16 = torch.float16, torch.bfloat16
DOCS = Path(__file__).parents[2] / "docs" / "casts.md"

SPACES: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
    "torch.masked": torch.masked,
    "torch.functional": torch.functional,
    "Tensor": torch.Tensor,
    "operator": operator,
}
REFUSALS = ("Cannot call in-place", "\namp does not work out-of-the-box")
TORCH_FUNCTIONAL_NAMES = {name for names in vars(TORCH_FUNCTIONAL).values() for name in names}
MIXES = ("low", "FP32", "low, FP32", "FP32, low")  # of one type; the first tensor, then all others


class Case(NamedTuple):
    """Arguments, and the public names that take them."""

    names: dict[str, Callable[..., Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    low: torch.dtype = torch.float16  # of the call on the CPU


class Outcome(NamedTuple):
    """The outcome of a call: types of the results (None: an error), operators on the way."""

    results: tuple[torch.dtype, ...] | None
    operators: tuple[tuple[str, tuple[torch.dtype, ...]], ...] = ()
    error: str = ""


def torch_testing(name: str) -> Any:
    """A module of torch.testing._internal, imported without what that does to the process."""
    missing = types.ModuleType("expecttest")  # wanted for a base class, of which nothing is used here
    missing.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", missing)
    flag = "__allow_nonbracketed_mutation_flag"  # its import forbids `torch.backends.cudnn.enabled = ...`
    before = getattr(torch.backends, flag)
    try:
        return importlib.import_module(f"torch.testing._internal.{name}")
    finally:
        setattr(torch.backends, flag, before)


def floats(*shape: int) -> Tensor:
    return torch.rand(shape) * 0.5 + 0.25


def cell(gates: int, states: int) -> tuple[Any, ...]:
    h = floats(2, 3)
    weights = (floats(gates * 3, 3), floats(gates * 3, 3), floats(gates * 3), floats(gates * 3))
    return (floats(2, 3), (h, h) if states == 2 else h, *weights)


def layer(gates: int, states: int) -> tuple[Any, ...]:
    h = floats(1, 2, 3)
    weights = [floats(gates * 3, 3), floats(gates * 3, 3), floats(gates * 3), floats(gates * 3)]
    return (floats(4, 2, 3), (h, h) if states == 2 else h, weights, True, 1, 0.0, False, False, False)


DUNDERS = [f"__{r}{name}__" for name in ("add", "div", "mul", "sub", "truediv") for r in ("", "i")]
DUNDERS += [f"__{name}__" for name in ("eq", "ge", "gt", "le", "lt", "ne")]

# Public functions that the database lacks and that are on a list, or reach an operator on autocast's.
CASES: dict[str, tuple[Any, ...]] = {
    **{f"Tensor.{name}": (floats(2, 2), floats(2, 2)) for name in DUNDERS},
    **{f"torch.{name}": (floats(2, 2),) for name in TORCH.refused_in_place},
    "F.affine_grid": (floats(1, 2, 3), (1, 1, 2, 2), False),
    "F.conv_tbc": (floats(4, 2, 3), floats(2, 3, 3), floats(3)),
    "F.gumbel_softmax": (floats(2, 3),),
    "F.lp_pool1d": (floats(1, 1, 4), 2.0, 2),
    "F.lp_pool2d": (floats(1, 1, 4, 4), 2.0, 2),
    "F.lp_pool3d": (floats(1, 1, 4, 4, 4), 2.0, 2),
    "F.upsample": (floats(1, 1, 2, 2), 4),
    "F.upsample_bilinear": (floats(1, 1, 2, 2), 4),
    "F.upsample_nearest": (floats(1, 1, 2, 2), 4),
    "Tensor.__ipow__": (floats(2, 2), 2),
    "Tensor.__matmul__": (floats(2, 2), floats(2, 2)),
    "Tensor.__pow__": (floats(2, 2), 2),
    "Tensor.__rmatmul__": (floats(2, 2), floats(2, 2)),
    "Tensor.__rpow__": (floats(2, 2), 2.0),
    "Tensor.cpu": (floats(2, 2),),
    "Tensor.prelu": (floats(2, 2), floats(1)),
    "torch._convolution": (floats(1, 1, 2), floats(1, 1, 2), None, [1], [0], [1], False, [0], 1, False, False, True),
    "torch.binary_cross_entropy_with_logits": (floats(2, 2), floats(2, 2)),
    "torch.affine_grid_generator": (floats(1, 2, 3), (1, 1, 2, 2), False),
    "torch.chain_matmul": (floats(2, 2), floats(2, 2), floats(2, 2)),
    "torch.conv_tbc": (floats(4, 2, 3), floats(2, 3, 3), floats(3)),
    "torch.convolution": (floats(1, 1, 2), floats(1, 1, 2), None, [1], [0], [1], False, [0], 1),
    "torch.cosine_embedding_loss": (floats(2, 2), floats(2, 2), torch.tensor([1, -1])),
    "torch.frobenius_norm": (floats(2, 2), (0, 1)),
    "torch.functional.chain_matmul": (floats(2, 2), floats(2, 2)),
    "torch.functional.einsum": ("ij,jk", floats(2, 2), floats(2, 2)),
    "torch.grid_sampler": (floats(1, 1, 2, 2), floats(1, 2, 2, 2), 0, 0, False),
    "torch.gru": layer(3, 1),
    "torch.gru_cell": cell(3, 1),
    "torch.hinge_embedding_loss": (floats(2, 2), torch.tensor([[1, -1], [1, -1]])),
    "torch.kl_div": (floats(2, 2), floats(2, 2)),
    "torch.lstm": layer(4, 2),
    "torch.lstm_cell": cell(4, 2),
    "torch.margin_ranking_loss": (floats(2, 2), floats(2, 2), floats(2, 2)),
    "torch.norm_except_dim": (floats(2, 2),),
    "torch.nuclear_norm": (floats(2, 2),),
    "torch.poisson_nll_loss": (floats(2, 2), floats(2, 2), True, False, 1e-8, 1),
    "torch.rnn_relu": layer(1, 1),
    "torch.rnn_relu_cell": cell(1, 1),
    "torch.rnn_tanh": layer(1, 1),
    "torch.rnn_tanh_cell": cell(1, 1),
    "torch.softmax": (floats(2, 2), 0),
    "torch.triplet_margin_loss": (floats(2, 2), floats(2, 2), floats(2, 2)),
    "torch.vander": (floats(3),),
}

# Operators that are not called, since they need more than a tensor that claims to be on a GPU. None is on a list.
NOT_COMPARED = {
    **dict.fromkeys(("__getitem__", "nonzero"), "set the current GPU"),
    **dict.fromkeys(("linalg.matrix_rank", "masked.cumprod", "masked.cumsum"), "allocate past the mode"),
    **dict.fromkeys(
        ("pca_lowrank", "svd_lowrank"), "their products in low precision go to a QR that has no such kernel"
    ),
    "take_along_dim": "wants its indices on the GPU",
    **dict.fromkeys(
        (
            "jiterator_unary",
            "jiterator_binary",
            "jiterator_4inputs_with_extra_args",
            "jiterator_binary_return_by_ref",
            "jiterator_2inputs_2outputs",
        ),
        "compiled for a GPU",
    ),
}


def public_names() -> dict[int, list[str]]:
    """Names of each public function, by its identity."""
    names = defaultdict(list)
    for prefix, space in SPACES.items():
        for name in dir(space):
            function = getattr(space, name, None)
            is_public = not name.startswith("_") or (space is torch.Tensor and name.startswith("__"))
            if space is torch.functional:
                is_public = name in TORCH_FUNCTIONAL_NAMES  # the others are torch's under another name
            if is_public and callable(function) and not isinstance(function, type):
                names[id(function)].append(f"{prefix}.{name}")
    return names


def look_up(name: str) -> Any:
    prefix, _, attribute = name.rpartition(".")
    return getattr(SPACES[prefix], attribute)


def names_of(info: Any, public: dict[int, list[str]]) -> dict[str, Callable[..., Any]]:
    """The public names of an operator: itself, its method, in-place and operator forms, and all aliases."""
    found: dict[str, Callable[..., Any]] = {}
    for form in (info, *info.aliases):
        kinds = ("op", "method_variant", "inplace_variant", "operator_variant", "inplace_operator_variant")
        for function in (getattr(form, kind, None) for kind in kinds):
            if function is None:
                continue
            for name in public.get(id(function), ()):
                found[name] = lambda *args, name=name, **kwargs: look_up(name)(*args, **kwargs)
            if id(function) not in public and not form.name.startswith("_"):
                name = f"torch.{form.name}".replace("torch.nn.functional.", "F.")
                found.setdefault(name, function)  # a function of the database, which calls the public one
    return found


def all_cases() -> Iterator[tuple[str, Case]]:
    public = public_names()
    for info in torch_testing("common_methods_invocations").op_db:
        if f32 in info.dtypes and info.name not in NOT_COMPARED:
            names = names_of(info, public)
            for sample, low in zip(info.sample_inputs("cpu", f32), LOW, strict=False):
                args = (sample.input, *sample.args)
                if all(t.layout is torch.strided for t in tensors_in((args, sample.kwargs))):
                    yield info.name, Case(names, args, sample.kwargs, low)
    for name, args in CASES.items():
        yield name, Case({name: lambda *args, name=name, **kw: look_up(name)(*args, **kw)}, args, {})


def mixed(case: Case, mix: str, low: torch.dtype) -> tuple[Any, Any] | None:
    """Copies of the arguments in that mix of types; None where there are too few tensors for it."""
    first, _, rest = mix.partition(", ")
    wanted = itertools.chain([first], itertools.repeat(rest or first))
    count = 0

    def convert(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, Tensor):
            return value
        if value.dtype is not f32:
            return value.detach().clone()
        count += 1
        return value.detach().to(low if next(wanted) == "low" else f32, copy=True)

    converted = mapped(convert, (case.args, case.kwargs))
    return converted if count > 1 or (count == 1 and not rest) else None


def outcome(call: Callable[..., Any], arguments: tuple[Any, Any]) -> Outcome:
    args, kwargs = mapped(on_cuda, arguments)
    try:
        with Computation() as computation:
            result = call(*args, **kwargs)
    except Exception as error:  # whatever an operator raises on types that it does not take
        return Outcome(None, error=str(error))
    return Outcome(floating_types(result), tuple(computation.operators))


def words(types_: tuple[torch.dtype, ...] | None) -> str:
    """The types as the docs write them."""
    if types_ is None:
        return "error"
    names = {bf16: "low", f32: "FP32"}
    return ", ".join(sorted({names.get(dtype, str(dtype).removeprefix("torch.")) for dtype in types_}))


def difference(autocast: Outcome, here: Outcome) -> tuple[str, str] | None:
    """Return the words for both in the docs; None if the outcomes are equal."""
    if autocast.results != here.results:
        return words(autocast.results), words(here.results)
    if autocast.operators == here.operators:
        return None
    through = [words(tuple(t for _, ts in outcome.operators for t in ts)) for outcome in (autocast, here)]
    return (f"{words(autocast.results)} (through {through[0]})", f"{words(here.results)} (through {through[1]})")


class Measured(NamedTuple):
    """The findings of the sweep."""

    differences: set[tuple[str, str, str, str]]  # function, types of the arguments, under autocast, under O1
    compared: set[str]
    names: set[str]
    uncompared: dict[str, str]
    unlike_cpu: list[str]


def on_cpu(call: Callable[..., Any], arguments: tuple[Any, Any]) -> Outcome:
    """The same on plain CPU tensors and without a mode: what a user calls."""
    args, kwargs = arguments
    try:
        return Outcome(floating_types(call(*args, **kwargs)))
    except Exception as error:
        return Outcome(None, error=str(error))


@contextmanager
def installed(low: torch.dtype) -> Iterator[None]:
    casts = FunctionCasts(low)
    casts.install()
    try:
        yield
    finally:
        casts.remove()


without_cuda = pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="a torch built with CUDA registers more, and sends tensors that claim to be on a GPU to cuDNN",
)


@pytest.fixture(scope="module")
def measured() -> Measured:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # on tensors of a few elements threads only wait, most of the time
        try:
            # A thread has a short stack: what torch.manual_seed does with it takes longer than all else here.
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(measure).result()
        finally:
            torch.set_num_threads(threads)


def measure() -> Measured:
    calls = [
        (operator_name, name, call, mix, case)
        for operator_name, case in all_cases()
        for mix in MIXES
        if mixed(case, mix, bf16) is not None
        for name, call in case.names.items()
    ]
    with pretended_cuda():
        with cuda_autocast(bf16):
            autocast = [outcome(call, mixed(case, mix, bf16)) for _, _, call, mix, case in calls]
        with installed(bf16):
            here = [outcome(call, mixed(case, mix, bf16)) for _, _, call, mix, case in calls]
    # One low type for the first arguments of a function, the other for the second: both on each would tell no more.
    plain: dict[int, Outcome] = {}
    for low in LOW:
        with installed(low):
            for i, (_, _, call, mix, case) in enumerate(calls):
                if case.low is low:
                    plain[i] = on_cpu(call, mixed(case, mix, low))

    found = Measured(set(), set(), set(), {}, [])
    for i, (operator_name, name, _, mix, case) in enumerate(calls):
        a, h, cpu = autocast[i], here[i], plain[i]
        refused = cpu.error.startswith(REFUSALS)
        if refused and a.results is not None:
            found.differences.add((name, mix.replace("low", "float16"), words(a.results), "error"))
        if a.results is None and h.results is None:
            found.uncompared.setdefault(operator_name, a.error)
            continue
        found.compared.add(operator_name)
        found.names.add(name)
        cells = difference(a, h)
        if cells is not None:
            found.differences.add((name, mix, *cells))
        expected = h.results and tuple(case.low if dtype is bf16 else dtype for dtype in h.results)
        no_kernel = case.low is f16 and "not implemented for 'Half'" in cpu.error
        if cpu.results != expected and not refused and not no_kernel and operator_name != "bfloat16":
            found.unlike_cpu.append(
                f"{name} ({mix}), {case.low}: {expected} {h.error}, on the CPU {cpu.results} {cpu.error}"
            )
    return found


# --- op by op -------------------------------------------------------------------------------------


def documented_differences() -> set[tuple[str, str, str, str]]:
    table = DOCS.read_text().split("## Differences to torch.autocast")[1]
    found = set[tuple[str, str, str, str]]()
    above = ""
    for line in table.splitlines():
        if not line.startswith("| `"):
            continue
        names, types_, reason = map(str.strip, line.strip("|").split("|"))
        assert reason
        above = above if types_ == "the same" else types_
        for mixes, outcomes in (part.split(": ") for part in above.split("; ")):
            autocast, here = outcomes.split(" → ")
            found |= {(name, mix, autocast, here) for name in names.split("`")[1::2] for mix in mixes.split(" / ")}
    return found


@without_cuda
def test_types_are_those_of_cuda_autocast_or_stand_in_the_docs(measured: Measured) -> None:
    documented = documented_differences()
    undocumented, gone = measured.differences - documented, documented - measured.differences
    assert not undocumented, "Differences that docs/casts.md lacks:\n" + "\n".join(map(str, sorted(undocumented)))
    assert not gone, "Differences of docs/casts.md that there are not:\n" + "\n".join(map(str, sorted(gone)))


def test_every_operator_of_the_database_is_compared(measured: Measured) -> None:
    uncompared = {name: error for name, error in measured.uncompared.items() if name not in measured.compared}
    assert not uncompared
    assert len(measured.compared) > 500


def test_every_listed_function_is_compared(measured: Measured) -> None:
    short = {"torch.nn.functional": "F", "torch.Tensor": "Tensor"}
    listed = {
        f"{short.get(space, space)}.{name}"
        for space, lists in NAMESPACES
        for names in vars(lists).values()
        for name in names
        if hasattr(pkgutil.resolve_name(space), name) and not space.startswith("torch.distributions")
    }
    assert sorted(listed - measured.names) == []


@without_cuda
def test_cpu_tensors_get_the_same_types_in_both_low_types(measured: Measured) -> None:
    assert not measured.unlike_cpu, "\n".join(measured.unlike_cpu)


# --- autocast's own lists -------------------------------------------------------------------------

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
KINDS = {
    "LOWER_PRECISION_FP": "half",
    "FP32": "float",
    "FP32_SET_OPT_DTYPE": "float",
    "DIFFERENT_REDISPATCH_SIGNATURE": "float",
    "PROMOTE": "promote",
}
# Registered outside of the header's lists: the ban, and cuDNN's own convolutions, which no CPU can call.
BESIDE_THE_HEADER = {"binary_cross_entropy", "cudnn_convolution", "cudnn_convolution_transpose"}
# Without a public name of their own: kernels under public functions.
INTERNAL = re.compile(r"_thnn_fused_\w+_cell|_scaled_dot_product_flash_attention|_?upsample_\w+|nll_loss2d")


def operators_in_header() -> dict[str, str]:
    text = HEADER.read_text()
    found = {}
    for macro, kind in KINDS.items():
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:[^\n]*\\\n)*[^\n]*)", text)
        assert body is not None
        for name in re.findall(r"\b_\((?:ADD_NS\()?(\w+)", body[1]):
            assert found.setdefault(name, kind) == kind
    return found


needs_header = pytest.mark.skipif(not HEADER.exists(), reason="this build of torch ships no C++ headers")


@needs_header
@without_cuda
def test_the_header_holds_all_that_autocast_registers() -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    names = {name.removeprefix("aten::").partition(".")[0] for name in registered if name.startswith("aten::")}
    assert names - {"_cudnn_rnn", "miopen_rnn"} == set(operators_in_header()) | BESIDE_THE_HEADER


@needs_header
def test_every_public_name_of_an_operator_in_the_header_is_on_the_same_list() -> None:
    wrong, without_name = [], set()
    for name, kind in operators_in_header().items():
        public = [
            (space, lists, stem)
            for space, lists in NAMESPACES
            for stem in [name.removeprefix("linalg_")]
            if (space == "torch.linalg") == (stem != name) and stem in vars(pkgutil.resolve_name(space))
        ]
        if INTERNAL.fullmatch(name):
            continue
        if not public:
            without_name.add(name)
        wrong += [f"{space}.{stem}: {kind}" for space, lists, stem in public if stem not in getattr(lists, kind)]
    assert not wrong
    assert not without_name


# --- what is on no list ---------------------------------------------------------------------------


def test_functions_on_no_list_stay_the_very_objects_of_torch(low: torch.dtype) -> None:
    spaces = {name: pkgutil.resolve_name(name) for name, _ in NAMESPACES}
    spaces |= {name: SPACES[name] for name in ("torch.fft", "torch.masked", "operator")}
    spaces |= {"torch._C._nn": torch._C._nn, "torch.nn": nn, "torch.sparse": torch.sparse}
    before = {name: dict(vars(space)) for name, space in spaces.items()}
    with installed(low):
        changed = {
            (name, attribute)
            for name, space in spaces.items()
            for attribute, value in vars(space).items()
            if value is not before[name].get(attribute)
        }
    listed = {(space, name) for space, lists in NAMESPACES for names in vars(lists).values() for name in names}
    assert changed <= listed
    assert {name: dict(vars(space)) for name, space in spaces.items()} == before


def test_the_docs_hold_the_lists() -> None:
    page = DOCS.read_text().split("## The lists")[1].split("## What no list reaches")[0]
    paragraphs = [paragraph for paragraph in page.split("\n\n") if paragraph.startswith("`")]
    for paragraph, kind in zip(paragraphs, vars(TORCH_FUNCTIONAL), strict=True):
        listed = {name for _, lists in NAMESPACES for name in getattr(lists, kind) if not name.startswith("__")}
        assert set(re.findall(r"`(\w+)`", paragraph)) == listed


def test_the_docs_say_which_functions_have_the_name_of_a_listed_one_and_are_on_no_list() -> None:
    every = {name for _, lists in NAMESPACES for names in vars(lists).values() for name in names}
    unlisted = {
        f"`{prefix}.{name}`"
        for prefix, lists in NAMESPACES
        for name in every - set(itertools.chain(*vars(lists).values()))
        if not prefix.startswith("torch.distributions") and not name.startswith("__")
        if hasattr(pkgutil.resolve_name(prefix), name)
    }
    (said,) = re.findall(r"are on no list: (.*)\.\n", DOCS.read_text())
    assert set(said.split(", ")) == unlisted
