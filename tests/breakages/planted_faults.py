"""Judge explanations of overflows: about 160 faults planted in small models of many families, each line judged.

By hand, in two minutes: `python -m tests.breakages.planted_faults [-v] [words of names]`. A line is right if it says
all that its fault asks for, wrong if it says as a fact what is not so, and vague else. See "Faults that are planted" in
CONTRIBUTING.md.
"""

from __future__ import annotations

import argparse
import logging
import math
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from amp_engine import Engine
from tests.ranks import on_ranks

WIDTH, LENGTH, WORDS = 16, 6, 11


def same(x: Tensor) -> Tensor:
    return x


class Attention(nn.Module):
    """Written by hand, as people do; `scale` 1 leaves the division by the root of the width out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = WIDTH**-0.5
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.bmm(self.q(x), self.k(x).transpose(1, 2)) * self.scale
        if self.mask is not None:
            scores = scores.masked_fill(self.mask, -math.inf)
        return self.out(torch.bmm(scores.softmax(-1), self.v(x)))


class RMSNorm(nn.Module):
    """A norm without a cast to float32, as in early Llamas."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = norm(), Attention(), norm()
        self.fc, self.proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.planted: Callable[[Tensor], Tensor] = same

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.planted(self.proj(F.gelu(self.fc(self.norm2(x)))))


class Gpt(nn.Module):
    """Four blocks, between an embedding and a head; `checkpoint` is "" or a kind of it."""

    def __init__(self, checkpoint: str = "", tied: bool = False, norm: Any = lambda: nn.LayerNorm(WIDTH)) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(4))
        self.norm, self.head = norm(), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpoint = checkpoint
        self.after: Callable[[Tensor], Tensor] = same

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.checkpoint:
                reentrant = self.checkpoint == "reentrant"
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            else:
                x = block(x)
        return self.head(self.after(self.norm(x)))

    def loss(self, index: int) -> Tensor:
        tokens = torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(index))
        return F.cross_entropy(self(tokens).float().view(-1, WORDS), tokens.view(-1))


class Llama(Gpt):
    def __init__(self) -> None:
        super().__init__(norm=RMSNorm)


class Regression(nn.Module):
    """Has inputs and targets of floats, which `spoil` may change."""

    shape: tuple[int, ...] = (4, WIDTH)

    def __init__(self) -> None:
        super().__init__()
        self.spoil: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, y: (x, y)

    def loss(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(self.shape, generator=generator)
        with torch.no_grad():
            y = x.flatten(1).mean(1, keepdim=True)
        x, y = self.spoil(x, y)
        return F.mse_loss(self(x).float(), y)


class Mlp(Regression):
    def __init__(self, kept: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.enc, self.mid, self.dec = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.between = kept

    def forward(self, x: Tensor) -> Tensor:
        return self.dec(self.between(self.mid(torch.tanh(self.enc(x)))))


class ResBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class ResNet(Regression):
    shape = (4, 3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer1, self.layer2 = nn.Conv2d(3, 8, 3, padding=1), ResBlock(), ResBlock()
        self.fc = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class Tagger(Regression):
    """An LSTM with a loss that sums over paths by hand, in the manner of a CRF."""

    shape = (3, LENGTH, WIDTH)

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.tags = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 5)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        scores = self.tags(self.lstm(x)[0]).float() * self.factor
        return scores.exp().sum(-1).log().mean(1, keepdim=True)


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float("nan")


class Run:
    """A model in training, and what was said meanwhile."""

    def __init__(self, level: str, model: Any, lr: float = 1e-3, trained: Any = None, **keywords: Any) -> None:
        self.model, self.engine, self.index = model, Engine(), 0
        self.optimizer = torch.optim.SGD(list(trained or model.parameters()), lr=lr)
        self.engine.initialize(model, self.optimizer, opt_level=level, **keywords)
        self.engine.overflows.evidence.begin()  # as an earlier overflow had it begin
        if self.engine.scalers[0].dynamic:
            self.engine.scalers[0].scale.fill_(256.0)  # which fits

    def backward(self, loss: Tensor | None = None, **keywords: Any) -> None:
        loss = self.model.loss(self.index) if loss is None else loss
        with self.engine.scale_loss(loss, self.optimizer, **keywords) as scaled_loss:
            scaled_loss.backward()
        self.index += 1

    def step(self, loss: Callable[[], Tensor] | None = None) -> None:
        self.backward(None if loss is None else loss())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> Run:
        for _ in range(count):
            self.step()
        return self

    def find(self, loss: Callable[[], Tensor] | None = None) -> list[str]:
        """Return what `find_overflow` says of a loss, or else of the batch of the newest step."""
        return [str(self.engine.find_overflow(loss or (lambda: self.model.loss(self.index))))]


@dataclass
class Case:
    """A fault: `plant` gives the texts to judge, or None for the first post-mortem of what was said."""

    name: str
    plant: Callable[[], list[str] | None]
    right: tuple[str, ...]
    wrong: tuple[str, ...]
    judges_all: bool


CASES: list[Case] = []


def fault(
    levels: str, right: Sequence[str], wrong: Sequence[str] = (), judges_all: bool = False, kinds: Sequence[Any] = ()
) -> Callable[[Any], Any]:
    """A fault at some levels, and of some kinds; in texts to be found "{0}" is the kind."""

    def add(plant: Callable[..., list[str] | None]) -> Callable[..., list[str] | None]:
        for level in levels.split():
            for kind in kinds or [()]:
                of = kind if isinstance(kind, tuple) else (kind,)
                name = " ".join([level, plant.__name__.replace("_", " "), *(f"[{one}]" for one in of[:1])])
                patterns = [tuple(one.format(*of) if of else one for one in some) for some in (right, wrong)]
                CASES.append(
                    Case(name, lambda plant=plant, level=level, of=of: plant(level, *of), *patterns, judges_all)
                )
        return plant

    return add


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what the engine says inside."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    lines: list[str] = []
    logger, handler = logging.getLogger("amp_engine"), Keep()
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])


