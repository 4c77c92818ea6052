"""`apex.mlp.mlp`."""

from collections.abc import Sequence
from itertools import pairwise, zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_engine.errors import AmpValueError

_ACTIVATIONS = ("none", "relu", "sigmoid")


class MLP(nn.Module):
    """Linear layers, each followed by the activation, also the last.

    Parameters are `weight_0`, `bias_0`, `weight_1`, ..., of torch.nn.Linear's shapes and initial values. Under O1 and
    O4 all layers run in low precision.

    Args:
        mlp_sizes: features of the input, then of the output of each layer: `[8, 16, 4]` makes two layers.
        bias: gives each layer a bias.
        activation: "relu", "sigmoid" or "none".

    Raises AmpValueError for another activation, and for fewer than two sizes.
    """

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise AmpValueError(f"activation is {activation!r}; it may be {', '.join(map(repr, _ACTIVATIONS))}.")
        if len(mlp_sizes) < 2:
            raise AmpValueError(f"mlp_sizes is {mlp_sizes!r}; it names at least the input's size and the output's.")
        self.mlp_sizes = list(mlp_sizes)
        self.num_layers = len(mlp_sizes) - 1
        self.bias = bias
        self.activation = activation
        for i, (n_in, n_out) in enumerate(pairwise(mlp_sizes)):
            self.register_parameter(f"weight_{i}", nn.Parameter(torch.empty(n_out, n_in)))
            if bias:
                self.register_parameter(f"bias_{i}", nn.Parameter(torch.empty(n_out)))
        self.reset_parameters()

    @property
    def weights(self) -> list[Tensor]:
        """The weight of each layer, of shape `(out, in)`."""
        return [self.get_parameter(f"weight_{i}") for i in range(self.num_layers)]

    @property
    def biases(self) -> list[Tensor]:
        """The bias of each layer, of shape `(out,)`; empty without bias."""
        return [self.get_parameter(f"bias_{i}") for i in range(self.num_layers)] if self.bias else []

    def reset_parameters(self) -> None:
        """Draw initial values as torch.nn.Linear does: uniform within 1/sqrt(in)."""
        for i, weight in enumerate(self.weights):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            if self.bias:
                nn.init.uniform_(self.biases[i], -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        """Map an input of shape `(*, mlp_sizes[0])` to an output of shape `(*, mlp_sizes[-1])`."""
        for weight, bias in zip_longest(self.weights, self.biases):
            input = F.linear(input, weight, bias)
            if self.activation != "none":
                input = torch.relu(input) if self.activation == "relu" else torch.sigmoid(input)
        return input

    def extra_repr(self) -> str:
        """The arguments."""
        return f"mlp_sizes={self.mlp_sizes}, bias={self.bias}, activation={self.activation!r}"
