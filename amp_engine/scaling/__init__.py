"""The loss scale: its rule, its state on the device, and losses that a user scales by hand."""
