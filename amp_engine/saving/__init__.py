"""Checkpoints: files, loss scalers, and training state by the names of parameters."""
