"""`apex.mlp`."""

from amp_engine.apex.mlp.mlp import MLP as MLP

__all__ = ["MLP"]
