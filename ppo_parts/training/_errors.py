"""Errors of runs. Each message states what happened and what to do; command lines print it as one sentence."""

from __future__ import annotations

from .._base.errors import UserError


class RunFolderError(UserError, OSError):
    """The folder of a run cannot be used, or can no longer be used."""


class RunExistsError(RunFolderError, FileExistsError):
    """The folder already contains a run, or another process is writing to it."""


class RunNotFoundError(RunFolderError, FileNotFoundError):
    """The run, or the checkpoint in it, does not exist."""


class NonFiniteError(UserError, FloatingPointError):
    """A run ended because of non-finite numbers."""


class MetricNotFoundError(UserError, KeyError):
    """No update has a metric of this name."""

    __str__ = Exception.__str__  # that of KeyError puts the message in quotes


for _error in (RunFolderError, RunExistsError, RunNotFoundError, NonFiniteError, MetricNotFoundError):
    _error.__module__ = "ppo_parts.training"  # the public module, so that tracebacks show the public name
