"""Pass 1 of a step: one object, called again and again."""

import math
from types import SimpleNamespace

import pytest
import torch

from amp_engine import kernels
from amp_engine.errors import AmpValueError
from amp_engine.kernels import choice

from . import oracle
from .conftest import NATIVE
from .lists import FLOATS, Arena, copies, same_bits

SCALE = 3000.0


def run(list_check, tensors, outputs=None):
    found_inf, norm = torch.tensor(0.0), torch.tensor(math.nan)
    checks = list_check.run(tensors, outputs, torch.tensor(SCALE), found_inf, norm)
    return checks, found_inf.item(), norm.item()


def test_again_and_again_over_changing_lists():
    arena, list_check = Arena(), kernels.ListCheck()
    for sizes in ((1, 31, 40000), (1, 31, 40000), (5,), (), (32768, 0, 7, 65537)):
        tensors = [arena.randn(n, FLOATS[i % 3]) for i, n in enumerate(sizes)]
        if len(tensors) > 2:
            tensors[1] = None
        present = [t for t in tensors if t is not None]
        checks, found_inf, norm = run(list_check, tensors)
        assert found_inf == 0.0
        assert norm == pytest.approx(oracle.norm(present) / SCALE, rel=1e-6)
        sums = [0.0 if t is None else oracle.sum_squares(t) for t in tensors]
        assert checks.sum_squares.tolist() == pytest.approx(sums, rel=1e-6)
        assert checks.largest.tolist() == [0.0 if t is None else oracle.largest(t) for t in tensors]
        assert not checks.nonfinite.any()


@pytest.mark.parametrize("value", [1.0, math.inf])
def test_a_scale_is_updated_after_the_check_as_by_itself(value):
    tensors, results = [torch.full((9,), value), None], []
    for together in (True, False):
        scale, tracker, found_inf, norm = (
            torch.tensor(4.0),
            torch.tensor(2, dtype=torch.int32),
            torch.zeros(()),
            torch.zeros(()),
        )
        inverse, outcome, loss = torch.zeros(()), torch.zeros(4), torch.tensor(0.25)
        update = (scale, tracker, found_inf, 2.0, 0.5, 3, 1.0, 16.0, None, 1, True, inverse, outcome, None, loss)
        kernels.ListCheck().run(tensors, None, scale, found_inf, norm, update if together else None)
        if not together:
            kernels.update_scale_(*update)
        results.append([t.item() for t in (scale, tracker, found_inf, norm, inverse)] + outcome.tolist())
    assert results[0] == results[1]
    assert results[0][5:] == [float(value == math.inf), 2.0 if value == math.inf else 8.0, 4.0, 0.25]


def test_an_update_is_refused_by_name():
    tensors, scale = [torch.full((9,), 2.0)], torch.tensor(4.0)
    update = (scale, torch.zeros(()), torch.zeros(()), 2.0, 0.5, 3, 1.0, 16.0, None, 1, True, None, None, None, None)
    with pytest.raises(AmpValueError, match="growth_tracker is"):
        kernels.ListCheck().run(tensors, tensors, scale, torch.zeros(()), torch.zeros(()), update)


def test_only_what_has_an_output_is_written():
    arena, list_check = Arena(), kernels.ListCheck()
    tensors = [arena.randn(33, dtype) for dtype in (*FLOATS, torch.float32)]
    before = copies(tensors)
    run(list_check, tensors, [tensors[0], None, tensors[2], None])
    inv_scale = torch.tensor(SCALE).double().reciprocal().float()
    for i, (t, b) in enumerate(zip(tensors, before, strict=True)):
        assert same_bits(t, (b.float() * inv_scale).to(b.dtype) if i in (0, 2) else b)
    assert arena.is_intact()


@pytest.mark.parametrize(("norm", "max_norm"), [(3.0, 0.9), (0.5, 2.0), (0.0, 1.0), (math.inf, 1.0), (1e-7, 1e-8)])
def test_clipped_in_float32_and_rounded_once(norm, max_norm):
    arena, list_check = Arena(), kernels.ListCheck()
    tensors = [None if dtype is None else arena.randn(40000, dtype) for dtype in (*FLOATS, None, *FLOATS)]
    before = copies([t for t in tensors if t is not None])
    factor = torch.tensor(min(1.0, max_norm / (torch.tensor(norm).item() + 1e-6)))
    versions = [t._version for t in tensors if t is not None]
    list_check.clip_(tensors, torch.tensor(norm), max_norm)
    present = [t for t in tensors if t is not None]
    for t, b in zip(present, before, strict=True):
        assert same_bits(t, (b.float() * factor).to(b.dtype))
    assert [t._version for t in present] == [version + 1 for version in versions]
    assert arena.is_intact()


