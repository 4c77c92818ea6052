"""The two models: a convolutional net with batch norm, and a small GPT."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DigitsCNN(nn.Module):
    """Images [B, 1, 8, 8] -> logits [B, 10]."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(2 * channels * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


# Shapes: B = batch, T = time, D = width of the model, H = heads.
class Block(nn.Module):
    """Pre-norm attention and MLP, [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm_2(x))))

    def attention(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in qkv)  # [B, H, T, D/H]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Character ids [B, T] -> logits [B, T, vocabulary]; the embedding is also the output layer."""

    def __init__(self, vocabulary: int, length: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token_embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # std = fan_in^-0.5, and less where 2 * layers outputs add up
                residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                fan_in = parameter.shape[1] * (2 * layers if residual else 1)
                nn.init.normal_(parameter, std=fan_in**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        position = torch.arange(ids.shape[1], device=ids.device)
        x = self.token_embedding(ids) + self.position_embedding(position)
        return self.head(self.norm(self.blocks(x)))
