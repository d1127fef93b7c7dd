"""The policies of the recipes, as flax networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .._base.checked import Count, checked
from .._base.hyperparameters import check_number, check_takes
from .._base.trees import shapes_of
from .._core.batch import Batch, Output, Policy
from ..envs import Env, count_options, is_discrete
from ..envs._env import as_observation, check_env
from ..envs._spaces import array_shape, is_image, list_spaces, map_space
from ..errors import ShapeError, UserTypeError, UserValueError
from ._heads import Array, action_distribution, action_size, real_size
from ._layers import Activation, check_hidden, convolved, dense, largest_pixel, mlp
from ._memory import Cell, initial_carry, recurrent
from ._orthogonal import in_one_draw


def encoded(space: Any, x: Any, image_features: int = 256) -> Array:
    """Encode an observation as one vector; call this inside the compact method of a flax module."""

    def of_entry(space: Any, x: Array) -> Array:
        shape = tuple(space.shape)
        if x.shape[x.ndim - len(shape) :] != shape:
            raise ShapeError(f"observation of a space with shape {shape} must end with these axes, got shape {x.shape}")
        if options := count_options(space):
            each = x if hasattr(space, "nvec") else x[..., None]
            each = each.astype(jnp.int32)
            return jnp.concatenate([jax.nn.one_hot(each[..., i], n) for i, n in enumerate(options)], axis=-1)
        if not is_image(space):
            return x.astype(jnp.float32).reshape(*x.shape[: x.ndim - len(space.shape)], math.prod(space.shape))
        x = x if min(space.shape[1:]) >= 36 else jnp.moveaxis(x, -1, -3)
        return nn.relu(dense(image_features)(convolved(x, largest_pixel("actor_critic", space))))

    return jnp.concatenate(jax.tree.leaves(map_space(of_entry, space, x)), axis=-1)


def _check(where: str, env: Env, hidden: Any, memory: Any) -> None:
    """Check the arguments that all policies share."""
    check_env(where, env)
    check_hidden(where, hidden)
    if memory is not None and not hidden:
        raise UserValueError(f"{where}: memory={memory!r} needs hidden layers, got hidden={hidden}")


@checked
def actor_critic(
    env: Env,
    hidden: tuple[int, ...] = (64, 64),
    activation: Activation = "tanh",
    *,
    shared: bool = False,
    memory: Cell | None = None,
    squash: bool = False,
    log_std: float = 0.0,
    gsde: bool = False,
    image_features: Count = 256,
) -> Policy:
    """Make the policy of most PPO implementations, with separate MLPs for actor and critic, or a shared one.

    Observations are converted to float32 and flattened. Discrete ones become one-hot vectors, and the convolutions of
    `nature_cnn` encode images of at least 36 x 36 pixels. The entries of a `Dict` or `Tuple` are concatenated. With an
    `envs.Observation`, unavailable actions have probability 0, and the critic sees `privileged`, if it is given,
    instead of `obs`. Weights are orthogonal with a gain of sqrt(2) in hidden layers, 0.01 in the policy head and 1 in
    the value head. The standard deviation of continuous actions is a parameter.

    Args:
        env: the environment, whose spaces determine the sizes of inputs and outputs.
        hidden: number of units of each hidden layer.
        activation: activation of the hidden layers, "tanh", "relu", "gelu", "elu" or "silu".
        shared: whether actor and critic share all layers except their heads. Then `rollout(..., value_each_step=True)`
            keeps the value that is computed with each action.
        memory: a cell of `recurrent` with `hidden[-1]` units after the shared layers; with a `privileged_space`, only
            the actor has one.
        squash: whether to squash continuous actions into the box with tanh, or leave them unbounded
            (`envs.clip_action`).
        log_std: initial logarithm of the standard deviation of continuous actions.
        gsde: whether to use state-dependent exploration. The noise of continuous actions is then a linear function of
            the actor's last hidden layer, and each unit has its own `log_std` (`distributions.StateDependentNormal`).
        image_features: number of units of the layer after the convolutions.

    Returns:
        A `ppo_parts.Policy` for any leading axes.

    Raises:
        ValueError: if memory has no shared hidden layers (no hidden layers at all, if the critic sees `privileged`),
            spaces do not consist of arrays, there is an agent axis, layers are shared although the critic sees
            something else, or `squash` or `gsde` is used with discrete actions.

    Example:
        >>> from ppo_parts import envs
        >>> policy = actor_critic(envs.make("CartPole-v1"), hidden=(64, 64))
        >>> sorted(policy.init(jax.random.key(0))["params"])
        ['Dense_0', 'Dense_1', 'Dense_2', 'Dense_3', 'Dense_4', 'Dense_5']

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, details 2, 13, 24 and 26.
    """
    _check("actor_critic", env, hidden, memory)
    if env.num_agents is not None:
        remedy = "use multi_agent_actor_critic, as the recipe ippo does, or envs.fold_agents"
        raise UserValueError(f"actor_critic: this environment has an axis of {env.num_agents} agents: {remedy}")
    if env.privileged_space is not None and shared:
        says = "the critic of this environment sees more than the policy, so they cannot share layers"
        raise UserValueError(f"actor_critic: {says}: give shared=False")
    if env.privileged_space is None and memory is not None and not shared:
        raise UserValueError(f"actor_critic: memory={memory!r} is shared by actor and critic: give shared=True")
    check_number("actor_critic", "log_std", log_std, schedule=False)
    size, real = action_size(env.action_space), real_size(env.action_space)
    if is_discrete(env.action_space) and (squash or gsde):
        message = f"must be False, because the actions are discrete, {env.action_space}"
        raise UserValueError(message, where="actor_critic", argument="squash" if squash else "gsde")
    spaces = env.observation_space, env.privileged_space
    for each in (each for space in spaces if space is not None for each in list_spaces(space)):
        array_shape("observations", each)
        if is_image(each):
            largest_pixel("actor_critic", each)  # raises if the bounds do not tell

    class ActorCritic(nn.Module):
        @nn.compact
        def __call__(self, obs: Any, available: Any, carry: Any, reset: Any, privileged: Any) -> Output:
            x = mlp(encoded(env.observation_space, obs, image_features), hidden, activation)
            if memory is not None:
                x, carry = recurrent(x, carry, reset, memory)
            features = x if gsde else None
            head = dense(size, gain=0.01)(x)
            if not shared:
                seen = (env.observation_space, obs) if privileged is None else (env.privileged_space, privileged)
                x = mlp(encoded(*seen, image_features), hidden, activation)
            value = dense(1, gain=1.0)(x)
            shape = (real,) if features is None else (features.shape[-1], real)
            spread = self.param("log_std", nn.initializers.constant(log_std), shape) if real else None
            distribution = action_distribution(
                env.action_space, head, spread, available=available, squash=squash, features=features
            )
            return Output(distribution, value[..., 0], carry)

    network = ActorCritic()

    def init(key: Array) -> Any:
        carry, no_reset = initial_carry(memory, (1, *hidden[-1:])), jnp.zeros((1, 1), bool)
        obs, privileged = (
            None if space is None else map_space(lambda each: jnp.zeros((1, 1, *each.shape)), space) for space in spaces
        )
        return in_one_draw(network.init)(key, obs, None, carry, no_reset, privileged)

    def evaluate(params: Any, batch: Batch) -> Any:
        seen = as_observation(batch.obs)
        privileged = seen.privileged
        if (privileged is None) != (env.privileged_space is None):
            says = f"the privileged part of an observation is {shapes_of(privileged)}"
            but = f"the environment's privileged_space is {env.privileged_space}"
            remedy = "give both (auto_reset(privileged_space=)), or neither"
            raise UserValueError(f"actor_critic: {says}, but {but}: {remedy}")
        return network.apply(params, seen.obs, seen.available, batch.carry, batch.reset, privileged)

    return Policy(init, evaluate, None if memory is None else lambda n: initial_carry(memory, (n, *hidden[-1:])))


@checked
def nature_cnn(env: Env, features: Count = 512) -> Policy:
    """Make the policy of most Atari agents, in which actor and critic share the convolutions of DQN.

    This is `actor_critic` for images, shared and without hidden layers. It has convolutions of 32 8x8 filters with
    stride 4, 64 4x4 filters with stride 2 and 64 3x3 filters with stride 1, and a dense layer, each with ReLU. Pixels
    are divided by 255 if the bounds of their space are 0 and 255, but not if its bounds are within [-1, 1], or after
    `envs.normalize_observation`.

    Args:
        env: the environment; observations are images `[C, H, W]` or `[H, W, C]` of at least 36 x 36 pixels.
        features: number of units of the dense layer.

    Returns:
        A `ppo_parts.Policy` for any leading axes.

    Raises:
        ValueError: if the observations or bounds differ from these, or if the bounds are 0 and 255 but the dtype is
            floating, because the frames may already have been divided.

    Reference: Mnih et al. 2015, doi:10.1038/nature14236, Methods; Huang et al. 2022, The 37 Implementation Details of
    PPO, detail 8 of Atari.
    """
    check_env("nature_cnn", env)
    if not is_image(env.observation_space):
        must = f"be images of at least 36 x 36 pixels, got the space {env.observation_space}"
        raise UserValueError(f"nature_cnn: observations must {must}: use actor_critic, or your own network")
    largest_pixel("nature_cnn", env.observation_space)  # raises if the bounds do not tell
    return actor_critic(env, (), shared=True, image_features=features)


@checked
def multi_agent_actor_critic(
    env: Env,
    inputs: Callable[[Array], tuple[Array, Array]] = lambda obs: (obs, obs),
    hidden: tuple[int, ...] = (64, 64),
    activation: Activation = "tanh",
    *,
    memory: Cell | None = None,
    independent: bool = False,
    gain: Any = 0.01,
) -> Policy:
    """Make a multi-agent actor and critic, with parameters `{"actor": ..., "critic": ...}` for phases to train.

    Args:
        env: environment with an agent axis. Unavailable actions have probability 0.
        inputs: function that maps observations `[..., A, D]`, flattened and one-hot if discrete, to the inputs of each
            agent's actor and critic, two arrays `[..., A, D']`.
        hidden: number of units of each hidden layer, in the actor and in the critic.
        activation: activation of the hidden layers, "tanh", "relu", "gelu", "elu" or "silu".
        memory: a cell of `recurrent` with `hidden[-1]` units before each head.
        independent: whether each agent has its own actor and critic, whose parameters then have a leading agent axis.
        gain: gain of the policy head.

    Returns:
        A `ppo_parts.Policy` for observations `[..., A, ...]`.

    Raises:
        ValueError: if the environment has no agent axis, if observations are images or have a privileged part, or if
            there is memory without hidden layers. TypeError: if `inputs` does not return a tuple of two such arrays.

    Example:
        >>> from ppo_parts import envs, networks
        >>> env = envs.make("jaxmarl:MPE_simple_spread_v3")  # doctest: +SKIP
        >>> policy = networks.multi_agent_actor_critic(  # doctest: +SKIP
        ...     env, lambda obs: (obs, envs.share_observations(obs))  # a central critic
        ... )
    """
    _check("multi_agent_actor_critic", env, hidden, memory)
    check_takes("multi_agent_actor_critic", "inputs", inputs, ("obs",))
    if env.num_agents is None:
        remedy = "use actor_critic, as the recipe cleanrl_ppo does"
        raise UserValueError(f"multi_agent_actor_critic: this environment has no axis of agents: {remedy}")
    for each in list_spaces(env.observation_space):
        if is_image(each):
            raise UserValueError(f"multi_agent_actor_critic: observations are images, {each}: use your own network")
    if env.privileged_space is not None:
        says = f"the critic sees what inputs returns, but observations have a privileged part ({env.privileged_space})"
        remedy = "set it and privileged_space to None, and share observations in inputs instead"
        raise UserValueError(f"multi_agent_actor_critic: {says}: {remedy}")
    agents, space, observed = env.num_agents, env.action_space, env.observation_space
    zeros = map_space(lambda each: jnp.zeros((1, 1, agents, *array_shape("observations", each))), observed)
    seen = jax.eval_shape(lambda: inputs(encoded(observed, zeros)))
    leaves = jax.tree.leaves(seen)
    if not isinstance(seen, tuple | list) or [x.shape[:-1] for x in leaves] != [(1, 1, agents)] * 2:
        must = f"inputs must return a tuple of two arrays [..., {agents}, D'], of actor and critic"
        got = f"for observations [1, 1, {agents}, D] it returns {', '.join(str(x.shape) for x in leaves) or seen}"
        raise UserTypeError(f"multi_agent_actor_critic: {must}; {got}")

    class Network(nn.Module):
        outputs: int
        gain: Any
        real: int = 0

        @nn.compact
        def __call__(self, x: Array, carry: Any, reset: Any) -> tuple[Array, Any, Any]:
            """Return the output of the head, the log standard deviation of `real` numbers, and the carry."""
            x = mlp(x, hidden, activation)
            if memory is not None:
                x, carry = recurrent(x, carry, reset, memory)
            head = dense(self.outputs, self.gain)(x)
            return head, self.param("log_std", nn.initializers.zeros, (self.real,)) if self.real else None, carry

    networks = {"actor": Network(action_size(space), gain, real_size(space)), "critic": Network(1, 1.0)}
    nothing = dict.fromkeys(networks)

    def init(key: Array) -> Any:
        carry, no_reset, params = initial_carry(memory, (1, *hidden[-1:])), jnp.zeros((1, 1), bool), {}
        for (name, network), x, of_name in zip(networks.items(), seen, jax.random.split(key), strict=True):
            init: Any = in_one_draw(network.init)
            if independent:
                of_name, init = jax.random.split(of_name, agents), jax.vmap(init, in_axes=(0, None, None, None))
            params[name] = init(of_name, jnp.zeros((1, 1, x.shape[-1])), carry, no_reset)
        return params

    def evaluate(params: Any, batch: Batch) -> Output:
        obs = as_observation(batch.obs)
        seen = dict(zip(networks, inputs(encoded(observed, obs.obs)), strict=True))
        before, heads, log_stds, after = batch.carry or nothing, {}, {}, {}
        for name, network in networks.items():
            apply: Any = network.apply
            if independent:
                axes = (None, None) if memory is None else (-2, -1)
                apply = jax.vmap(apply, in_axes=(0, -2, *axes), out_axes=(-2, 0, axes[0]))
            heads[name], log_stds[name], after[name] = apply(params[name], seen[name], before[name], batch.reset)
        distribution = action_distribution(space, heads["actor"], log_stds["actor"], available=obs.available)
        return Output(distribution, heads["critic"][..., 0], None if memory is None else after)

    def first_carry(num_envs: int) -> Any:
        return {name: initial_carry(memory, (num_envs, agents, hidden[-1])) for name in networks}

    return Policy(init, evaluate, None if memory is None else first_carry)
