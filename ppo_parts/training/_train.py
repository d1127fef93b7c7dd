"""A pure training step with a rollout and an update, and a whole training run as a function of a key."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from .._base.batching import sequential_vmap_on_cpu
from .._base.checked import Count, checked
from .._base.hyperparameters import Numeric, check_count, value_at
from .._base.trees import select
from .._core.batch import Array, Batch, Policy
from .._core.chain import chain
from .._core.learner import Learner, LearnerState, learner
from .._core.metrics import Metrics, join_metrics
from .._core.part import Part
from .._core.pieces import microbatched
from ..envs._env import SEATS, check_env
from ..envs._rollout import Rollout, RolloutState, rollout
from ..errors import UserTypeError, UserValueError
from ..functional._arguments import check_key
from ._evaluate import EpisodeResults, evaluate_episodes


class TrainState(NamedTuple):
    """The whole state of a run; a run restored from it continues as if it had never been interrupted."""

    key: Array
    learner: LearnerState
    rollout: RolloutState

    @property
    def keys(self) -> Array:
        """Return the keys of the next state, the rollout and the update, `[3]`."""
        return jax.random.split(self.key, 3)

    @property
    def acting(self) -> TrainState:
        """Return the state whose policy is evaluated, this one, or for a population the best member's state."""
        return self


Collected = tuple[RolloutState, Batch, Metrics]
"""The result of a rollout: the environment state after it, the steps, and the episode metrics."""


class TrainResult(NamedTuple):
    """The result of `train(key)`: the last state and every metric, `[updates]`."""

    state: TrainState
    metrics: Metrics


