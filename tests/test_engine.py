"""An engine and optimizers that overlap, repeat, or are not its own."""

import inspect
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.device_mesh
import torch.distributed.tensor
from torch import nn

import amp_engine
from amp_engine import AmpIndexError, AmpStateError, AmpTypeError, Engine, amp


@pytest.fixture
def engine():
    with Engine() as engine:
        yield engine


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 2, bias=False)


INPUTS = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_a_foreign_optimizer_is_named(engine):
    model = linear()
    engine.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O2", verbosity=0)
    stranger = torch.optim.Adam(linear().parameters())
    with pytest.raises(AmpTypeError, match="This Adam was not passed to amp.initialize"):
        engine.scale_loss(torch.ones(()), stranger).__enter__()
    with pytest.raises(AmpTypeError, match="This str was not passed"):
        engine.scale_loss(torch.ones(()), "optimizer").__enter__()


def test_a_loss_id_without_scaler_is_told_how_many_there_are(engine):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine.initialize(model, optimizer, opt_level="O2", num_losses=2, verbosity=0)
    with pytest.raises(AmpIndexError, match=r"loss_id=2, but there are 2 loss scalers \(loss_id 0 to 1\)"):
        engine.scale_loss(torch.ones(()), optimizer, loss_id=2).__enter__()


