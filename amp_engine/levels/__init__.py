"""Policies, the levels that name them, and the files that hold them."""
