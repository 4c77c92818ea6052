"""``make demo``: three small models on real data, trained at every level and in pure bfloat16."""