def test_backwards_do_not_pile_up_without_a_step(engine):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
    for _ in range(20):
        with engine.scale_loss(model(INPUTS).square().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    assert len(optimizer._amp_stash._record.pending.backwards) == 1


def test_bad_input_leaves_the_verbosity(engine):
    with pytest.raises(AmpStateError):
        engine.initialize(linear(), opt_level="O9", verbosity=0)
    assert engine.reporter.verbosity == 1


def start(engine, level="O2", optimizer_class=torch.optim.SGD, **keywords):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = optimizer_class(model.parameters(), 0.01)
    keywords = {"loss_scale": 1024.0, **keywords}
    return engine.initialize(model, optimizer, opt_level=level, verbosity=0, **keywords)


def backward(engine, model, optimizer, factor=1.0, **keywords):
    with engine.scale_loss(factor * model(INPUTS).float().square().mean(), optimizer, **keywords) as scaled_loss:
        scaled_loss.backward()


def gradients(engine, optimizer):
    return [p.grad.clone() for p in engine.master_params(optimizer)]


@pytest.mark.parametrize(
    "hooks",
    [
        (),
        ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),  # as timm's Lookahead has
        ("_optimizer_step_pre_hooks", "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks"),
    ],
)
def test_an_optimizer_without_hooks_is_refused_by_name(engine, hooks):
    class Proxy(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer
            self.param_groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
            for name in hooks:
                setattr(self, name, {})

        def step(self, closure=None):
            return self.optimizer.step(closure)

    model = linear()
    with pytest.raises(AmpStateError, match="Proxy is a torch.optim.Optimizer by name only"):
        engine.initialize(model, Proxy(torch.optim.SGD(model.parameters(), 0.1)), opt_level="O2", verbosity=0)
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("call", ["close", "initialize"])
def test_nothing_is_taken_away_inside_of_scale_loss(engine, call):
    model, optimizer = start(engine)
    with engine.scale_loss(model(INPUTS).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.raises(AmpStateError, match=rf"{call}\(\) was called inside"):
            engine.close() if call == "close" else engine.initialize(linear())
    optimizer.step()


@pytest.mark.parametrize("call", ["ListCheck.look", "tensor_lists.gradients", "tensor_lists.unscaled_outputs"])
def test_running_out_of_memory_at_the_exit_leaves_no_gradient_scaled(call, engine, monkeypatch):
    model, optimizer = start(engine)
    backward(engine, model, optimizer)
    before = gradients(engine, optimizer)

    def fail(*args):
        raise torch.cuda.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("amp_engine.kernels.ListCheck.look", lambda *args: None)  # as where it cannot take all gradients
        patch.setattr(f"amp_engine.kernels.{call}", fail)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            backward(engine, model, optimizer)
    assert all(map(torch.equal, gradients(engine, optimizer), before))
    backward(engine, model, optimizer)
    for grad, earlier in zip(gradients(engine, optimizer), before, strict=True):
        torch.testing.assert_close(grad, 2 * earlier, rtol=2e-2, atol=1e-4)


def test_an_optimizer_listed_twice_counts_once(engine):
    model = linear()
    model(INPUTS).square().sum().backward()
    expected, model.weight.grad = model.weight.grad, None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
    with engine.scale_loss(model(INPUTS).square().sum(), [optimizer, optimizer]) as scaled_loss:
        scaled_loss.backward()
    torch.testing.assert_close(next(engine.master_params(optimizer)).grad, expected, rtol=1e-2, atol=1e-2)


def test_a_loss_that_is_no_tensor_is_named(engine):
    model, optimizer = start(engine)
    with pytest.raises(AmpTypeError, match="the loss as a tensor, not a float"):
        engine.scale_loss(0.5, optimizer).__enter__()


@pytest.mark.parametrize("given", [1e39, 1e-46, 1e-40])
def test_a_scale_that_float32_cannot_invert_is_refused(engine, given):
    with pytest.raises(ValueError, match="loss_scale="):
        start(engine, loss_scale=given)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("where", ["optimizer", "model"])
def test_an_initialize_that_fails_halfway_leaves_every_bit(engine, level, where):
    class RefusesHooks(torch.optim.SGD):
        def register_load_state_dict_pre_hook(self, *args, **kwargs):
            raise OSError("not today")

    class RefusesCasts(nn.Linear):
        def _apply(self, fn, recurse=True):
            raise OSError("not today")

    last = RefusesCasts(2, 2) if where == "model" else nn.Linear(2, 2)
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 2).requires_grad_(False), last)
    model(INPUTS).sum().backward()
    optimizer = (RefusesHooks if where == "optimizer" else torch.optim.SGD)(model[0].parameters(), 0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grad = model[0].weight.grad.clone()
    with pytest.raises(OSError, match="not today"):
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
    after = model.state_dict()
    assert all(after[name].dtype == before[name].dtype and torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(model[0].weight.grad, grad)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert not model._forward_pre_hooks
    assert not model._state_dict_hooks
    engine.initialize(nn.Linear(4, 2), opt_level=level, verbosity=0)


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_parameters_that_others_sharded_are_refused_by_name_where_they_are_cast(engine, level):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 2)
    model.weight = nn.Parameter(torch.distributed.tensor.distribute_tensor(model.weight.detach(), mesh))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(AmpStateError, match="Parameter weight of Linear is a DTensor"):
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
    engine.initialize(model, optimizer, opt_level="O4", verbosity=0)


@pytest.mark.parametrize("call", ["state_dict", "load_state_dict"])
def test_checkpoints_before_initialize_are_told_what_to_call(engine, call):
    with pytest.raises(AmpStateError, match=rf"amp.{call}\(\) was called before amp.initialize\(\)"):
        engine.state_dict() if call == "state_dict" else engine.load_state_dict({})


# --- two threads in one engine --------------------------------------------------------------------


class HeldUp(nn.Linear):
    """When it is cast for the first time, it waits for another thread, which may itself wait for the engine."""

    def __init__(self):
        super().__init__(4, 2)
        self.other, self.is_held = None, threading.Event()

    def _apply(self, fn, recurse=True):
        other, self.other = self.other, None
        if other is not None:
            self.is_held.set()
            other.wait(0.2)
        return super()._apply(fn, recurse)


def in_two_threads(model, first, second):
    """`first` is held up in casting `model`; then `second` runs. What each returned or raised."""
    done = threading.Event()

    def after():
        assert model.is_held.wait(60)
        try:
            return second()
        finally:
            done.set()

    model.other = done
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(first), pool.submit(after)]
        return [future.exception(60) or future.result() for future in futures]


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_an_optimizer_that_two_threads_initialize_is_taken_once(level):
    model = HeldUp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Engine() as engine:
        results = in_two_threads(
            model,
            lambda: engine.initialize(model, optimizer, opt_level=level, verbosity=0),
            lambda: engine.initialize(nn.Linear(2, 2), optimizer, opt_level=level, verbosity=0),
        )
        assert isinstance(results[0], tuple)
        assert isinstance(results[1], AmpStateError)
        assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_close_in_one_thread_waits_for_initialize_in_another(level):
    engine, model = Engine(), HeldUp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    results = in_two_threads(
        model, lambda: engine.initialize(model, optimizer, opt_level=level, verbosity=0), engine.close
    )
    assert results == [(model, optimizer), None]
    assert engine.policy is None
    assert model.weight.dtype == torch.float32
    assert not hasattr(optimizer, "_amp_stash")


