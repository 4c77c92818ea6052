"""`apex.amp.rnn_compat`."""


def has_old_rnns() -> bool:
    """Whether torch's recurrent layers are those of before torch 1.0. They are not."""
    return False
