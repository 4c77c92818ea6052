"""What computes: the compiled kernels (native.py), or plain PyTorch (reference.py). `choice.py` says which, and where.

Both give the same answers to the bit but for what reference.py says, and raise the same errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from amp_engine.kernels.formulas import Formula

TensorList = Sequence[Tensor | None]


class Checks(NamedTuple):
    """What one pass over n tensors found, of the values before the pass wrote any; on the device of the tensors.

    Attributes:
        nonfinite: bool, shape [n]: whether the tensor holds an inf or a NaN.
        sum_squares: float64, shape [n].
        largest: float32, shape [n]: largest magnitude; NaN if there is one.
    """

    nonfinite: Tensor
    sum_squares: Tensor
    largest: Tensor


class Gradients(NamedTuple):
    """The gradients of many parameters.

    Attributes:
        tensors: n; None where there is none.
        accesses: n; how the kernels can take each.
        devices: where those are that can be taken, each device once.
    """

    tensors: TensorList
    accesses: bytes
    devices: list[torch.device]


class RepeatedCheck(Protocol):
    """`check` and `unscale_` over one list in one pass, again and again."""

    def run(
        self, tensors: TensorList, outputs: TensorList | None, scale: Tensor, found_inf: Tensor, norm: Tensor, /
    ) -> Checks:
        """See `kernels.ListCheck.run`."""
        ...

    def multiply_(self, tensors: TensorList, factor: Tensor, /) -> None:
        """See `kernels.ListCheck.multiply_`."""
        ...


class BuiltTable(Protocol):
    """The tensors of one optimizer, stepped together."""

    def is_current(self) -> bool:
        """Whether every tensor still has the memory that it had when the table was built."""
        ...

    def step(
        self,
        grads: TensorList,
        scaled: Sequence[bool],
        groups: Sequence[Formula],
        inv_scale: Tensor | None,
        found_inf: Tensor | None,
        norm: Tensor | None,
        max_norm: float,
        checks: Checks | None,
        gradient_norm: Tensor | None,
        /,
    ) -> None:
        """See `kernels.StepTable.step`."""
        ...


class Backend(Protocol):
    """Multi-tensor operations on one type of device. Arguments are those of the functions in ops.py and table.py."""

    def check(self, tensors: Sequence[Tensor], /) -> Checks:
        """Look at every element once."""
        ...

    def l2norm(self, tensors: Sequence[Tensor], /) -> tuple[Tensor, Tensor]:
        """2-norm over all of them, and of each of them."""
        ...

    def unscaled(self, tensors: Sequence[Tensor], inv_scale: Tensor, /) -> list[Tensor]:
        """`[t.float() * inv_scale for t in tensors]`."""
        ...

    def unscale_(self, tensors: Sequence[Tensor], inv_scale: Tensor, /) -> Checks:
        """`t *= inv_scale` for each."""
        ...

    def scale_(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], factor: Tensor, /) -> Checks:
        """`output[...] = input * factor` pairwise."""
        ...

    def axpby_(
        self,
        outputs: Sequence[Tensor],
        xs: Sequence[Tensor],
        ys: Sequence[Tensor],
        a: Tensor | None,
        b: Tensor | None,
        /,
    ) -> Checks:
        """`output[...] = fma(a, x, b * y)` triple by triple."""
        ...

    def cast_copy_(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], /) -> None:
        """`output[...] = input` pairwise."""
        ...

    def update_scale_(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        found_inf: Tensor,
        hysteresis_tracker: Tensor | None,
        inv_scale_used: Tensor | None,
        found_inf_used: Tensor | None,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int,
        min_scale: float,
        max_scale: float,
        dynamic: bool,
        /,
    ) -> None:
        """Adjust a loss scale after one backward. In the order of the operator."""
        ...

    def repeated_check(self) -> RepeatedCheck:
        """One for a list that is checked again and again."""
        ...

    def built_table(
        self,
        formula: str,
        weights: Sequence[Tensor],
        copies: TensorList,
        state1: TensorList,
        state2: TensorList,
        groups: Sequence[int],
        steps: Tensor,
        norms: Tensor | None,
        /,
    ) -> BuiltTable:
        """The table of one optimizer's tensors."""
        ...


class Marks(Protocol):
    """Some tensors as they were when each was last marked: address, version, type and device.

    It keeps their memory alive, or another one could get its address.
    """

    def mark(self) -> None:
        """Mark all of them."""
        ...

    def mark_at(self, place: int, /) -> None:
        """Mark one of them."""
        ...

    def take(self, place: int, other: Any, other_place: int, /) -> None:
        """Have one be marked as `other` has marked the same tensor."""
        ...

    def have_moved(self) -> bool:
        """True if one was written or replaced since it was marked."""
        ...

    def has_moved(self, place: int, /) -> bool:
        """True if this one was."""
        ...

    def has_other_memory(self, place: int, /) -> bool:
        """True if this one has nothing new but its memory: `tensor.data = x`."""
        ...


