"""The recipes' rivals, each written by hand, with which `python -m benchmarks train` compares them.

They are in the style of PureJaxRL and JaxMARL: environments are stepped and the policy sampled with fresh keys in every
step, the critic is asked in every step, each epoch draws a permutation and copies the rollout in its order (or each
minibatch draws its segments), the optimizer walks the parameter tree. Network, hyperparameters and budget are those of
the recipe whose configuration they take. Kept from what slows the originals down: nothing; advantages are a plain scan,
and only the means of an update's episodes are kept of what the environment says. A time limit ends an episode like a
death, which saves what the recipes do to bootstrap there.
"""

from . import cleanrl as cleanrl
from . import ippo as ippo
from . import pufferlib as pufferlib
