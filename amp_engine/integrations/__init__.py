"""Training through other people's loops: a module for each framework, importable where the framework is installed."""