class GradientMarks(Protocol):
    """The gradients of some parameters as they were; it tells for as long as they are alive."""

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters, as they were passed."""
        ...

    def have_moved(self) -> bool:
        """True if a gradient came, went, was replaced or written since."""
        ...

    def moved(self) -> list[tuple[int, bool]]:
        """Where that is so, and whether there was a gradient. Slow."""
        ...


class TensorLists(Protocol):
    """Loops over parameters, on the host. No subclass of Tensor is asked for anything.

    They are called many times an iteration, and Python takes a microsecond or more a tensor.
    """

    def params(self, tensors: Sequence[Tensor], /) -> Sequence[Tensor]:
        """`tensors` in a form that the others read fastest, for lists that are read again and again."""
        ...

    def marks(self, tensors: Sequence[Tensor], /) -> Marks:
        """Marks of tensors as they are now."""
        ...

    def gradient_marks(self, params: Sequence[Tensor], /) -> GradientMarks:
        """Marks of the gradients that they have now; `params` as the function of that name gives them."""
        ...

    def gradients(self, params: Sequence[Tensor], /) -> Gradients:
        """The gradient of each parameter."""
        ...

    def copies(self, tensors: TensorList, accesses: bytes, /) -> TensorList:
        """A copy of each tensor whose access is not NONE; None for the others.

        Copy-on-write where it has memory of its own: writing to either leaves the other alone, and is when memory is
        copied. Memory that is shared (a bucket of DDP) must not become copy-on-write as a whole, that of others (numpy,
        DLPack) cannot, and on another stream than the default one a GPU's would be copied out of order: these are
        copied at once.
        """
        ...

    def watch_gradients(self, params: Sequence[Tensor], /) -> None:
        """Have torch tell of whoever asks for the memory of the gradients from now on, where it can (since 2.13)."""
        ...

    def are_gradients_unwritten(self, params: Sequence[Tensor], /) -> bool:
        """True if nobody has asked for the memory of any gradient since it was watched, or has it from before."""
        ...

    def either(self, mask: bytes, first: TensorList, second: TensorList | None = None, /) -> TensorList:
        """`first[i]` where `mask[i]` is not 0, else `second[i]`; None where there is no `second`."""
        ...

    def any_gradient(self, tensors: Sequence[Tensor], /) -> bool:
        """Whether one of them has a gradient."""
        ...

    def same_objects(self, a: Sequence[object], b: Sequence[object], /) -> bool:
        """Whether two lists or tuples have the very same objects. `==` would ask tensors, and compare elements."""
        ...

    def same_entries(self, dicts: list[dict[str, Any]], name: str, objects: Sequence[object], /) -> bool:
        """Whether `dicts[i].get(name) is objects[i]` for every i."""
        ...

    def discard_gradients(self, tensors: Sequence[Tensor], /) -> None:
        """`tensor.grad = None` for each."""
        ...

    def watch_collectives(
        self, writing: Sequence[str], reading: Sequence[str], listener: Callable[[list[Tensor], bool], None], /
    ) -> bool:
        """Have operators of c10d find memory that was asked for, and tell what they write. Whether that is possible.

        listener(tensors, is_broadcast): called after each of the `writing` ones.
        """
        ...


class CompiledWeightCache(Protocol):
    """The copies of weights that patched functions read. `casting.cache.NativeWeightCache` says when each is called."""

    def __len__(self) -> int: ...

    def cast(self, weight: Tensor, dtype: torch.dtype, /) -> tuple[Tensor, bool]:
        """The copy of a weight, and whether it was made."""
        ...

    def discard(self, weight: Tensor, /) -> None:
        """Discard the copy of one weight."""
        ...

    def after_backward(self) -> None:
        """Anybody may have written any weight."""
        ...

    def discard_orphans(self) -> None:
        """Free the weights that nobody but their own copies keeps alive."""
        ...

    def clear(self) -> None:
        """Discard every copy."""
        ...

    def copies(self, weights: Sequence[Tensor], unfinished: int, /) -> tuple[int, list[Tensor | None]]:
        """A number for this step and what it is to write beside the weights; `unfinished`: a step that has copies."""
        ...

    def written(self, weights: Sequence[Tensor], step: int, /) -> None:
        """The step wrote them and no other weight."""
        ...

    def leave(self, weights: Sequence[Tensor], /) -> None:
        """Keep no copy of these from now on."""
        ...


class CompiledCasts(Protocol):
    """What the casts of O1 have of the compiled module; without it casting/ does the same in Python."""

    WeightCache: Callable[[], CompiledWeightCache]

    def patched_function(
        self, original: Any, reference: Any, name: str, doc: str, module: str, kind: str, torch_promotes: bool, /
    ) -> Any:
        """A builtin that casts the arguments of `original`, and leaves what is not plain to `reference`."""
        ...

    def patched_method(
        self, original: Any, reference: Any, name: str, doc: str, kind: str, torch_promotes: bool, /
    ) -> Any:
        """A method descriptor of torch.Tensor that does so; None when all are given out."""
        ...

    def put_in_force(
        self, dtype: torch.dtype, cache: CompiledWeightCache, caching: bool, observed: bool, everywhere: bool, /
    ) -> None:
        """What patched functions do now."""
        ...

    def put_out_of_force(self) -> None:
        """Patched functions are the originals."""
        ...
