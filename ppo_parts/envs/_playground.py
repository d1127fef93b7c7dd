"""MuJoCo Playground's environments."""

from __future__ import annotations

from typing import Any

from ._brax import from_brax
from ._env import Env, check_known


def make(
    name: str,
    *,
    time_limit: int | None = None,
    reset_ratio: int = 1,
    obs_key: str = "state",
    critic_obs_key: str | None = None,
    impl: str = "jax",
    **overrides: Any,
) -> Env:
    """Make one of `mujoco_playground.registry.ALL_ENVS`; `overrides` change its configuration, as in `ctrl_dt=0.02`.

    An episode is truncated after `time_limit` actions; None: the configuration's `episode_length`, divided by its
    `action_repeat`. With `impl="jax"` it runs on every device; "warp", on NVIDIA GPUs only, is faster. `reset_ratio` is
    that of `auto_reset`, `obs_key` and `critic_obs_key` are those of `from_brax`.
    """
    from mujoco_playground import registry

    check_known(name, "MuJoCo Playground", registry.ALL_ENVS)
    config = registry.get_default_config(name)
    config.update({**({"impl": impl} if "impl" in config else {}), **overrides})
    env = registry.load(name, config=config)
    repeat = config.get("action_repeat", 1)  # which Playground leaves to its training wrapper
    limit = -(-config.episode_length // repeat) if time_limit is None else time_limit
    keys: Any = {"obs_key": obs_key, "critic_obs_key": critic_obs_key}
    return from_brax(env, time_limit=limit, reset_ratio=reset_ratio, action_repeat=repeat, **keys)