def judged(case: Case) -> tuple[str, list[str]]:
    """ "right", "vague" or "wrong", and the texts that were judged."""
    torch.manual_seed(0)
    with heard() as lines, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            texts = case.plant()
        except Exception as error:
            return "broken", [repr(error), "".join(traceback.format_tb(error.__traceback__)[-6:])]
    if texts is None:
        texts = [line for line in lines if re.match("Amp (post-mortem|diagnosis)", line)]
        texts = texts if case.judges_all else texts[:1]
    text = "\n".join(texts)
    if any(re.search(one, text) for one in case.wrong):
        return "wrong", texts
    return "right" if all(re.search(one, text) for one in case.right) else "vague", texts


def times(factor: float) -> Callable[[Tensor], Tensor]:
    """Past the largest number of every type, and back to where a normalization does not show it."""
    return lambda x: x * factor * factor


def grow(module: Any, factor: float) -> None:
    with torch.no_grad():
        module.weight.mul_(factor)


# ---- data


@fault("O1 O2 O4 O5", [r"  data\."], [r"  (forward|backward|divergence|weights)\."], kinds=["nan", "inf"])
def a_batch_that_is_not_finite(level: str, kind: str) -> None:
    run = Run(level, ResNet()).steps(2)
    run.model.spoil = lambda x, y: (x.index_fill(0, torch.tensor(1), float(kind)), y)
    run.step()


@fault("O1 O2 O5", [r"  data\."], [r"  (forward|backward|divergence|weights)\.", "frozen"])
def a_target_that_is_nan(level: str) -> None:
    run = Run(level, Tagger()).steps(2)
    run.model.spoil = lambda x, y: (x, y * math.nan)
    run.step()


@fault("O2", [r"  data\."], [r"  (backward|divergence|weights)\."])
def an_input_beyond_float16(level: str) -> None:
    run = Run(level, ResNet()).steps(2)
    run.model.spoil = lambda x, y: (x + 1e5, y)
    run.step()


@fault(
    "O1 O2 O5",
    [r"  data\.", "[Mm]icro-batch 2 of 4", "nan"],
    [r"  (forward|backward|divergence|weights)\.", r"loss is \d"],
    kinds=["delay_unscale", "unscaled each time"],
)
def a_nan_in_an_accumulated_batch(level: str, kind: str) -> None:
    run = Run(level, Mlp()).steps(2)
    for micro in range(4):
        run.model.spoil = lambda x, y, bad=micro == 1: (x * math.nan if bad else x, y)
        run.backward(delay_unscale=kind == "delay_unscale" and micro < 3)
    run.optimizer.step()