def test_nothing_is_clipped_of_a_list_that_is_refused():
    tensors = [torch.ones(3), torch.ones(3, dtype=torch.float64)]
    with pytest.raises(AmpValueError, match=r"\[1\] is a"):
        kernels.ListCheck().clip_(tensors, torch.tensor(2.0), 1.0)
    assert torch.equal(tensors[0], torch.ones(3))


def test_each_device_has_a_check_of_its_own(monkeypatch):
    """A check keeps tensors on its GPU between calls, which the list of another GPU would put out of date."""
    made = []

    class Check:
        def __init__(self):
            self.devices = []
            made.append(self)

        def clip_(self, tensors, norm, max_norm):
            self.devices.append(norm.device.type)

    for device in ("cpu", "meta"):
        monkeypatch.setitem(choice.NATIVE, device, SimpleNamespace(ListCheck=Check))
    list_check = kernels.ListCheck()
    for device in ("cpu", "meta") * 2:
        list_check.clip_([], torch.empty((), device=device), 1.0)
    assert [check.devices for check in made] == [["cpu"] * 2, ["meta"] * 2]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_flag_is_set_and_never_taken_back(bad):
    list_check, found_inf = kernels.ListCheck(), torch.tensor(0.0)
    for value, flag in ((1.0, 0.0), (bad, 1.0), (1.0, 1.0)):
        list_check.run([torch.full((9,), value)], None, torch.tensor(1.0), found_inf, torch.tensor(0.0))
        assert found_inf.item() == flag


def test_a_list_that_is_not_walked_is_refused():
    tensors = [torch.ones(3), torch.ones(3, dtype=torch.float64)]
    with pytest.raises(AmpValueError, match=r"\[1\] is"):
        run(kernels.ListCheck(), tensors)
    with pytest.raises(AmpValueError, match="has 1 entries, but"):
        run(kernels.ListCheck(), tensors[:1] * 2, tensors[:1])


@NATIVE
def test_a_run_that_raises_leaves_no_sizes_of_the_one_before():
    list_check, large = kernels.ListCheck(), torch.zeros(200_000)
    large[-1] = math.inf  # behind the sizes before
    run(list_check, [torch.ones(10), torch.ones(10)])

    def run_inside(batched):
        with pytest.raises((AmpValueError, RuntimeError)):  # it has no memory of its own
            run(list_check, [large, batched])
        return batched

    torch.vmap(run_inside)(torch.ones(3, 10))
    assert run(list_check, [large, torch.ones(10)])[1:] == (1.0, math.inf)


def with_gradients(*grads):
    params = []
    for grad in grads:
        param = torch.nn.Parameter(torch.zeros(5, dtype=torch.float32 if grad is None else grad.dtype))
        param.grad_dtype, param.grad = None, grad
        params.append(param)
    return params


def look(params, plain, unscales, keeps_half):
    found_inf, norm = torch.tensor(0.0), torch.tensor(math.nan)
    handle = kernels.tensor_lists.params(params)
    arguments = handle, bytes(plain), unscales, keeps_half, torch.tensor(4.0), found_inf, norm, None
    return kernels.ListCheck().look(*arguments), found_inf.item(), norm.item()


