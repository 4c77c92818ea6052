"""Every error that amp_engine raises on purpose, and every category that it warns with.

    AmpError
    ├── AmpStateError   (RuntimeError)   a call that does not fit what was initialized
    ├── AmpValueError   (ValueError)     a value outside of what is allowed
    ├── AmpTypeError    (TypeError)      an object of the wrong kind
    ├── AmpIndexError   (IndexError)     a loss_id that initialize() did not provide for
    └── AmpFileError    (RuntimeError)   a checkpoint that is damaged, as torch.load raises

Each is also the built-in error that apex raised in the same case, so `except RuntimeError` still works.

    AmpWarning (UserWarning)                all of them: something in the program has another effect than it seems
    ├── AmpGradientWarning                  a step without a gradient; gradients not scaled; half weights written
    └── AmpRuntimeWarning (RuntimeWarning)  something around the program: the build, another apex, autocast, lost hooks

Each is also the built-in category in parentheses, so filters of that category still work.
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
    """The file is damaged, or amp.save did not write it."""


class AmpWarning(UserWarning):
    """Base of all warnings below, and the category of warnings that have no category of their own."""


class AmpGradientWarning(AmpWarning):
    """A step finds no gradient, gradients were not scaled, or half weights are written before every step."""


class AmpRuntimeWarning(AmpWarning, RuntimeWarning):
    """Something around the program is wrong: the build, another apex, autocast, lost hooks."""