@fault(
    "O1 O2",
    [r"  forward\.", "[Mm]icro-batch 1 of 3", r"blocks\.2|exp"],
    [r"  (data|backward|divergence|weights)\.", r"loss is \d"],
)
def an_overflow_in_an_accumulated_batch(level: str) -> None:
    run = Run(level, Gpt()).steps(2)
    for micro in range(3):
        run.model.blocks[2].planted = (lambda x: (x.float() * 1e4).exp().to(x.dtype)) if micro == 0 else same
        run.backward(delay_unscale=micro < 2)
    run.optimizer.step()


@fault("O1 O2", ["backward", "[Mm]icro-batch 2 of 3"], [r"  (data|forward|divergence|weights)\."])
def a_backward_that_fails_in_an_accumulated_batch(level: str) -> None:
    run = Run(level, Gpt()).steps(2)
    for micro in range(3):
        run.model.blocks[2].planted = BadBackward.apply if micro == 1 else same
        run.backward()
    run.optimizer.step()


@fault("O1 O2 O4", ["not trained", "enc"], [r"  (backward|divergence|weights)\.", "^[^(]*look at the batch[^,]*$"])
def a_frozen_part_that_overflows(level: str) -> None:
    model = Mlp(same)
    model.enc.requires_grad_(False)
    run = Run(level, model, trained=[*model.mid.parameters(), *model.dec.parameters()]).steps(2)
    with torch.no_grad():
        model.enc.bias.fill_(6e4 if level != "O4" else 3e38)
        model.enc.weight.fill_(6e4 if level != "O4" else 3e38)
    model.enc.register_forward_hook(lambda module, args, output: output - output)
    run.step()


@fault("O1 O2", ["without gradients"], [r"  (backward|divergence|weights)\."])
def a_teacher_that_overflows(level: str) -> None:
    teacher, student = Mlp(), Mlp()
    run = Run(level, student).steps(2)
    grow(teacher.mid, 1e38)
    grow(teacher.dec, 1e38)
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        wanted = teacher(x).float()
    run.step(lambda: F.mse_loss(student(x).float(), wanted))


@fault("O1 O2 O5", ["^forward", "nll_loss"], ["^data|^backward"])
def find_overflow_where_all_targets_are_ignored(level: str) -> list[str]:
    run = Run(level, Gpt()).steps(2)
    tokens, targets = torch.zeros(2, LENGTH, dtype=torch.long), torch.full((2 * LENGTH,), -100)
    return run.find(lambda: F.cross_entropy(run.model(tokens).float().view(-1, WORDS), targets))


# ---- forward


@fault(
    "O1 O2",
    [r"  forward\.", r"blocks\.1\.|blocks\.{0}"],
    [r"  (data|backward|divergence|weights)\.", r"blocks\.3|head"],
    kinds=[1, 2],
)
def a_block_whose_weights_have_grown(level: str, block: int) -> None:
    run = Run(level, Gpt()).steps(2)
    grow(run.model.blocks[block].fc, 3e3)
    grow(run.model.blocks[block].proj, 3e3)
    if level == "O2":
        for master, param in zip(run.engine.master_params(run.optimizer), run.model.parameters(), strict=True):
            master.data.copy_(param)
    run.step()


@fault(
    "O1 O2",
    [r"  forward\.", r"attention\.(q|k)", "bmm"],
    [r"softmax \(|softmax, at", r"attention\.v|attention\.out", "  backward"],
)
def scores_without_a_scale(level: str) -> None:
    run = Run(level, Gpt()).steps(2)
    attention = run.model.blocks[1].attention
    attention.scale = 1.0
    grow(attention.q, 1e3)
    grow(attention.k, 1e3)
    run.step()


