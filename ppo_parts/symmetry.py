"""Parts for tasks with a mirror symmetry."""

from ._parts.symmetry import mirror_loss as mirror_loss
from ._parts.symmetry import mirror_segments as mirror_segments
