"""Many seeds of a training run in one program: their keys, and what is measured of each."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts import training
from ppo_parts.errors import UserValueError
from ppo_parts.training._program import compiler_options


def select_seeds(options: Any) -> range:
    """The seeds of a command line."""
    return range(options.first_seed, options.first_seed + options.seeds)


def make_keys(seeds: range) -> jax.Array:
    """A key for each seed."""
    return jax.vmap(jax.random.key)(jnp.arange(seeds.start, seeds.stop))


def make_eval_key(key: jax.Array) -> jax.Array:
    """A key that training does not use, for evaluations."""
    return jax.random.fold_in(key, 2**20)


def vectorize(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` for each entry of its arguments, such as the keys of seeds, in one program; NumPy arrays of the results."""
    program = jax.jit(jax.vmap(run), compiler_options=compiler_options())
    return lambda *columns: jax.tree.map(np.asarray, program(*columns))


def measure_training(train: training.Train, seed: jax.Array) -> dict[str, jax.Array]:
    """Train one seed; `return_over_training` is the mean over all episodes of the training."""
    metrics = train(jax.random.key(seed)).metrics
    returns, episodes = metrics["episode_return"], metrics["episodes"]
    total = jnp.where(episodes > 0, returns * episodes, 0)
    return {
        "return_over_training": jnp.sum(total) / jnp.sum(episodes),
        "last_100_episodes_return": training.last_episodes_return(returns, episodes),
    }


class Stage(NamedTuple):
    """A run of several seeds at one of its stops; metrics are those since the stop before, `[seeds, updates]`."""

    number: int
    last: bool
    env_steps: int
    state: Any
    metrics: Any


def train_in_stages(train: training.Train, keys: jax.Array, number: int) -> Iterator[Stage]:
    """Train the seeds of `keys` side by side, and stop `number` times, at intervals that differ by one update."""
    if number > train.num_updates:
        says = f"a run of {train.num_updates} updates cannot stop {number} times: train longer, or evaluate less often"
        raise UserValueError(says)

    @functools.partial(jax.jit, static_argnums=1)
    def advance(states: Any, length: int) -> Any:
        return jax.vmap(lambda state: jax.lax.scan(lambda x, _: train.step(x), state, None, length=length))(states)

    state = jax.jit(jax.vmap(train.init))(keys)
    stops = [train.num_updates * (i + 1) // number for i in range(number)]
    for i, (before, stop) in enumerate(itertools.pairwise([0, *stops])):
        state, metrics = advance(state, stop - before)
        yield Stage(i, i + 1 == number, stop * train.steps_per_update, state, metrics)
