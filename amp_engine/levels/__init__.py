"""What is done in which type: policies, the levels that name them, files that keep them."""
