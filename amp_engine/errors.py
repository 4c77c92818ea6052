"""Every error that amp_engine raises on purpose.

    AmpError
    ├── AmpStateError   (RuntimeError)   a call that does not fit what was initialized
    ├── AmpValueError   (ValueError)     a value outside of what is allowed
    ├── AmpTypeError    (TypeError)      an object of the wrong kind
    ├── AmpIndexError   (IndexError)     a loss_id that initialize() did not provide for
    └── AmpFileError    (RuntimeError)   a checkpoint that is damaged, as torch.load raises

Each also is the built-in error that apex raised in its place, so `except RuntimeError` goes on working.
"""


class AmpError(Exception):
    """Base of all errors below."""


class AmpStateError(AmpError, RuntimeError):
    """The call does not fit what was initialized before it."""


class AmpValueError(AmpError, ValueError):
    """The value is outside of what is allowed."""


class AmpTypeError(AmpError, TypeError):
    """The object is of the wrong kind."""


class AmpIndexError(AmpError, IndexError):
    """No loss scaler has this loss_id."""


class AmpFileError(AmpError, RuntimeError):
    """The file is damaged, or none that amp.save wrote."""
