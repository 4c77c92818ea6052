"""From the arguments of `initialize` to cast models and stepped optimizers."""
