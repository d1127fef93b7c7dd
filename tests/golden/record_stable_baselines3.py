"""Record one update of Stable-Baselines3's PPO: `collect_rollouts` in an environment of random numbers, and `train`."""

from __future__ import annotations

import functools
from typing import Any

import _recorder as recorder
import gymnasium as gym
import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv

BUFFERS = ("rewards", "returns", "values", "log_probs", "advantages", "episode_starts")


class Buffer(RolloutBuffer):
    """The library's buffer in float64."""

    def reset(self) -> None:
        super().reset()
        for name in BUFFERS:
            setattr(self, name, getattr(self, name).astype(np.float64))


class Scripted(VecEnv):
    """Returns a rollout step by step, whatever the actions are."""

    def __init__(self, data: recorder.Arrays, seed: int) -> None:
        box = functools.partial(gym.spaces.Box, -1e3, 1e3, dtype=np.float64)
        super().__init__(recorder.ENVS, box((recorder.OBS,)), box((recorder.ACTIONS,)))
        self.data, self.t, self.rng = data, 0, np.random.default_rng(seed)

    def reset(self) -> np.ndarray:
        return self.data["obs"][0]

    def step_async(self, actions: np.ndarray) -> None:
        pass

    def step_wait(self) -> Any:
        data, t = self.data, self.t
        terminated, truncated = data["terminated"][t] > 0, data["truncated"][t] > 0
        infos = [{"TimeLimit.truncated": bool(x)} for x in truncated]
        for n in np.flatnonzero(terminated | truncated):
            infos[n]["terminal_observation"] = data["next_obs"][t, n]
        self.t += 1
        return recorder.after(data, t, self.rng), data["reward"][t].copy(), terminated | truncated, infos

    def close(self) -> None: ...
    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...
    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return []

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


def run(case: str, ours: dict[str, Any], theirs: dict[str, Any], seed: int) -> None:
    recorder.in_double_precision(seed)
    data = recorder.rollout(seed)
    model = PPO(
        "MlpPolicy",
        Scripted(data, seed),
        n_steps=recorder.TIME,
        batch_size=recorder.TIME * recorder.ENVS // recorder.MINIBATCHES,
        n_epochs=recorder.EPOCHS,
        policy_kwargs={"net_arch": [recorder.HIDDEN]},
        rollout_buffer_class=Buffer,
        seed=seed,
        device="cpu",
        **theirs,
    )
    model.set_logger(Logger(None, []))
    policy = model.policy
    actor = [*policy.mlp_extractor.policy_net.parameters(), *policy.action_net.parameters(), policy.log_std]
    critic = [*policy.mlp_extractor.value_net.parameters(), *policy.value_net.parameters()]
    tape = recorder.TorchTape([*actor, *critic])
    _, callback = model._setup_learn(recorder.TIME * recorder.ENVS)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, recorder.TIME)
    kept = {"action": "actions", "value": "values", "log_prob": "log_probs"}
    written = {"advantage": "advantages", "target": "returns"}
    arrays = {ours: getattr(model.rollout_buffer, name).copy() for ours, name in (kept | written).items()}
    tape.watch(policy.optimizer)
    model.train()
    indices = recorder.minibatches([recorder.time_major(p) for p in tape.permutations])
    arrays |= data | tape.read() | {"indices": indices}
    recorder.save("stable_baselines3", "stable-baselines3", case, seed, ours, arrays)


def options(seed: int) -> None:
    ours = {"learning_rate": 2e-2, "gamma": 0.95, "gae_lambda": 0.9, "clip_eps": 0.1, "entropy_coef": 0.01}
    theirs = {"learning_rate": 2e-2, "gamma": 0.95, "gae_lambda": 0.9, "clip_range": 0.1, "ent_coef": 0.01}
    ours |= {"value_clip_eps": 0.1, "value_coef": 0.8, "target_kl": 0.01, "max_grad_norm": 0.3}
    theirs |= {"clip_range_vf": 0.1, "vf_coef": 0.8, "target_kl": 0.01, "max_grad_norm": 0.3}
    run("options", ours, theirs, seed)


if __name__ == "__main__":
    recorder.record({"default": functools.partial(run, "default", {}, {}), "options": options})
