"""Levels chosen by regret against random ones: return in mazes that are harder than nearly all random ones.

    python -m benchmarks levels --first-seed 101 --json mine.jsonl

The command runs the code of docs/gallery/levels.md. All arms take the same number of environment steps, even if some
do not learn from all of them. `uniform` draws a new level for each episode.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts import envs, training
from ppo_parts.recipes import cleanrl_ppo

from ._cards import load_card
from ._records import claim, make_parser, write, write_part
from ._seeds import make_eval_key, make_keys, select_seeds, show_iqm, vectorize

HARD, LEVELS, EPISODES = 7, 128, 1000
"""The least distance from start to goal in held-out levels; the number of these levels; episodes after training."""


def compute_distance(card: Any, level: Any) -> jax.Array:
    """Return the number of moves from start to goal; it is at least `CELLS` if the goal cannot be reached."""
    cells, actions = jnp.arange(card.CELLS), jnp.arange(len(card.MOVES))
    after = jax.vmap(lambda cell: jax.vmap(lambda action: card.moved(level.walls, cell, action))(actions))(cells)
    far = jnp.where(cells == level.goal, 0, card.CELLS)
    nearer = lambda _, far: jnp.minimum(far, 1 + jnp.min(far[after], axis=1))  # noqa: E731
    return jax.lax.fori_loop(0, card.CELLS, nearer, far)[level.start]


def select_held_out(card: Any) -> tuple[Any, float]:
    """Select random levels with a long way to the goal; return them, and the share of levels that are this hard."""
    pool = jax.vmap(card.random_level)(jax.random.split(jax.random.key(2**20), 2**14))
    far = np.asarray(jax.jit(jax.vmap(lambda level: compute_distance(card, level)))(pool))
    rows = np.flatnonzero((far >= HARD) & (far < card.CELLS))
    return jax.tree.map(lambda x: x[rows[:LEVELS]], pool), len(rows) / len(far)


def make_arms(card: Any) -> dict[str, training.Train]:
    """Make runs that differ in their levels."""

    def reset(key: jax.Array) -> Any:
        level = card.random_level(key)
        return card.State(level, 0, level.start), card.seen(level, level.start)

    env = card.plr.env
    uniform = envs.auto_reset(reset, card.step, env.observation_space, env.action_space, time_limit=card.LIMIT)
    return {
        "uniform": cleanrl_ppo.make_train(card.config, uniform),
        "PLR": card.plr,
        "robust PLR": card.make_train(card.config, card.first, card.random_level, robust=True),
        "ACCEL": card.accel,
    }


def main() -> None:
    """Run the benchmark from the command line."""
    options = make_parser(__doc__, seeds=10, first_seed=1, json="benchmarks/results/levels.jsonl").parse_args()
    [address] = claim(options, f"maze_{options.first_seed}")
    card, seeds, found = load_card("levels", "Prioritized Level Replay"), select_seeds(options), {}
    hard, share = select_held_out(card)
    settings = {"config": dataclasses.asdict(card.config), "seeds": list(seeds), "least_moves": HARD}
    settings |= {"share_of_random_levels": share}
    for arm, train in make_arms(card).items():

        def run(key: jax.Array, train: training.Train = train) -> jax.Array:
            params, maze = train(key).state.learner.params, card.maze(hard)
            played = training.evaluate_episodes(maze, train.policy, params, make_eval_key(key), EPISODES)
            return jnp.mean(played.episode_return)

        returns = training.summary(vectorize(run)(make_keys(seeds)))
        found[arm] = {"held_out": returns}
        print(f"{arm:10} {show_iqm(returns, 3)}", flush=True)
        write_part(address, settings | {"arms": found})
    write(address, settings | {"arms": found})
