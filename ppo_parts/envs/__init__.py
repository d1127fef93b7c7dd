"""Environments as pure functions: gymnax and JaxMARL environments by name, and wrappers."""

from ._env import AgentsObs as AgentsObs
from ._env import Env as Env
from ._env import Moments as Moments
from ._env import Transition as Transition
from ._env import check as check
from ._env import clip_action as clip_action
from ._env import fold_agents as fold_agents
from ._env import is_discrete as is_discrete
from ._env import normalize_observation as normalize_observation
from ._env import normalize_reward as normalize_reward
from ._env import prepare as prepare
from ._env import share_observations as share_observations
from ._env import size as size
from ._env import with_agent_id as with_agent_id
from ._gymnax import from_gymnax as from_gymnax
from ._gymnax import make as make
from ._host import from_gymnasium as from_gymnasium
from ._host import host_errors as host_errors
from ._jaxmarl import from_jaxmarl as from_jaxmarl
from ._jaxmarl import make_agents as make_agents
