"""Facts about torch, tensors and containers that every room uses."""