@fault(
    "O1 O2",
    [r"  forward\.", r"layer2\.conv1"],
    [r"layer1|stem|layer2\.conv2|fc", r"  (data|backward|divergence|weights)\."],
)
def a_convolution_before_a_batch_norm(level: str) -> None:
    run = Run(level, ResNet()).steps(2)
    with torch.no_grad():
        run.model.layer2.conv1.weight.fill_(6e4)
    run.step()


@fault("O2", [r"pow of numbers", "float16"], ["use bfloat16"], judges_all=True)
def a_norm_whose_squares_overflow(level: str) -> None:
    run = Run(level, Llama()).steps(2)
    with torch.no_grad():
        run.model.blocks[1].proj.bias.fill_(500.0)
    run.engine.scalers[0].scale.fill_(2.0**18)
    run.steps(3)


@fault("O1 O2 O4 O5", [r"  forward\.", "exp", "tags"], [r"  (data|backward|divergence|weights)\."])
def an_exp_of_something_large(level: str) -> None:
    run = Run(level, Tagger()).steps(2)
    run.model.factor = 1e5
    run.step()


FORWARD = {
    "log of 0": lambda x: x.float().relu().log(),
    "log of negative numbers": lambda x: (-x.float().abs() - 1.0).log(),
    "div by 0": lambda x: torch.ones_like(x).float() / x.float().relu(),
    "rsqrt of 0": lambda x: x.float().relu().rsqrt(),
    "reciprocal of 0": lambda x: x.float().relu().reciprocal(),
    "pow of 0": lambda x: x.float().relu().pow(-2.0),
    "sqrt of negative numbers": lambda x: (-x.float().abs() - 1.0).sqrt(),
    "0 log 0": lambda x: x.float().relu() * x.float().relu().log(),
    "acos of numbers beyond 1": lambda x: (x.float().abs() + 1.5).acos(),
    "constant / std": lambda x: (x.float() * 0.0) / (x.float() * 0.0).std(),
    "logit of 1": lambda x: ((x * 0.0).float() + 1.0).logit(),
    "atanh of 1": lambda x: ((x * 0.0).float() + 1.0).atanh(),
    "exp": lambda x: (x.float().abs() * 1e6 + 1e3).exp(),
}
SAYS = {"0 log 0": "log of 0", "constant / std": "div by 0"}


@fault(
    "O1 O2",
    [r"  forward\.", "{1}"],
    [r"  (data|backward|divergence|weights)\.", "near enc|dec"],
    kinds=[(kind, SAYS.get(kind, kind)) for kind in FORWARD],
)
def an_operation_at_a_bad_value(level: str, kind: str, says: str) -> None:
    run = Run(level, Mlp()).steps(2)
    run.model.between = lambda x: FORWARD[kind](x).to(x.dtype)
    run.step()


@fault(
    "O2",
    [r"  forward\.", "{1}"],
    [r"  (data|backward|divergence|weights)\."],
    kinds=[("normalize", "div by 0"), ("sum", "sum")],
)
def an_operation_in_half(level: str, kind: str, says: str) -> None:
    run = Run(level, Mlp()).steps(2)
    run.model.between = lambda x: F.normalize(x * 0.0) if kind == "normalize" else x + (x * 0.0 + 6e4).sum() * 0.0
    run.step()


@fault("O1 O2 O5", [r"-inf", "row|all"], [r"  (data|backward|divergence|weights)\."], kinds=["by hand", "torch"])
def a_mask_that_leaves_nothing(level: str, kind: str) -> None:
    if kind == "by hand":
        run = Run(level, Gpt()).steps(2)
        mask = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
        mask[1, 2] = True
        run.model.blocks[2].attention.mask = mask
        run.step()
        return
    torch.backends.mha.set_fastpath_enabled(False)
    model = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    run = Run(level, model)
    mask = torch.zeros(4, LENGTH, dtype=torch.bool)
    mask[1] = True
    x = torch.randn(4, LENGTH, WIDTH)
    run.step(lambda: model(x, x, x, key_padding_mask=mask)[0].float().square().mean())


# ---- backward

