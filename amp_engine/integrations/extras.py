"""Imports of frameworks, which are extras: none is installed with the package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """A context for the imports of a framework: an ImportError says why they failed and how to install it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"amp_engine.integrations.{extra} cannot import {extra} as it needs it: {error}.  Type "
            f"pip install --upgrade 'amp_engine[{extra}]'."
        ) from error
