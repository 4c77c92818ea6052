"""float16 for reinforcement learning: how far the trainer's log-probabilities are from the sampler's, by level.

    python -m examples.float16_for_rl
    torchrun --standalone --nproc-per-node 2 examples/float16_for_rl.py     # the trainer in shards, by FSDP2

A small GPT learns to count by a policy gradient; the baseline is the mean reward of the answers to a prompt, as in
GRPO. The sampler is a copy in the level's type that generates token by token with a cache; the trainer computes whole
sequences. The program prints, for FP32 (O0), bfloat16 (O5) and float16 (O2): the mean and the largest gap of the
sampled tokens, |log p of the trainer - log p of the sampler|; the mean reward, 0 to 1, of the first four steps and of
the last four; skipped steps; the loss scale. Of several ranks the first prints its own numbers.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from amp_engine import amp

parser = argparse.ArgumentParser(description="The gap between trainer and sampler, by level.")
parser.add_argument("--steps", type=int, default=30, help="default: %(default)s")
steps = parser.parse_args().steps

TYPES = {"O0": torch.float32, "O5": torch.bfloat16, "O2": torch.float16}
VOCABULARY, LENGTH, WIDTH, HEADS = 12, 12, 64, 4
PROMPTS, ANSWERS = 8, 8  # per step and rank

rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
Cache = dict[nn.Module, tuple[Tensor, Tensor]]  # keys and values of each block


# Shapes: B = sequences, T = tokens, D = width, H = heads.
class Block(nn.Module):
    """Attention and MLP, [B, T, D] -> [B, T, D]; with a cache, T is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm_2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D/H]
        if cache is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            if self in cache:
                k, v = (torch.cat([old, new], dim=2) for old, new in zip(cache[self], (k, v), strict=True))
            cache[self] = k, v
            mixed = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Policy(nn.Module):
    """Tokens [B, T], from position `start` on, -> log p of the token after each [B, T, VOCABULARY], in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, start: int = 0, cache: Cache | None = None) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(start, start + ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, cache)
        return self.head(self.norm(x)).float().log_softmax(-1)


@torch.no_grad()
def sample(sampler: Policy) -> tuple[Tensor, Tensor]:
    """Sequences [B, LENGTH], and log p of all tokens but the first of each, the prompt [B, LENGTH - 1]."""
    ids = torch.randint(VOCABULARY, (PROMPTS, 1), device=device).repeat_interleave(ANSWERS, dim=0)
    log_ps, cache = [], Cache()
    for position in range(LENGTH - 1):
        log_p = sampler(ids[:, -1:], position, cache)[:, 0]
        token = log_p.exp().multinomial(1)
        ids = torch.cat([ids, token], dim=1)
        log_ps.append(log_p.gather(1, token))
    return ids, torch.cat(log_ps, dim=1)


def train(level: str) -> None:
    torch.manual_seed(0)
    model, sampler = Policy().to(device), Policy().to(device, TYPES[level])
    if ranks > 1:
        for block in model.blocks:
            fully_shard(block, mp_policy=amp.fsdp_policy(level))
        fully_shard(model, mp_policy=amp.fsdp_policy(level, root=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scale = "auto" if level == "O2" else None
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)

    torch.manual_seed(1 + rank)  # other samples on each rank
    gaps, rewards = [], []
    for _ in range(steps):
        weights = amp.export_state_dict(model, TYPES[level])  # a sharded model gives shards
        sampler.load_state_dict({n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in weights.items()})
        ids, sampler_log_p = sample(sampler)
        reward = (ids[:, 1:] == (ids[:, :-1] + 1) % VOCABULARY).float().mean(1)  # share of tokens that count up
        answers = reward.view(PROMPTS, ANSWERS)
        advantage = (answers - answers.mean(1, keepdim=True)).view(-1, 1)

        log_p = model(ids[:, :-1]).gather(2, ids[:, 1:, None]).squeeze(2)
        ratio = (log_p - sampler_log_p).exp()  # 1 if there were no gap
        with amp.scale_loss(-(ratio * advantage).mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        amp.clip_grad_norm_(optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        gaps.append((log_p.detach() - sampler_log_p).abs())
        rewards.append(reward)

    gap, reward, told = torch.stack(gaps), torch.stack(rewards), amp.scalars()
    amp.close()
    if rank == 0:
        print(f"{level} {TYPES[level]!s:14}  gap {gap.mean():.1e}, at most {gap.max():.1e}", end="  ")
        print(f"reward {reward[:4].mean():.2f}, at the end {reward[-4:].mean():.2f}", end="  ")
        print(f"{told['amp/skipped_steps']:.0f} skips, scale {told['amp/loss_scale']:.0f}", flush=True)


if ranks > 1:
    dist.init_process_group("nccl" if cuda else "gloo")
for level in TYPES:
    train(level)
if ranks > 1:
    dist.destroy_process_group()
    if not cuda:
        os._exit(0)  # threads of Gloo can abort Python at its end: https://github.com/pytorch/pytorch/issues/56297
