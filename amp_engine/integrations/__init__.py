"""Training in the loops of other frameworks: a module for each, importable if the framework is installed."""
