"""Train many seeds in one program: keys, measures of each seed, and means and intervals over all of them."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import stdtrit

from ppo_parts import training
from ppo_parts.errors import UserValueError
from ppo_parts.training._program import compiler_options
from ppo_parts.training._statistics import FEW


def select_seeds(options: Any) -> range:
    """Return the seeds that a command line names."""
    return range(options.first_seed, options.first_seed + options.seeds)


def make_keys(seeds: range) -> jax.Array:
    """Make a key for each seed."""
    return jax.vmap(jax.random.key)(jnp.arange(seeds.start, seeds.stop))


def make_eval_key(key: jax.Array) -> jax.Array:
    """Make a key for evaluations, which training does not use."""
    return jax.random.fold_in(key, 2**20)


def vectorize(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a program that maps `run` over its arguments, such as the keys of seeds, and returns NumPy arrays."""
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
    """One stop of a run of several seeds; metrics are those since the previous stop, `[seeds, updates]`."""

    number: int
    last: bool
    env_steps: int
    state: Any
    metrics: Any


def train_in_stages(train: training.Train, keys: jax.Array, number: int) -> Iterator[Stage]:
    """Train the seeds of `keys` side by side, and stop `number` times; intervals differ by at most one update."""
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


def show_interval(found: Mapping[str, Any], digits: int | None = None) -> str:
    """Format the mean over seeds and its 95 % interval (none for one seed), from the output of `training.summary`."""
    digits = int(abs(found["mean"]) < 20) if digits is None else digits
    ends = training.summary(found["per_seed"])["mean_95"]  # old records have a bootstrap interval instead
    return show_ends(found["mean"], ends, f".{digits}f")


def show_ends(middle: float, ends: Any, form: str) -> str:
    """Format a number and the ends of its interval, if it has one."""
    return format(middle, form) + (f" [{', '.join(format(end, form) for end in ends)}]" if ends else "")


def show_iqm(found: dict[str, Any], digits: int = 1) -> str:
    """Format the interquartile mean over seeds and its 95 % bootstrap interval, from `training.summary`."""
    return show_ends(found["iqm"], found["iqm_95"], f".{digits}f")


def compare_means(now: Sequence[float], before: Sequence[float]) -> dict[str, Any]:
    """Compare two means over seeds that are not paired: their difference, and its 95 % interval (Welch's t).

    `detectable` is the size of a difference that this many seeds detect with a power of 80 %.

    Reference: Welch 1947, doi:10.1093/biomet/34.1-2.28.
    """
    variances = [np.var(x, ddof=1) / len(x) for x in (now, before)]  # the variances of the means
    error = np.sqrt(sum(variances))
    separate = sum(each**2 / (len(x) - 1) for each, x in zip(variances, (now, before), strict=True))
    level, power = stdtrit(error**4 / separate if error else 1, (0.975, 0.8))
    mean, half = float(np.mean(now) - np.mean(before)), float(level * error)
    return {"mean": mean, "95": [mean - half, mean + half], "detectable": half + float(power * error)}


def compare_pairs(now: Any, before: Any, comparisons: int = 1) -> dict[str, Any]:
    """Compare pairs: the mean difference and its 95 % interval (Student's t), simultaneous for all comparisons.

    Each interval has the level 1 - 0.05 / comparisons.

    Reference: Dunn 1961, doi:10.1080/01621459.1961.10482090.
    """
    differences = np.subtract(now, before)
    error = np.std(differences, ddof=1) / len(differences) ** 0.5
    mean, half = float(np.mean(differences)), float(stdtrit(len(differences) - 1, 1 - 0.025 / comparisons) * error)
    return {"mean": mean, "95": [mean - half, mean + half]}


def show_change(change: dict[str, Any], form: str = "+.0f") -> str:
    """Format a difference and its interval."""
    return show_ends(change["mean"], change["95"], form)


def show_visible(change: dict[str, Any], seeds: int) -> str:
    """Format a difference and its interval, in bold if it excludes 0 and there are at least five seeds."""
    text, (low, high) = show_change(change, "+.3g"), change["95"]
    return f"**{text}**" if seeds >= FEW and (low > 0 or high < 0) else text
