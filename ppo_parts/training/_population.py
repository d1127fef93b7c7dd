"""Population-based training, in which members have their own hyperparameters and the worst copy the best."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .._base.checked import Count, checked
from .._base.hyperparameters import check_count, check_number
from .._core.batch import Array
from .._core.metrics import Metrics, join_metrics
from ..errors import UserTypeError, UserValueError
from ..functional._arguments import POSITIVE, check_key
from ..functional._common import Range
from ._config import check_config
from ._search import check_fields, check_metric
from ._train import Collected, Train, TrainState

PARENT = "population/parent"
"""A metric that only populations have, the member whose state each member continues."""
RESAMPLE = 0.25
"""The probability that a selection draws a hyperparameter again instead of multiplying it."""


class PopulationState(NamedTuple):
    """The whole state of a population; all arrays except the key have shape `[members, ...]`.

    `total` and `number` are the sum and the number of the metric's values since the last selection. `score` is their
    mean at the last selection, or NaN if there was no value yet.
    """

    key: Array
    members: TrainState
    hyperparameters: dict[str, Array]
    total: Array
    number: Array
    score: Array

    @property
    def scores(self) -> Array:
        """Return the mean metric since the last selection, or the `score`, `[members]`; -inf without either."""
        scores = jnp.where(self.number > 0, self.total / jnp.maximum(self.number, 1), self.score)
        return jnp.where(jnp.isnan(scores), -jnp.inf, scores)

    @property
    def best(self) -> tuple[TrainState, dict[str, Array]]:
        """Return the state and the hyperparameters of the member with the highest score."""
        return jax.tree.map(lambda x: x[jnp.argmax(self.scores)], (self.members, self.hyperparameters))

    @property
    def acting(self) -> TrainState:
        return self.best[0]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Population(Train):
    """A run of `members` runs; its state is a `PopulationState`, its metrics are `[updates, members]`.

    See `population`. The fields of `Train` are those of one run with the hyperparameters of the configuration.
    """

    member: Callable[..., Train]  # makes the run with these hyperparameters
    ranges: Mapping[str, Range]
    members: int
    every: int
    fraction: float
    factors: tuple[float, float]
    metric: str

    def init(self, key: Array) -> PopulationState:  # type: ignore[override]
        """Draw the hyperparameters of all members, and initialize each member with its own key."""
        key, drawn, keys = jax.random.split(check_key("train", "key", key), 3)
        hyperparameters = self.sample(drawn)
        init = jax.vmap(lambda given, key: self.member(**given).init(key))
        members = init(hyperparameters, jax.random.split(keys, self.members))
        none = jnp.zeros(self.members)
        return PopulationState(key, members, hyperparameters, none, none, jnp.full(self.members, jnp.nan))

    def sharding(self, mesh: jax.sharding.Mesh) -> Any:
        if self.members % mesh.size:
            says = f"must be a multiple of the {mesh.size} devices"
            raise UserValueError(says, where="population", argument="members")
        divided, whole = (NamedSharding(mesh, PartitionSpec(*names)) for names in (mesh.axis_names, ()))
        return jax.tree.map(lambda x: divided if x.shape else whole, self.state_shapes())

    def collect(self, state: Any) -> Collected:
        return jax.vmap(lambda given, state: self.member(**given).collect(state))(state.hyperparameters, state.members)

    def learn(self, state: Any, collected: Collected) -> tuple[Any, Metrics]:
        """Run an update of each member, and a selection after every `every` updates except at the end of the run."""
        learn = jax.vmap(lambda given, *member: self.member(**given).learn(*member))
        members, metrics = learn(state.hyperparameters, state.members, collected)
        value = metrics[self.metric]
        known = jnp.isfinite(value)
        total, number = state.total + jnp.where(known, value, 0), state.number + known
        record = {f"population/{name}": x for name, x in state.hyperparameters.items()}
        state = state._replace(members=members, total=total, number=number)
        done = members.learner.step[0]
        due = (done % self.every == 0) & (done <= self.num_updates - self.every)  # `every` updates then choose the best
        state, parent = jax.lax.cond(due, self.select, lambda state: (state, jnp.arange(self.members)), state)
        record[PARENT] = parent.astype(jnp.float32)
        return state, jax.vmap(join_metrics)(metrics, jax.vmap(Metrics.of)(record))

    def select(self, state: PopulationState) -> tuple[PopulationState, Array]:
        """Let the worst copy the best and explore; also return the member that each member continues, `[members]`."""
        key, among, drawn, scaled, chance = jax.random.split(state.key, 5)
        few = min(round(self.fraction * self.members), self.members // 2)  # no member is in both groups
        order, own = jnp.argsort(state.scores), jnp.arange(self.members)
        parent = own.at[order[:few]].set(jax.random.choice(among, order[-few:], (few,)))
        parent = jnp.where(state.scores[parent] > state.scores, parent, own)  # a member copies only a better one
        members, old, score = jax.tree.map(lambda x: x[parent], (state.members, state.hyperparameters, state.scores))
        members = members._replace(key=state.members.key)  # so that copies act differently
        new, hyperparameters, shape = self.sample(drawn), {}, (len(self.ranges), self.members)
        factors = jax.random.choice(scaled, jnp.array(self.factors), shape)
        again = jax.random.bernoulli(chance, RESAMPLE, shape)
        for i, (name, limits) in enumerate(self.ranges.items()):
            explored = jnp.where(again[i], new[name], jnp.clip(old[name] * factors[i], limits.low, limits.high))
            hyperparameters[name] = jnp.where(parent == own, old[name], explored)
        none = jnp.zeros(self.members)
        return PopulationState(key, members, hyperparameters, none, none, score), parent

    def sample(self, key: Array) -> dict[str, Array]:
        drawn, uniform = {}, jax.random.uniform(key, (len(self.ranges), self.members))
        for (name, x), u in zip(self.ranges.items(), uniform, strict=True):
            value = x.low * (x.high / x.low) ** u if x.low > 0 else x.low + (x.high - x.low) * u
            drawn[name] = jnp.clip(value, x.low, x.high)  # against rounding errors
        return drawn


@checked
def population(
    make_train: Callable[..., Train],
    ranges: Mapping[str, Range],
    *,
    members: int = 16,
    every: Count = 10,
    fraction: float = 0.2,
    factors: tuple[float, float] = (0.8, 1.2),
    metric: str = "episode_return",
) -> Callable[..., Population]:
    """Transform a recipe's `make_train` so that its runs are populations that search their hyperparameters.

    All members train in one program. After every `every` updates, each of the worst `fraction` copies the state and the
    hyperparameters of a random member of the best `fraction`, if that member has a higher score. Then each of its
    hyperparameters is drawn again with probability 1/4, or else multiplied by one of the `factors`. At least `every`
    updates follow the last selection, and decide which member is the best. With `fraction=0`, this is a random search.

    The result works like any other `make_train`: as a function of a key, in `training.run` and `training.main` with
    checkpoints, on several devices, and with several seeds, each of which is a population. `total_timesteps` counts the
    steps of one member, and `env_steps` those of all. Metrics have shape `[updates, members]`. They include
    "population/NAME", the hyperparameters of the update, and "population/parent", the member whose state each member
    continues afterwards. Evaluations play the member with the highest score.

    Args:
        make_train: `make_train(config, ...) -> Train`.
        ranges: `training.Range(low, high)` for each float field of the configuration to search. Initial values are
            log-uniform, or uniform if `low` is not positive.
        members: number of runs.
        every: number of updates between selections.
        fraction: fraction of the members that is replaced, in [0, 0.5]; unless it is 0, it must be at least one member.
        factors: factors, one of which multiplies a hyperparameter; the product is clipped to the range.
        metric: the metric to maximize. A score is its mean since the last selection over updates in which it is finite.

    Returns:
        `make_train(config, ...) -> Train`; `state.best` is the `TrainState` and the hyperparameters of the best member.

    Example:
        >>> from ppo_parts import training
        >>> from ppo_parts.recipes import cleanrl_ppo
        >>> ranges = {"learning_rate": training.Range(1e-5, 1e-2), "ent_coef": training.Range(0, 0.05)}
        >>> make_train = training.population(cleanrl_ppo.make_train, ranges, members=8)
        >>> train = make_train(cleanrl_ppo.Config(hidden=(8,)))  # then jax.jit(train)(jax.random.key(0))
        >>> train.shapes[1]["population/learning_rate"].shape
        (8,)

    Reference:
        Jaderberg et al. 2017, "Population Based Training of Neural Networks", arXiv:1711.09846, with truncation
        selection and these factors as in its section 4.1.
    """
    if isinstance(make_train, Train):
        says = "must be the make_train of a recipe, got the run that it made: leave out (config)"
        raise UserTypeError(says, where="population", argument="make_train")
    check_count("population", "members", members, 2)
    check_number("population", "fraction", fraction, Range(0, 0.5), schedule=False)
    if fraction and round(fraction * members) < 1:
        says = f"must be at least one of the {members} members, got {fraction}: raise it to {1 / members:g}"
        raise UserValueError(says, where="population", argument="fraction")
    if not isinstance(factors, Sequence) or not factors:
        raise UserTypeError(f"must be a tuple of numbers, got {factors!r}", where="population", argument="factors")
    for factor in factors:
        check_number("population", "factors", factor, POSITIVE, schedule=False)
    if not ranges:
        raise UserValueError("must name a field to search, got {}", where="population", argument="ranges")
    for name, limits in ranges.items():
        if not isinstance(limits, Range):
            says = f"must be a range, such as training.Range(1e-4, 0.1), got {limits!r}"
            raise UserTypeError(says, where="population", argument=f"ranges[{name!r}]")

    @functools.wraps(make_train)
    def make_population(config: Any, *args: Any, **named: Any) -> Population:
        check_fields("population", config, ranges)
        for name, limits in ranges.items():
            if not isinstance(getattr(config, name), float):
                says = f"must be fields of the configuration that hold floats, got {name!r}"
                raise UserValueError(says, where="population", argument="ranges")
            for end in (limits.low, limits.high):  # members are traced, and traced values are not checked
                check_config(dataclasses.replace(config, **{name: float(end)}), where="population")

        def member(**hyperparameters: Any) -> Train:
            return make_train(dataclasses.replace(config, **hyperparameters), *args, **named)

        one = member()
        check_metric("population", one, metric)
        if one.on_host:
            raise UserValueError("population: members cannot share environments on the host: use one in JAX or a sweep")
        if fraction and 2 * every > one.num_updates:
            says = f"must be at most half of the {one.num_updates} updates, so that there is a selection, got {every}"
            raise UserValueError(f"{says}; a random search is fraction=0", where="population", argument="every")
        fields = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
        fields |= {"steps_per_update": members * one.steps_per_update, "recipe": None}
        own: Any = {"ranges": ranges, "members": members, "every": every, "fraction": fraction, "factors": factors}
        return Population(**fields, **own, member=member, metric=metric)

    make_population.__module__ = "__main__"  # the recipe's `make_train` is another function
    return make_population
