"""apex's private names, for scripts that use them: of an engine and of its optimizers; and its older interface."""