@NATIVE
@pytest.mark.parametrize(("unscales", "keeps_half"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("wide_master", [False, True])
def test_a_look_checks_and_unscales_all_gradients_at_once(unscales, keeps_half, wide_master):
    values = [torch.randn(5).half() for _ in range(3)] + [torch.randn(5)]
    grads = [values[0].clone(), None, values[1].clone(), values[2].clone(), values[3].clone()]
    grads[0] = grads[0].float() if wide_master else grads[0]
    params = with_gradients(*grads)  # two with masters, then a half and a float32 one without
    found, found_inf, norm = look(params, [0, 0, 0, 1, 1], unscales, keeps_half)
    assert found_inf == 0.0
    assert norm == pytest.approx(oracle.norm(values) / 4.0, rel=1e-6)
    assert found.checks.largest.tolist() == [
        0.0 if g is None else v.abs().max() for g, v in zip(grads, [values[0], None, *values[1:]], strict=True)
    ]
    assert list(found.accesses) == [
        kernels.tensor_lists.NONE if g is None else kernels.tensor_lists.TAKEN for g in grads
    ]
    assert found.is_kept == (keeps_half and not wide_master)
    assert not found.marks.have_moved()
    for i, (param, value) in enumerate(zip(params, [values[0], None, *values[1:]], strict=True)):
        assert found.gradients[i] is param.grad
        if value is None:
            continue
        is_left = not unscales or (i < 3 and found.is_kept)
        wanted = value.float() if is_left else value.float() / 4.0
        assert torch.equal(param.grad.float(), wanted.half().float() if i == 3 else wanted)
        widens = unscales and i < 3 and not found.is_kept
        assert param.grad.dtype == (torch.float32 if widens else grads[i].dtype)
        assert (param.grad is grads[i]) == (not widens or grads[i].dtype is torch.float32)


@NATIVE
@pytest.mark.parametrize("size", [5, 5000])  # in memory that gradients share, and in memory of its own
def test_a_look_gives_a_gradient_other_memory_where_nobody_else_refers_to_it(size):
    params = [torch.nn.Parameter(torch.zeros(size).half()) for _ in range(6)]
    for param in params:
        param.grad_dtype, param.grad = None, torch.full((size,), 8.0).half()
        param.grad.note = "alone"
    held, buffer = params[0].grad, torch.full((2 * size,), 8.0).half()
    params[1].grad = params[2].grad
    params[3].grad = buffer[size:]
    alias = params[4].grad.detach()
    found, _, _ = look(params, [0] * 6, True, False)
    assert not found.marks.have_moved()
    for param in params:
        assert torch.equal(param.grad, torch.full((size,), 2.0))
    assert [hasattr(param.grad, "note") for param in params] == [False, False, True, False, False, True]
    assert len({param.grad.data_ptr() for param in params}) == 6
    assert torch.equal(held, torch.full((size,), 8.0).half())
    assert torch.equal(alias, held)
    assert alias._version == 0
    assert torch.equal(buffer, torch.full((2 * size,), 8.0).half())
    assert params[5].grad._version > 0


@NATIVE
@pytest.mark.parametrize(
    "grads",
    [[None, None], [torch.ones(5), torch.ones(5).to_sparse()], [torch.ones(5), torch.ones(5).double()]],
    ids=["none", "sparse", "float64"],
)
def test_a_look_does_nothing_where_it_cannot_take_all(grads):
    params = with_gradients(*grads)
    found, _, norm = look(params, [1, 1], True, False)
    assert found is None
    assert math.isnan(norm)
    for param, grad in zip(params, grads, strict=True):
        assert param.grad is grad
        assert grad is None or torch.equal(grad.to_dense(), torch.ones(5, dtype=grad.dtype))


@NATIVE
def test_a_look_unscales_no_gradient_with_a_graph_and_checks_one():
    params = with_gradients(torch.ones(5), torch.ones(5, requires_grad=True) * 2)
    found, _, norm = look(params, [1, 1], True, False)
    assert found is None
    assert math.isnan(norm)
    assert torch.equal(params[0].grad, torch.ones(5))
    assert torch.equal(params[1].grad, torch.full((5,), 2.0))
    assert look(params, [1, 1], False, False)[0] is not None


@NATIVE
def test_a_look_refuses_gradients_that_share_memory_which_it_would_write():
    shared = torch.ones(5)
    params = with_gradients(shared, shared.view(5))
    with pytest.raises(AmpValueError, match="check: .* has the same memory as"):
        look(params, [1, 1], True, False)
    assert torch.equal(shared, torch.ones(5))
    assert look(params, [1, 1], False, False)[0] is not None


def test_gradients_with_a_graph_are_found():
    params = with_gradients(torch.ones(5), None, torch.ones(5))
    assert not kernels.tensor_lists.any_graph(params)
    params[2].grad = torch.ones(5, requires_grad=True)  # a leaf has no graph
    assert not kernels.tensor_lists.any_graph(params)
    params[2].grad = torch.ones(5, requires_grad=True) * 2
    assert kernels.tensor_lists.any_graph(params)
    assert kernels.tensor_lists.any_graph(kernels.tensor_lists.params(params))


@pytest.mark.parametrize("other", [torch.ones(5).to_sparse(), torch.ones(5).double()], ids=["sparse", "float64"])
def test_gradients_that_the_kernels_cannot_take_are_found(other):
    params = with_gradients(torch.ones(5), None, torch.ones(5))
    assert not kernels.tensor_lists.any_other(params)
    params[2].grad_dtype, params[2].grad = None, other
    assert kernels.tensor_lists.any_other(params)
    assert kernels.tensor_lists.any_other(kernels.tensor_lists.params(params))


@NATIVE
@pytest.mark.parametrize("sizes", [(40_007, 65_536), (3, 5)], ids=["large", "small, in one slab"])
def test_gradients_are_written_where_the_last_ones_were_once_nothing_refers_to_these(sizes):
    """Their memory is kept, since the system would fill its pages with zeros, and no reference sees another value."""
    params = [torch.nn.Parameter(torch.zeros(n, dtype=torch.float16)) for n in sizes]
    handle, plain, list_check = kernels.tensor_lists.params(params), bytes(len(sizes)), kernels.ListCheck()

    def look_at(value: float) -> list[int]:
        for param in params:
            param.grad_dtype = None
            param.grad = torch.full_like(param, value)
        scalars = [torch.tensor(x) for x in (4.0, 0.0, 0.0)]
        assert list_check.look(handle, plain, True, False, *scalars, None) is not None
        for param in params:
            assert torch.equal(param.grad, torch.full(param.shape, value / 4))
        return [param.grad.data_ptr() for param in params]

    def forget() -> list[torch.Tensor]:
        for param in params:
            param.grad = None
        return [torch.full((n,), -1.0) for n in sizes]  # would get the memory, if it were free

    first = look_at(8.0)
    others = forget()
    assert look_at(16.0) == first
    held = params[0].grad[1:]
    others += forget()
    assert look_at(32.0)[0] != first[0]
    assert torch.equal(held, torch.full_like(held, 4.0))
    assert all(torch.equal(other, torch.full_like(other, -1.0)) for other in others)


@NATIVE
def test_gradients_that_became_another_processs_are_not_written_again():
    param = torch.nn.Parameter(torch.zeros(9, dtype=torch.float16))
    param.grad_dtype = None
    handle, list_check, shared = kernels.tensor_lists.params([param]), kernels.ListCheck(), []
    for value in (8.0, 16.0):
        param.grad = torch.full_like(param, value)
        list_check.look(handle, b"\0", True, False, *(torch.tensor(x) for x in (4.0, 0.0, 0.0)), None)
        shared.append(param.grad.data_ptr())
        param.grad.share_memory_()
        shared.append(param.grad.data_ptr())
        param.grad = None
    assert shared[0] != shared[1] != shared[2]


@NATIVE
def test_memory_of_gradients_is_let_go_when_it_is_forgotten():
    param = torch.nn.Parameter(torch.zeros(65_536, dtype=torch.float16))
    param.grad_dtype = None
    handle, list_check = kernels.tensor_lists.params([param]), kernels.ListCheck()
    param.grad = torch.full_like(param, 8.0)
    list_check.look(handle, b"\0", True, False, *(torch.tensor(x) for x in (4.0, 0.0, 0.0)), None)
    storage = param.grad.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)
    list_check.forget_gradients()
    assert torch._C._storage_Use_Count(storage._cdata) == uses - 1


@NATIVE
def test_the_half_gradient_that_is_last_in_memory_is_kept_until_the_next_look():
    """Without it the heap would end there, and the system would get the memory of all of them."""
    params = [torch.nn.Parameter(torch.zeros(65_536, dtype=torch.float16)) for _ in range(3)]
    handle, list_check = kernels.tensor_lists.params(params), kernels.ListCheck()

    def look_at() -> list[torch.UntypedStorage]:
        for param in params:
            param.grad_dtype, param.grad = None, torch.full_like(param, 8.0)
        storages = sorted((param.grad.untyped_storage() for param in params), key=torch.UntypedStorage.data_ptr)
        list_check.look(handle, bytes(3), True, False, *(torch.tensor(x) for x in (4.0, 0.0, 0.0)), None)
        return storages

    def uses(storages: list[torch.UntypedStorage]) -> list[int]:
        return [torch._C._storage_Use_Count(storage._cdata) for storage in storages]

    first = look_at()
    ours = uses(first)[0]
    assert uses(first) == [ours, ours, ours + 1]
    second = look_at()
    assert uses(first) == [ours] * 3
    assert uses(second) == [ours, ours, ours + 1]
    list_check.forget_gradients()
    assert uses(second) == [ours] * 3