@dataclasses.dataclass(frozen=True, eq=False)  # eq and hash by identity, because jax.jit(train) needs a hash
class Train:
    """A training run, a pure function `train(key) -> TrainResult` that can be jitted, and vmapped over keys.

    Attributes:
        env: the environment.
        policy: the `ppo_parts.Policy`.
        rollout, learner: results of `ppo_parts.rollout` and `ppo_parts.learner`.
        num_updates: number of rollouts, each followed by an update, in the whole run.
        steps_per_update: environment steps per update.
        schedules: hyperparameters to record as metrics, by name; numbers, or schedules of the number of updates so far.
            They do not affect training, so give the same ones to the optimizer and the parts. A learning rate in the
            optimizer state, as with `scale_by_kl_adaptive_rate`, is always recorded.
        recipe: name of the module whose `make_train` makes the run, set by `training.recipe`. It is recorded for `load`
            and the commands that read runs, and a run cannot be resumed with another recipe.
        config: the configuration that `make_train` was given, set by `training.recipe`; `training.run` takes no other.
    """

    env: Any
    policy: Policy
    rollout: Rollout
    learner: Learner
    num_updates: int
    steps_per_update: int
    schedules: Mapping[str, Numeric] = dataclasses.field(default_factory=dict)
    recipe: str | None = None
    config: Any = None

    def __post_init__(self) -> None:
        check_count("train", "num_updates", self.num_updates)
        check_count("train", "steps_per_update", self.steps_per_update)
        if not isinstance(jnp.zeros(()), jax.core.Tracer):  # a traced function traces the step anyway
            _ = self.shapes  # traces a step, so that an invalid run fails before it starts

    @functools.cached_property
    def shapes(self) -> tuple[TrainState, dict[str, Any]]:
        """Return the shapes and dtypes of the state, and of the metrics of an update."""
        return jax.eval_shape(lambda key: self.jitted_step(self.jitted_init(key)), jax.random.key(0))

    @property
    def on_host(self) -> bool:
        """Return whether environments step on the host, so that their state cannot be stored or copied."""
        return self.rollout.restart is not None

    def state_shapes(self, num_seeds: int = 1) -> TrainState:
        """Return the shapes and dtypes of the state; several seeds are the first axis of every array."""
        seeds = () if num_seeds == 1 else (num_seeds,)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*seeds, *x.shape), x.dtype), self.shapes[0])

    def sharding(self, mesh: jax.sharding.Mesh) -> TrainState:
        """Divide the environments of one seed over the devices of a mesh; each device has the learner."""
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda _: whole, self.state_shapes())._replace(rollout=self.rollout.sharding(mesh))

    @functools.cached_property
    def jitted_init(self) -> Callable[[Array], TrainState]:
        """Return `jax.jit(init)`, which is traced only once."""
        return jax.jit(self.init)

    @functools.cached_property
    def jitted_step(self) -> Callable[[TrainState], tuple[TrainState, dict[str, Array]]]:
        """Return `jax.jit(step)`, which is traced only once."""
        return jax.jit(self.step)

    @classmethod
    def of(
        cls,
        config: Any,
        env: Any,
        policy: Policy,
        pipeline: Part,
        optimizer: Any,
        *,
        value_each_step: bool = False,
        record: tuple[str, ...] = (),
        keep_info: tuple[str, ...] = (),
        noise_steps: int = 1,
        schedules: Mapping[str, Numeric] | None = None,
    ) -> Train:
        """Make the run that a configuration describes.

        Args:
            config: a `training.Config`, or any object with its fields; `shards=None` means one shard.
            env: the environment.
            policy: the `ppo_parts.Policy`; the learner evaluates it on `config.microbatch` elements at a time.
            pipeline, optimizer: as in `ppo_parts.learner`. If a part requires `next_obs` or `behavior`, the rollout
                keeps it.
            value_each_step, record, keep_info, noise_steps: as in `ppo_parts.rollout`. For an `Env.zero_sum`, the
                rollout also keeps `envs.SEATS`.
            schedules: hyperparameters to record as metrics, such as `{"learning_rate": annealed}`; see `Train`.

        Raises:
            ValueError: if the policy plays both sides of a game and no part of the chain tells them apart.
        """
        for name in ("num_envs", "num_steps", "microbatch", "shards", "total_timesteps"):
            if not hasattr(config, name):
                says = f"must be a training.Config, got {config!r}, which has no {name}"
                raise UserTypeError(says, where="Train.of", argument="config")
        if not isinstance(policy, Policy):
            got = f"the part {policy.name!r}: pass it as pipeline" if isinstance(policy, Part) else f"{policy!r}"
            raise UserTypeError(f"must be a ppo_parts.Policy, got {got}", where="Train.of", argument="policy")
        check_env("Train.of", env)
        sizes = {"num_envs": config.num_envs, "num_steps": config.num_steps}
        evaluate = policy if config.microbatch is None else microbatched(policy, config.microbatch)
        needed = chain(pipeline).requires  # raises if it is not a part
        required = {field.partition(".")[0] for field in needed}
        if env.zero_sum and not any(f"extras.{name}" in needed for name in SEATS):
            raise UserValueError(
                "Train.of: the policy plays both sides of this game, but what is good for one is bad for the other: "
                "wrap the estimator of the advantage, as in pp.agents.zero_sum(pp.gae(...))"
            )
        return cls(
            env=env,
            policy=policy,
            rollout=rollout(
                env,
                evaluate,
                **sizes,
                value_each_step=value_each_step,
                record=record,
                noise_steps=noise_steps,
                keep_next_obs="next_obs" in required,
                keep_distribution="behavior" in required,
                keep_info=tuple(dict.fromkeys((*keep_info, *SEATS))) if env.zero_sum else keep_info,
                shards=config.shards or 1,
            ),
            learner=learner(evaluate, pipeline, optimizer),
            num_updates=count_updates(config.total_timesteps, **sizes),
            steps_per_update=config.num_envs * config.num_steps,
            schedules=schedules or {},
        )

    def init(self, key: Array) -> TrainState:
        """Initialize parameters and environments."""
        key, params_key, env_key, parts_key = jax.random.split(check_key("train", "key", key), 4)

        def init(params_key: Array, parts_key: Array) -> LearnerState:
            return self.learner.init(self.policy.init(params_key), parts_key)

        # Initialize seeds one by one, because batched factorizations (in orthogonal initializers) can deadlock a CPU.
        learner = sequential_vmap_on_cpu(init)(params_key, parts_key)
        return TrainState(key, learner, self.rollout.init(env_key))

    def restart_host_envs(self, state: TrainState) -> TrainState:
        """Begin new episodes in environments on the host, which no checkpoint can store; others do not change."""
        if self.rollout.restart is None:
            return state
        key = jax.random.fold_in(state.key, state.learner.step)
        return state._replace(rollout=self.rollout.restart(key, state.rollout))

    def step(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Run one rollout and one update; see `collect` and `learn`."""
        return self.learn(state, self.collect(state))

    def collect(self, state: TrainState) -> Collected:
        """Run one rollout with the policy of `state`."""
        _, key, _ = state.keys
        return self.rollout.collect(key, state.learner.params, state.rollout)

    def learn(self, state: TrainState, collected: Collected) -> tuple[TrainState, Metrics]:
        """Run one update on a rollout; after non-finite numbers, the learner changes only its `step`."""
        (rollout_state, batch, episodes), (next_key, _, key) = collected, state.keys
        updated, metrics = sequential_vmap_on_cpu(self.learner.update)(key, state.learner, batch)
        name = NONFINITE + "parameters"
        parameters = Metrics.of({name: _count_nonfinite(updated.params)}, {name: "sum"})
        step = state.learner.step
        scheduled = Metrics.of({name: jnp.float32(value_at(x, step)) for name, x in self.schedules.items()})
        episodes = episodes if isinstance(episodes, Metrics) else Metrics.of(episodes)  # of a `collect` of your own
        metrics = join_metrics(episodes, metrics, parameters, scheduled)
        counts = jnp.array([NONFINITE in name for name in metrics.names])
        finite = jnp.sum(metrics.array, where=counts) == 0
        kept = select(finite, updated, state.learner)
        metrics = join_metrics(metrics, _find_rates(state.learner, metrics.names))
        return TrainState(next_key, kept._replace(step=updated.step), rollout_state), metrics

    def __call__(self, key: Array) -> TrainResult:
        """Run the whole training in one program."""
        state, metrics = jax.lax.scan(lambda state, _: self.step(state), self.init(key), None, length=self.num_updates)
        return TrainResult(state, metrics)

    def evaluate_policy(self, key: Array, state: TrainState, episodes: int, *, mode: bool = False) -> EpisodeResults:
        """Play whole episodes with the policy of `state`; see `evaluate_episodes`."""
        check_key("evaluate_policy", "key", key)
        state = state.acting
        env = self.env.evaluation(state.rollout.env_state)
        return evaluate_episodes(env, self.policy, state.learner.params, key, episodes, mode=mode)


NONFINITE = "nonfinite/"
"""The part of a metric's name that marks counts of non-finite numbers."""


def _find_rates(state: LearnerState, names: Collection[str]) -> Metrics:
    """Return the learning rate in the optimizer's state as a metric, or one for each phase's optimizer."""
    rates, has_phases = {}, isinstance(state.pipeline[1], dict)
    for phase, opt_state in (state.opt_state if has_phases else {"": state.opt_state}).items():
        name = f"{phase}/learning_rate" if phase else "learning_rate"
        entries = optax.tree_utils.tree_get_all_with_path(opt_state, "learning_rate")
        found = [x for _, x in entries if getattr(x, "shape", None) == ()]  # not the state of its schedule
        if len(found) == 1 and name not in names:
            rates[name] = jnp.asarray(found[0], jnp.float32)
    return Metrics.of(rates)


def _count_nonfinite(tree: Any) -> Array:
    leaves = [jnp.reshape(x, -1) for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return jnp.sum(~jnp.isfinite(jnp.concatenate(leaves))) if leaves else jnp.zeros((), int)  # one kernel


@checked
def vmap_over_seeds(function: Callable[..., Any], num_seeds: Count) -> Callable[..., Any]:
    """Map `function` over a leading seed axis if there are several seeds."""
    return jax.vmap(function) if num_seeds > 1 else function


def make_keys(seed: int, num_seeds: int) -> Array:
    """Make the keys of `seed`, `seed + 1`, ...; a single key has no axis."""
    if not 0 <= seed <= 2**32 - num_seeds:  # JAX uses only the last 32 bits of larger seeds
        says = f"must be such that all seeds lie in [0, 2**32), got {seed} to {seed + num_seeds - 1}: give another seed"
        raise UserValueError(says, argument="seed")
    keys = jnp.stack([jax.random.key(seed + i) for i in range(num_seeds)])
    return keys if num_seeds > 1 else keys[0]


@checked
def count_updates(total_timesteps: Count, *, num_envs: Count, num_steps: Count) -> int:
    """Return how many updates of `num_envs * num_steps` steps fit into `total_timesteps`, at least one."""
    each = num_envs * num_steps
    if total_timesteps < each:
        says = f"must be at least one update, num_envs * num_steps = {num_envs} * {num_steps} = {each} steps"
        says = f"{says}, got {total_timesteps}: raise it, or make the rollouts shorter"
        raise UserValueError(says, where="Config", argument="total_timesteps")
    return int(total_timesteps // each)


@checked
def last_episodes_return(episode_return: Any, episodes: Any, last: Count = 100) -> Any:
    """Compute the mean return of (at least) the `last` episodes, from the metrics of each update.

    Args:
        episode_return: `[..., updates]`, mean over the episodes that ended in an update. If it is not finite, because
            no episode ended or a reward was not finite, the update does not count.
        episodes: `[..., updates]`, number of episodes that ended; NaN counts as 0.
        last: updates are taken from the end until they contain this many episodes.

    Returns:
        The mean return, `[...]`, or NaN where no episode ended.

    Example:
        >>> import jax.numpy as jnp
        >>> float(last_episodes_return(jnp.array([9., 1., jnp.nan, 3.]), jnp.array([5, 1, 0, 1]), last=2))
        2.0
    """
    episode_return = jnp.asarray(episode_return)
    number = jnp.where(jnp.isfinite(episode_return), jnp.nan_to_num(jnp.asarray(episodes)), 0)
    later = jnp.cumsum(number[..., ::-1], axis=-1)[..., ::-1] - number
    number = jnp.where(later < float(last), number, 0)
    total = jnp.sum(jnp.where(number > 0, episode_return * number, 0), axis=-1)
    return total / jnp.sum(number, axis=-1)