STEEP = {
    "sqrt of 0": lambda x: (x.float() * 0.0).sqrt(),
    "acos of 1": lambda x: ((x.float() * 0.0) + 1.0).acos(),
    "pow of 0": lambda x: (x.float() * 0.0).abs().pow(0.5),
    "where around log": lambda x: torch.where(x.float() * 0 > 1, (x.float() * 0.0).log(), x.float()),
    "where around div": lambda x: torch.where(x.float() * 0 > 1, 1.0 / (x.float() * 0.0), x.float()),
    "norm at 0": lambda x: (x.float() * 0.0).square().sum(-1, keepdim=True).sqrt() + x.float(),
}
SAYS_STEEP = {
    "where around log": "log of 0",
    "where around div": "div by 0",
    "norm at 0": "sqrt of 0",
}


@fault(
    "O1 O2 O5",
    ["{1}", "eps|clamp|where"],
    [r"  (data|divergence|weights)\.", r"or use bfloat16 \(opt_level='O4' or 'O5'\)\.$"],
    judges_all=True,
    kinds=[(kind, SAYS_STEEP.get(kind, kind)) for kind in STEEP],
)
def a_derivative_that_is_not_defined(level: str, kind: str, says: str) -> None:
    run = Run(level, Mlp()).steps(2)
    run.model.between = lambda x: STEEP[kind](x).to(x.dtype)
    run.steps(9)


@fault(
    "O1 O2 O4 O5",
    [r"  backward\.", r"blocks\.2\.proj"],
    [r"  (data|forward|divergence|weights)\.", r"blocks\.3|head|embed"],
)
def a_function_whose_backward_is_wrong(level: str) -> None:
    run = Run(level, Gpt()).steps(2)
    run.model.blocks[2].planted = BadBackward.apply
    run.step()


@fault("O1 O2", [r"  backward\.", "mid"], [r"  (data|forward|divergence|weights)\.", "gradient of dec"])
def a_hook_on_a_gradient(level: str) -> None:
    run = Run(level, Mlp()).steps(2)

    def hooked(x: Tensor) -> Tensor:
        x = x * 1.0
        x.register_hook(lambda grad: grad / 0.0)
        return x

    run.model.between = hooked
    run.step()


@fault("O1 O2", [r"  backward\.", "grown|times", "1e\\+3|e\\+30"], [r"  (data|forward|divergence|weights)\."])
def a_loss_that_is_too_large(level: str) -> None:
    run = Run(level, Gpt()).steps(20)
    run.step(lambda: run.model.loss(20) * 1e30)


@fault("O1 O2", ["nearly found|[Nn]othing to do"], ["or use bfloat16"], judges_all=True, kinds=[2.0**40, 2.0**60])
def a_scale_that_is_searched(level: str, scale: float) -> None:
    run = Run(level, Mlp())
    run.engine.scalers[0].scale.fill_(scale)
    run.steps(9)


@fault("O1 O2", [r"  backward\.", "scale"], [r"  (data|forward|divergence|weights)\."])
def a_static_scale_that_is_too_large(level: str) -> None:
    Run(level, Mlp(), loss_scale=2.0**70).steps(1)


# ---- divergence


@fault(
    "O1 O2 O4 O5",
    ["diverge"],
    [r"  (data|weights)\.", "use bfloat16"],
    judges_all=True,
    kinds=["mlp", "resnet", "tagger"],
)
def a_learning_rate_that_is_too_high(level: str, kind: str) -> None:
    model, lr = {"mlp": (Mlp(), 30.0), "resnet": (ResNet(), 30.0), "tagger": (Tagger(), 300.0)}[kind]
    run = Run(level, model, lr=lr)
    if kind == "mlp":
        model.between = same
    run.steps(40)


@fault("O1 O2", ["grown", "diverge"], [r"  (data|weights)\.", "use bfloat16"])
def losses_that_jump_and_stay(level: str) -> None:
    run = Run(level, Mlp()).steps(20)
    for _ in range(9):
        run.step(lambda: run.model.loss(0) / run.model.loss(0).detach() * 6e4)


