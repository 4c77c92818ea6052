"""Policies, the levels that name them, files that keep them."""
