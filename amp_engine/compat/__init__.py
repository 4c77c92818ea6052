"""The faces of apex that the core does not need: its private state, and its older interface."""
