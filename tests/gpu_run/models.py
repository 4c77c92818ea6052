"""The models that are trained, with the shapes of their batches: GPT, BERT of transformers, ResNet-50 of timm.

Weights are random. GPT is that of examples/demo, which needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from examples.demo.models import GPT

VOCABULARY, TINY = 50_304, 64  # of GPT; of a tiny one


class Logits(nn.Module):
    """A model of transformers, token ids [N, T] -> logits [N, T, vocabulary]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits


@dataclass(frozen=True)
class Example:
    """A model and its batch.

    Attributes:
        name: of the model.
        unit: what is counted, tokens or images.
        count: of these in a batch.
        model: makes it.
        batch: inputs and targets.
        block: the kind of its equal parts, which are compiled, or are units of FSDP2, each by itself.
        lr: with which it is trained.
        clips: whether gradients are clipped.
    """

    name: str
    unit: str
    count: int
    model: Callable[[], nn.Module]
    batch: Callable[[torch.device], tuple[Tensor, Tensor]]
    block: type[nn.Module] | None = None
    lr: float = 1e-4
    clips: bool = True


def texts(vocabulary: int, n: int, length: int) -> Callable[[torch.device], tuple[Tensor, Tensor]]:
    """Random text and, as targets, the same text one on."""

    def batch(device: torch.device) -> tuple[Tensor, Tensor]:
        ids = torch.randint(vocabulary, (n, length + 1), device=device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return batch


def images(n: int, size: int) -> Callable[[torch.device], tuple[Tensor, Tensor]]:
    """Random images and labels."""

    def batch(device: torch.device) -> tuple[Tensor, Tensor]:
        pictures = torch.randn(n, 3, size, size, device=device).to(memory_format=torch.channels_last)
        return pictures, torch.randint(1000, (n,), device=device)

    return batch


def gpt(name: str, vocabulary: int, width: int, layers: int, n: int, length: int, heads: int) -> Example:
    """GPT on `n` texts."""
    block = type(GPT(2, 2, 1, 4, 1).blocks[0])
    make = lambda: GPT(vocabulary, length, layers, width, heads)  # noqa: E731
    return Example(name, "tokens", n * length, make, texts(vocabulary, n, length), block)


def gpt_124m(n: int, tiny: bool) -> Example:
    """GPT of 124 million parameters on `n` texts, or a tiny one."""
    if tiny:
        return gpt("GPT", TINY, 8, 2, n=2, length=8, heads=2)
    return gpt(f"GPT, 124M parameters, {n} x 1024 tokens", VOCABULARY, 768, 12, n=n, length=1024, heads=12)


def bert(tiny: bool) -> Example:
    """BERT-base, or a tiny one.

    While a stream is captured transformers gives torch's attention a mask of ones, 5.24 only where it is passed one.
    Flash attention and cuDNN's do not take it. An attention of another name gets no mask.
    """
    from transformers import AttentionInterface, BertConfig, BertForMaskedLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.bert.modeling_bert import BertLayer

    AttentionInterface.register("unmasked", sdpa_attention_forward)
    small = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(attn_implementation="unmasked", **({"vocab_size": 100, **small} if tiny else {}))
    n, length = (2, 8) if tiny else (32, 512)
    name = "BERT, 2 x 8 tokens" if tiny else "BERT-base, 110M parameters, 32 x 512 tokens"
    make = lambda: Logits(BertForMaskedLM(config))  # noqa: E731
    return Example(name, "tokens", n * length, make, texts(config.vocab_size, n, length), BertLayer)


def resnet(tiny: bool) -> Example:
    """ResNet-50, or the smaller 18 on tiny images."""
    import timm

    kind, n, size = ("resnet18", 2, 32) if tiny else ("resnet50", 256, 224)
    return Example(f"{kind}, {n} images", "images", n, lambda: timm.create_model(kind), images(n, size))


def examples(tiny: bool) -> Iterator[Example]:
    """BERT where transformers is, GPT, ResNet where timm is."""
    if find_spec("transformers"):
        yield bert(tiny)
    yield gpt_124m(16, tiny)
    if find_spec("timm"):
        yield resnet(tiny)
