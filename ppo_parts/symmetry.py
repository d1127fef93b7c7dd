"""Parts for tasks with a mirror symmetry."""

from ._parts.symmetry import mirror_loss as mirror_loss
from ._parts.symmetry import mirror_segments as mirror_segments

__all__ = [name for name in dir() if name[0] != "_"]  # for `help`
