"""`apex.parallel.optimized_sync_batchnorm`: batch norm over the batches of all ranks, on torch's SyncBatchNorm."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from amp_engine.errors import AmpValueError
from amp_engine.ground.distributed import has_ranks
from amp_engine.ground.torch_private import BatchNormBase


class SyncBatchNorm(BatchNormBase):
    """torch's SyncBatchNorm with apex's arguments, and on CPUs too, which torch's does not support.

    As in apex, it is no subclass of torch's, which DistributedDataParallel refuses on a CPU.

    Args:
        num_features: channels.
        eps: added to the variance.
        momentum: of the running statistics; None averages all batches.
        affine: adds a weight and a bias.
        track_running_stats: keeps running statistics for evaluation.
        process_group: the ranks that share statistics; None: all.
        channel_last: the channels are the last dimension of input and output, as in shape [N, H, W, C]. Not needed for
            tensors of shape [N, C, H, W] in torch.channels_last.
        fuse_relu: applies a ReLU to the output.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def extra_repr(self) -> str:
        """Return torch's text with apex's arguments."""
        return f"{super().extra_repr()}, channel_last={self.channel_last}, fuse_relu={self.fuse_relu}"

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize `input`; add `z`, of the same shape, before the ReLU.

        Args:
            input: shape [N, C, ...], or [N, ..., C] with `channel_last`; on a GPU also in half with float32 parameters.
            z: None adds nothing.
        """
        normalized = self._normalized(input.movedim(-1, 1) if self.channel_last else input)
        if self.channel_last:
            normalized = normalized.movedim(1, -1)
        if z is not None:
            normalized = normalized + z
        return F.relu(normalized) if self.fuse_relu else normalized

    # torch's forward calls these two.

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise AmpValueError(
                f"SyncBatchNorm got an input of shape {tuple(input.shape)}, but takes [N, C, ...], or [N, ..., C] with "
                "channel_last=True."
            )

    def _check_non_zero_input_channels(self, input: Tensor) -> None:
        if input.size(1) == 0:
            raise AmpValueError(f"SyncBatchNorm got an input of shape {tuple(input.shape)}, which has no channels.")

    def _normalized(self, input: Tensor) -> Tensor:
        if not (self.training and input.is_cpu and has_ranks()):
            return nn.SyncBatchNorm.forward(self, input)  # type: ignore[arg-type]
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        return self._normalized_over_cpu_ranks(input)

    def _normalized_over_cpu_ranks(self, input: Tensor) -> Tensor:
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        others = [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        count = values.new_full((1,), input.numel() / input.size(1))
        sums = _Sum.apply(torch.cat([values.sum(others), count]), self.process_group)
        total = sums[-1]
        mean = sums[:-1] / total
        # The variance is a second sum, since E[x^2] - E[x]^2 loses a small variance to rounding if the mean is large.
        centered = values - mean.view(shape)
        var = _Sum.apply(centered.square().sum(others), self.process_group) / total
        self._track(mean.detach(), var.detach(), total.detach())
        result = centered * torch.rsqrt(var + self.eps).view(shape)
        if self.weight is not None:
            result = result * self.weight.view(shape)
        if self.bias is not None:
            result = result + self.bias.view(shape)
        return result.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        unbiased = var * (count / (count - 1).clamp(min=1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _Sum(torch.autograd.Function):
    """Sum over ranks, forward and backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        summed = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        summed = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None
