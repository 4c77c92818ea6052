"""Reports of an engine's state and of measurements; records are separate from their rendering."""