@fault("O1 O2", ["divergence|grown", "learning rate"], [r"  (data|weights)\."])
def a_gan_whose_critic_diverges(level: str) -> None:
    generator, critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    optimizers = [torch.optim.SGD(generator.parameters(), lr=1e-3), torch.optim.SGD(critic.parameters(), lr=0.5)]
    engine = Engine()
    engine.initialize([generator, critic], optimizers, opt_level=level, num_losses=2)
    for scaler in engine.scalers:
        scaler.scale.fill_(256.0)
    real = torch.randn(8, WIDTH) + 1.0
    for _ in range(40):
        fake = generator(torch.randn(8, WIDTH)).detach()
        loss = critic(fake).float().square().mean() - critic(real).float().pow(2).mean() * 2.0
        for optimizer, one, loss_id in ((optimizers[1], loss, 1), (optimizers[0], None, 0)):
            one = critic(generator(torch.randn(8, WIDTH))).float().mean() if one is None else one
            with engine.scale_loss(one, optimizer, loss_id=loss_id) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            [each.zero_grad() for each in optimizers]


# ---- weights and buffers


@fault("O1 O2 O4 O5", [r"  weights\.", "mid.weight"], [r"  (data|forward|backward|divergence)\."])
def a_weight_that_is_nan(level: str) -> None:
    run = Run(level, Mlp()).steps(2)
    with torch.no_grad():
        for weight in run.engine.master_params(run.optimizer):
            if weight.shape == (WIDTH, WIDTH):
                last = weight
        last[0, 0] = math.nan
    run.steps(2)


@fault("O2", [r"  weights\.", "dec.weight"], [r"  (data|forward|backward|divergence)\."])
def a_master_beyond_float16(level: str) -> None:
    run = Run(level, Mlp()).steps(2)
    with torch.no_grad():
        next(w for w in run.engine.master_params(run.optimizer) if w.shape == (1, WIDTH)).fill_(1e5)
    run.steps(2)


# ---- checkpointed, tied, gathered


@fault(
    "O1 O2 O5",
    [r"  forward\.", "checkpointed"],
    [r"  (data|backward|divergence|weights)\.", r"(at or after|in) (blocks\.[013]|head)", r"after embed\.weight[ ,.]"],
    kinds=["reentrant", "not reentrant"],
)
def a_checkpointed_block_that_overflows(level: str, kind: str) -> None:
    run = Run(level, Gpt(checkpoint=kind)).steps(2)
    run.model.blocks[2].planted = lambda x: (x.float() * 1e6).exp().exp().to(x.dtype)
    run.step()


@fault(
    "O1 O2",
    [r"  backward\.", r"blocks\.2\.proj|checkpointed"],
    [r"  (data|forward|divergence|weights)\.", r"gradient of (blocks\.[3]|head|embed|blocks\.[01])"],
    kinds=["reentrant", "not reentrant"],
)
def a_checkpointed_block_whose_backward_is_wrong(level: str, kind: str) -> None:
    run = Run(level, Gpt(checkpoint=kind)).steps(2)
    run.model.blocks[2].planted = BadBackward.apply
    run.step()


@fault(
    "O1 O2",
    [r"  forward\.", r"head\.weight"],
    [r"  (data|backward|divergence|weights)\.", r"after embed\.weight([.,]| [^=])"],
)
def a_tied_head_that_overflows(level: str) -> None:
    run = Run(level, Gpt(tied=True)).steps(2)
    run.model.head.register_forward_hook(lambda module, args, output: (output.float() * 1e6).exp().exp())
    run.step()


@fault(
    "O1 O2",
    [r"  backward\.", r"head\.weight"],
    [r"  (data|forward|divergence|weights)\.", "gradient of embed.weight \\("],
)
def a_tied_head_whose_backward_is_wrong(level: str) -> None:
    run = Run(level, Gpt(tied=True)).steps(2)
    run.model.head.register_forward_hook(lambda module, args, output: BadBackward.apply(output))
    run.step()


@fault("O1", ["zero_grad"], [r"  (data|forward|backward|divergence|weights)\."], judges_all=True)
def gradients_that_are_kept_after_a_skip(level: str) -> None:
    run = Run(level, Mlp())
    run.model.between = BadBackward.apply
    run.backward()
    run.optimizer.step()
    run.model.between = torch.relu
    for _ in range(3):
        run.backward()
        run.optimizer.step()
    raise_first(run)


