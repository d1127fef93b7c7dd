"""Train the agents of docs/play.md, and save them at several checkpoints: `python -m docs._ext.agents`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import _seeds, classic
from ppo_parts import training
from ppo_parts.commands import export
from ppo_parts.recipes import mujoco_ppo

WRITTEN = Path(__file__).parents[1] / "_static" / "agents.js"
HIDDEN = (16, 16)
BREAKOUT = classic.Config(  # it needs much entropy in the beginning
    env_id="Breakout-MinAtar", total_timesteps=5_000_000, num_envs=64, num_steps=32, learning_rate=3e-3, gae_lambda=0.9,
    ent_coef=0.1, normalize_observations=False, normalize_rewards=False, refresh="rollout", hidden=HIDDEN,
)  # fmt: skip
CONFIGS = {
    "CartPole-v1": dataclasses.replace(classic.PRESETS["cartpole"], normalize_observations=False, hidden=HIDDEN),
    "MountainCar-v0": dataclasses.replace(classic.PRESETS["mountain_car_250k"], hidden=HIDDEN),
    "Breakout-MinAtar": BREAKOUT,
}
CELLS = np.zeros((10, 10, 4))  # cells of Breakout that can be occupied: by the paddle, the ball, its trail, bricks
CELLS[9, :, 0] = CELLS[:, :, 1:3] = CELLS[1:4, :, 3] = 0.5
USUAL = {
    "CartPole-v1": ([0, 0, 0, 0], [0.1, 0.1, 0.1, 0.1]),
    "MountainCar-v0": ([-0.5, 0], [0.1, 0.02]),
    "Breakout-MinAtar": (CELLS.ravel(), CELLS.ravel()),
}
"""Observations that no policy clips: their middle, and how far they deviate from it."""
WALKER = mujoco_ppo.Config(env_id="gym:HalfCheetah-v5", total_timesteps=300_000)
FRAMES = 100


def layers_of(train: training.Train, state: Any, middle: np.ndarray, widths: np.ndarray) -> list[Any]:
    """Return the actor's kernels and biases, with the standardization of observations folded into the first ones."""
    params = jax.tree.map(np.asarray, state.learner.params["params"])
    layers = [[np.float64(params[f"Dense_{i}"][name]) for name in ("kernel", "bias")] for i in range(len(HIDDEN) + 1)]
    if train.env.observe is not None:
        probes = np.float32(np.vstack([middle, middle + np.diag(widths)]))
        seen = np.float64(train.env.observe(state.rollout.env_state, probes))
        slope = np.diag(seen[1:] - seen[0]) / widths
        kernel, bias = layers[0]
        layers[0] = [slope[:, None] * kernel, bias + (seen[0] - slope * middle) @ kernel]
    layers[0][0] = layers[0][0] * (widths > 0)[:, None]
    layers = [[np.round(x, 3) + 0.0 for x in layer] for layer in layers]
    x = obs = middle + widths * np.random.default_rng(0).uniform(-1, 1, (50, len(middle)))
    for depth, (kernel, bias) in enumerate(layers):
        x = x @ kernel + bias
        x = np.tanh(x) if depth < len(HIDDEN) else x
    act, rows = export.make_policy_function(train, state)
    expected = act(np.float32(obs).reshape(-1, *rows["obs"].shape))["logits"]
    np.testing.assert_allclose(jax.nn.softmax(x), jax.nn.softmax(expected), atol=0.02)
    return [np.vstack([kernel, bias]).tolist() for kernel, bias in layers]


def frames_of(train: training.Train, state: Any) -> Iterator[list[int]]:
    """Let the policy walk from a fixed start, and yield its position and the ends of its limbs, (x, z), in cm."""
    import gymnasium

    act, _ = export.make_policy_function(train, state)
    act = jax.jit(act)
    env = gymnasium.make(WALKER.env_id.removeprefix("gym:"))
    obs, _ = env.reset(seed=0)
    data, model = env.unwrapped.data, env.unwrapped.model  # type: ignore[attr-defined]
    limbs = [i for i, body in enumerate(model.geom_bodyid) if body]  # limbs are capsules; body 0 is the ground
    for _ in range(FRAMES):
        reach = data.geom_xmat[limbs].reshape(-1, 3, 3)[:, :, 2] * model.geom_size[limbs, 1:2]
        middle = data.geom_xpos[limbs] - [data.qpos[0], 0, 0]
        ends = np.hstack([(middle - reach)[:, ::2], (middle + reach)[:, ::2]])
        yield [round(100 * x) for x in (data.qpos[0], *ends.ravel())]
        obs, *_ = env.step(np.asarray(act(np.float32(obs)[None])["action"][0]))


def learned(
    env_id: str, train: training.Train, checkpoints: int, kind: str, saved: Callable[..., Any]
) -> dict[str, Any]:
    """Train one seed; return its learning curve, and what `saved` returns at each checkpoint."""
    found: dict[str, Any] = {"env": env_id, "steps": [], kind: []}
    returns: list[float] = []
    for stage in _seeds.train_in_stages(train, _seeds.make_keys(range(1, 2)), checkpoints):
        found["steps"].append(stage.env_steps)
        found[kind].append(saved(train, jax.tree.map(lambda x: x[0], stage.state)))  # the state of the only seed
        returns += np.asarray(stage.metrics["episode_return"][0], float).tolist()
    parts = np.array_split(np.array(returns), 25)
    found["returns"] = [round(float(np.nanmean(part)), 1) if np.isfinite(part).any() else None for part in parts]
    return found


if __name__ == "__main__":
    agents = []
    for env_id, config in CONFIGS.items():
        middle, widths = map(np.array, USUAL[env_id])
        agents.append(
            learned(
                env_id, classic.make_train(config), 4 if config is BREAKOUT else 8, "policies",
                lambda train, state, usual=(middle, widths): layers_of(train, state, *usual),
            )
        )  # fmt: skip
    walker = mujoco_ppo.make_train(WALKER)
    agents.append(learned("HalfCheetah-v5", walker, 6, "frames", lambda *run: list(frames_of(*run))))
    WRITTEN.write_text(f"const agentsTable = {json.dumps(agents, separators=(',', ':'))};\n")
