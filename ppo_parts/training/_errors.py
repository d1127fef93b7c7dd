"""Errors of runs. Each says what happened and what to do; command lines print it as one sentence."""

from __future__ import annotations

from .._errors import UserError


class RunFolderError(UserError, OSError):
    """The folder of a run cannot be used, or not any longer."""


class RunExistsError(RunFolderError, FileExistsError):
    """There is a run already, or another process is writing it."""


class RunNotFoundError(RunFolderError, FileNotFoundError):
    """There is no such run, or no such checkpoint in it."""


class NonFiniteError(UserError, FloatingPointError):
    """Numbers that are not finite ended a run."""
