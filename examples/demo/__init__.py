"""``make demo``: two small models on real data, trained at every level."""