@pytest.mark.parametrize("own", [False, True])
def test_threads_share_the_engine_of_amp_and_have_scales_of_their_own_in_engines_of_their_own(own):
    both, scales = threading.Barrier(2, timeout=60), {}

    def train_at(level):
        engine = Engine() if own else amp
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if level == "O5":
            both.wait()  # after the other one
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
        if level == "O2":
            both.wait()
        both.wait()
        backward(engine, model, optimizer)
        optimizer.step()
        scales[level] = engine.get_scale().item()
        both.wait()
        if own or level == "O5":
            engine.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train_at, ["O2", "O5"]))
    assert scales == {"O2": 65536.0 if own else 1.0, "O5": 1.0}
    assert amp.current_engine() is None


def test_representations_say_what_it_is(engine):
    assert repr(engine) == "<Engine: initialize() was not called>"
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine.initialize(model, optimizer, opt_level="O2", num_losses=2, verbosity=0)
    assert repr(engine) == "<Engine at O2: steps SGD; 2 losses, loss scale dynamic>"
    assert repr(engine.scalers[0]) == "<LossScaler: dynamic>"
    with engine.explain() as explanation:
        pass
    assert repr(explanation) == str(explanation)
    engine.initialize(model, enabled=False, verbosity=0)
    assert repr(engine) == "<Engine: enabled=False>"


def test_the_module_lists_public_names_only():
    assert dir(amp) == sorted(amp.__all__)
    functions = {name for name in amp_engine.__all__ if name.islower() and name != "amp"}
    assert set(dir(amp)) == {*functions, "DynamicLossScale", "GradScaler", "LossScaler", "RunPolicy"}
    assert all(callable(getattr(amp, name)) for name in dir(amp))


def test_functions_of_the_module_have_signature_and_docstring_of_the_methods():
    for name in ("scale_loss", "clip_grad_norm_", "load", "keep_float"):
        function, method = getattr(amp, name), getattr(amp_engine.Engine(), name)
        assert inspect.signature(function) == inspect.signature(method)
        assert (function.__doc__, function.__name__) == (method.__doc__, name)
        assert pickle.loads(pickle.dumps(function)) is function


def test_an_unknown_keyword_is_refused_with_the_one_that_is_meant():
    with pytest.raises(TypeError, match=r"amp.scale_loss\(\) got .* 'optimizer'.  Write optimizers=... in its place."):
        amp.scale_loss(torch.ones(()), optimizer=None)
    with pytest.raises(TypeError, match=r"amp.scalars\(\) got .* 'engine'.  It has no keywords."):
        amp.scalars(engine=amp_engine.Engine())


def test_a_tool_is_a_function_of_amp_and_a_method_of_an_engine() -> None:
    engine = amp_engine.Engine()
    for name in ("audit_updates", "explain", "find_overflow", "receipt", "step_times"):
        function, method = getattr(amp, name), getattr(engine, name)
        assert inspect.signature(function) == inspect.signature(method)
        assert function.__doc__ == method.__doc__ is not None
        assert (function.__name__, function.__module__) == (name, "amp_engine.amp")
        assert pickle.loads(pickle.dumps(function)) is function
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'recipt'"):
        engine.recipt  # noqa: B018
    with pytest.raises(AttributeError, match="module 'amp_engine.amp' has no attribute 'recipt'"):
        amp.recipt  # noqa: B018


def test_functions_of_amp_call_what_stands_in_for_a_method_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amp._amp_state.engine, "get_scale", lambda loss_id=0: "mine")
    assert amp.get_scale() == "mine"
