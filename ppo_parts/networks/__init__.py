"""Initializers and layers that other libraries lack, policy heads for any library, and the flax networks of recipes.

The flax networks are imported on first use. You can also use your own networks from any library.
"""

from typing import TYPE_CHECKING, Any

from .._base.extras import require_package
from ._cpu import dense_dot_general as dense_dot_general
from ._heads import action_distribution as action_distribution
from ._heads import action_size as action_size
from ._orthogonal import orthogonal as orthogonal

if TYPE_CHECKING:
    from ._layers import Activation as Activation
    from ._layers import dense as dense
    from ._layers import mlp as mlp
    from ._memory import Cell as Cell
    from ._memory import initial_carry as initial_carry
    from ._memory import recurrent as recurrent
    from ._policies import actor_critic as actor_critic
    from ._policies import multi_agent_actor_critic as multi_agent_actor_critic
    from ._policies import nature_cnn as nature_cnn

_OF_FLAX = {
    "Activation", "Cell", "actor_critic", "dense", "initial_carry", "mlp", "multi_agent_actor_critic", "nature_cnn",
    "recurrent",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _OF_FLAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_package("flax", "train")
    return getattr(require_package(f"{__name__}._policies", "train"), name)  # it imports layers and cells


def __dir__() -> list[str]:
    return sorted([*globals(), *_OF_FLAX])
