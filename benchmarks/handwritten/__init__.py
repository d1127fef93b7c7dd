"""The recipes' rivals, each written by hand, with which `python -m benchmarks train` compares them.

They are in the style of PureJaxRL and JaxMARL, with the network, hyperparameters and budget of the recipe whose
configuration they take. A time limit ends an episode like a death, which saves what the recipes do to bootstrap there;
otherwise nothing is kept that slows the originals down.
"""

from . import cleanrl as cleanrl
from . import ippo as ippo
from . import pufferlib as pufferlib
