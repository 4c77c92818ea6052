"""One optimizer: its masters, the gradients around a backward, and the step."""
