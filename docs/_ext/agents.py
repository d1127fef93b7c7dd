"""Train the agents of docs/play.md, and write their policies at several checkpoints: `python -m docs._ext.agents`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import _runs, classic
from ppo_parts.commands import export

WRITTEN = Path(__file__).parents[1] / "_static" / "agents.js"
HIDDEN = (16, 16)
CONFIGS = {
    "CartPole-v1": dataclasses.replace(classic.PRESETS["cartpole"], normalize_observations=False, hidden=HIDDEN),
    "MountainCar-v0": dataclasses.replace(classic.PRESETS["mountain_car_250k"], hidden=HIDDEN),
}
USUAL = {"CartPole-v1": ([0, 0, 0, 0], [0.1, 0.1, 0.1, 0.1]), "MountainCar-v0": ([-0.5, 0], [0.1, 0.02])}
"""Observations that no policy clips: the middle, and how far from it they go."""
CHECKPOINTS = 8


def layers_of(train: Any, state: Any, middle: np.ndarray, widths: np.ndarray) -> list[Any]:
    """Return the actor's kernels and biases, with the standardization of observations in the first of them."""
    params = jax.tree.map(np.asarray, state.learner.params["params"])
    layers = [[np.float64(params[f"Dense_{i}"][name]) for name in ("kernel", "bias")] for i in range(len(HIDDEN) + 1)]
    if train.env.observe is not None:
        probes = np.float32(np.vstack([middle, middle + np.diag(widths)]))
        seen = np.float64(train.env.observe(state.rollout.env_state, probes))
        slope = np.diag(seen[1:] - seen[0]) / widths
        kernel, bias = layers[0]
        layers[0] = [slope[:, None] * kernel, bias + (seen[0] - slope * middle) @ kernel]
    x = obs = middle + widths * np.random.default_rng(0).uniform(-1, 1, (50, len(middle)))
    for depth, (kernel, bias) in enumerate(layers):
        x = x @ kernel + bias
        x = np.tanh(x) if depth < len(HIDDEN) else x
    act, _ = export.policy_function(train, state)
    np.testing.assert_allclose(jax.nn.log_softmax(x), act(np.float32(obs))["logits"], atol=1e-3)
    return [[[float(f"{w:.6g}") for w in row] for row in np.vstack([kernel, bias]).tolist()] for kernel, bias in layers]


def learned(env_id: str) -> dict[str, Any]:
    """Train one seed, and return its learning curve and what it knew at each checkpoint."""
    train = classic.make_train(CONFIGS[env_id])
    keys = _runs.keys_of(range(1, 2))
    middle, widths = map(np.array, USUAL[env_id])

    def policy(state: Any) -> list[Any]:
        return layers_of(train, jax.tree.map(lambda x: x[0], state), middle, widths)  # of the only seed

    found: dict[str, Any] = {"env": env_id, "steps": [], "policies": []}
    returns = []
    for stage in _runs.stages(train, keys, CHECKPOINTS):
        found["steps"].append(stage.env_steps)
        found["policies"].append(policy(stage.state))
        returns += np.asarray(stage.metrics["episode_return"][0], float).tolist()
    parts = np.array_split(np.array(returns), 40)
    found["returns"] = [round(float(np.nanmean(part)), 1) if np.isfinite(part).any() else None for part in parts]
    return found


if __name__ == "__main__":
    agents = [learned(env_id) for env_id in CONFIGS]
    WRITTEN.write_text(f"const agentsTable = {json.dumps(agents, separators=(',', ':'))};\n")
