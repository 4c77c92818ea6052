"""Records overflows, explains them afterwards, and searches one batch for them."""
