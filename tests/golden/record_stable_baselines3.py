"""Record one update of Stable-Baselines3's PPO: `collect_rollouts` in an environment of random numbers, and `train`."""

from typing import Any

import _recorder as recorder
import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv

BUFFERS = ("rewards", "returns", "values", "log_probs", "advantages", "episode_starts")
OPTIONS = {
    "learning_rate": ("learning_rate", 2e-2), "gamma": ("gamma", 0.95), "gae_lambda": ("gae_lambda", 0.9),
    "clip_eps": ("clip_range", 0.1), "entropy_coef": ("ent_coef", 0.01), "value_clip_eps": ("clip_range_vf", 0.1),
    "value_coef": ("vf_coef", 0.8), "target_kl": ("target_kl", 0.01), "max_grad_norm": ("max_grad_norm", 0.3),
}  # fmt: skip


class Buffer(RolloutBuffer):
    """The library's buffer in float64."""

    def reset(self) -> None:
        super().reset()
        for name in BUFFERS:
            setattr(self, name, getattr(self, name).astype(np.float64))


class Environments(VecEnv):
    """The scripted environments by the library's protocol."""

    def __init__(self, scripted: recorder.Scripted) -> None:
        super().__init__(recorder.ENVS, recorder.space(recorder.OBS), recorder.space(recorder.ACTIONS))
        self.scripted = scripted

    def reset(self) -> np.ndarray:
        return self.scripted.data["obs"][0]

    def step_wait(self) -> Any:
        obs, reward, terminated, truncated, final_obs = self.scripted.next()
        infos = [{"TimeLimit.truncated": bool(x)} for x in truncated]
        for n in np.flatnonzero(terminated | truncated):
            infos[n]["terminal_observation"] = final_obs[n]
        return obs, reward, terminated | truncated, infos

    def step_async(self, actions: np.ndarray) -> None: ...
    def close(self) -> None: ...
    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...
    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return []

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


def update(seed: int, **settings: Any) -> recorder.Arrays:
    recorder.in_double_precision(seed)
    scripted = recorder.Scripted(seed)
    model = PPO(
        "MlpPolicy", Environments(scripted), n_steps=recorder.TIME, batch_size=recorder.MINIBATCH,
        n_epochs=recorder.EPOCHS, policy_kwargs={"net_arch": [recorder.HIDDEN]}, rollout_buffer_class=Buffer, seed=seed,
        device="cpu", **settings,
    )  # fmt: skip
    model.set_logger(Logger(None, []))
    policy, buffer = model.policy, model.rollout_buffer
    actor = [*policy.mlp_extractor.policy_net.parameters(), *policy.action_net.parameters(), policy.log_std]
    critic = [*policy.mlp_extractor.value_net.parameters(), *policy.value_net.parameters()]
    tape = recorder.TorchTape(*actor, *critic)
    _, callback = model._setup_learn(recorder.TIME * recorder.ENVS)
    model.collect_rollouts(model.env, callback, buffer, recorder.TIME)
    kept = {"action": "actions", "value": "values", "log_prob": "log_probs"}
    kept |= {"advantage": "advantages", "target": "returns"}
    arrays = {ours: getattr(buffer, theirs).copy() for ours, theirs in kept.items()}
    tape.watch(policy.optimizer)
    model.train()
    indices = recorder.minibatches([recorder.time_major(p) for p in tape.permutations])
    return arrays | scripted.data | tape.read() | {"indices": indices}


if __name__ == "__main__":
    recorder.record_library("stable_baselines3", "stable-baselines3", update, OPTIONS)
