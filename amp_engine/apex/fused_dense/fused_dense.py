"""`apex.fused_dense.fused_dense`, on `F.linear`, which torch gives to cuBLASLt with the bias fused."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedDense(nn.Linear):
    """torch.nn.Linear under apex's name."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)


class FusedDenseGeluDense(nn.Module):
    """Linear, GELU, linear.

    The GELU is the approximation by tanh, as in cuBLASLt's epilogue, which apex used.

    Parameters are `weight1` and `weight2` of shapes `(intermediate, in)` and `(out, intermediate)`, `bias1` and `bias2`
    (None without bias), with torch.nn.Linear's initial values. Under O1 and O4 the linear layers run in low precision
    and the GELU in float32.
    """

    weight1: nn.Parameter
    weight2: nn.Parameter
    bias1: nn.Parameter | None
    bias2: nn.Parameter | None

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        for i, n_in, n_out in ((1, in_features, intermediate_features), (2, intermediate_features, out_features)):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.empty(n_out, n_in)))
            self.register_parameter(f"bias{i}", nn.Parameter(torch.empty(n_out)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values as torch.nn.Linear does: uniform within 1/sqrt(in)."""
        for weight, bias in ((self.weight1, self.bias1), (self.weight2, self.bias2)):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        """Map an input of shape `(*, in_features)` to an output of shape `(*, out_features)`."""
        hidden = F.gelu(F.linear(input, self.weight1, self.bias1), approximate="tanh")
        return F.linear(hidden, self.weight2, self.bias2)

    def extra_repr(self) -> str:
        """The arguments."""
        return (
            f"in_features={self.in_features}, intermediate_features={self.intermediate_features}, "
            f"out_features={self.out_features}, bias={self.bias1 is not None}"
        )