def raise_first(run: Run) -> None:
    """The first is the planted one; what is judged comes behind it."""
    logger = logging.getLogger("amp_engine")
    (handler,) = logger.handlers
    report = run.engine.overflow_report()
    lines = handler.emit.__closure__[0].cell_contents  # type: ignore[attr-defined]
    lines[:] = [str(report[-1])]


# ---- find_overflow


@fault("O1 O2 O4", ["^data", r"\(ResNet\)|stem"], ["buffers|forward|backward"])
def find_overflow_of_a_batch(level: str) -> list[str]:
    run = Run(level, ResNet()).steps(2)
    x = torch.full(run.model.shape, math.nan)
    return run.find(lambda: run.model(x).float().mean())


@fault("O1 O2", ["^buffers", "running_mean"], ["^data|^forward"])
def find_overflow_of_running_statistics(level: str) -> list[str]:
    run = Run(level, ResNet()).steps(2)
    run.model.layer1.bn1.running_mean.fill_(math.nan)
    return run.find()


@fault("O1 O2", ["^forward", r"blocks\.2"], [r"blocks\.[013]|head|embed"], kinds=["reentrant", "not reentrant"])
def find_overflow_of_a_checkpointed_block(level: str, kind: str) -> list[str]:
    run = Run(level, Gpt(checkpoint=kind)).steps(2)
    run.model.blocks[2].planted = lambda x: (x.float() * 1e6).exp().exp().to(x.dtype)
    return run.find()


@fault("O1 O2", ["^forward", "softmax", "-inf"], ["^data|^backward"])
def find_overflow_of_a_mask_that_leaves_nothing(level: str) -> list[str]:
    run = Run(level, Gpt()).steps(2)
    mask = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
    mask[1, 2] = True
    run.model.blocks[2].attention.mask = mask
    return run.find()


# ---- ranks


def said_on_rank(rank: int, kind: str) -> list[str]:
    """Return what a rank of two says of a fault on rank 1."""
    torch.manual_seed(0)
    with heard() as lines, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(kind[:2], Mlp())
        wrapped = DistributedDataParallel(run.model)
        for index in range(3):
            x = torch.randn(4, WIDTH)
            if index == 2 and rank == 1 and "batch" in kind:
                x = x * math.nan
            if index == 2 and rank == 1 and "forward" in kind:
                run.model.between = lambda x: x.float().exp().mul(1e30).mul(1e30).to(x.dtype)
            loss = wrapped(x).float().square().mean()
            if index == 2 and rank == 1 and "loss" in kind:
                loss = loss * 1e38
            with run.engine.scale_loss(loss, run.optimizer) as scaled_loss:
                scaled_loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    return [f"[{rank}] {line}" for line in lines if line.startswith("Amp post-mortem")]


@fault(
    "ranks",
    ["rank 1 of 2", "{1}"],
    [r"\[\d\] Amp post-mortem:  ({2})"],
    kinds=[
        ("O1 loss", r"rank 0's \d", "data|forward|divergence"),
        ("O2 loss", r"rank 0's \d", "data|forward|divergence"),
        ("O2 batch", r"data.*nan", "forward|backward|divergence"),
        ("O1 forward", "forward.*mid", "data|backward|divergence"),
    ],
)
def a_fault_of_one_rank(level: str, kind: str, *of: str) -> list[str]:
    return [line for lines in on_ranks(partial(said_on_rank, kind=kind), 2) for line in lines]


def main() -> None:
    """Plant all faults, or those that have all of the words in their names; print verdicts and lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("-v", "--verbose", action="store_true", help="lines of right ones, too")
    arguments = parser.parse_args()
    begin, counts = time.perf_counter(), Counter[str]()
    for case in CASES:
        if not all(word in case.name for word in arguments.words):
            continue
        verdict, texts = judged(case)
        counts[verdict] += 1
        if verdict != "right" or arguments.verbose:
            print(f"{verdict:6} {case.name}")
            for text in texts or ["(nothing was said)"]:
                print(f"           {text}")
            sys.stdout.flush()
    total = max(sum(counts.values()), 1)
    shares = ", ".join(
        f"{counts[one]} {one} ({100 * counts[one] / total:.0f} %)" for one in ("right", "vague", "wrong")
    )
    print(f"{total} faults: {shares}; {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
