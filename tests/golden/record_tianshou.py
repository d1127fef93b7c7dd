"""Record one update of Tianshou's PPO, `PPO.update` on a buffer that was filled by its initial policy."""

from __future__ import annotations

import functools
from typing import Any

import _recorder as recorder
import gymnasium as gym
import numpy as np
import torch
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Batch, VectorReplayBuffer
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic
from tianshou.utils.torch_utils import policy_within_training_step, torch_train_mode


class Recorded(PPO):
    """Keeps the batch with its advantages, as they are after preprocessing or recomputing."""

    kept: Any = None

    def _add_returns_and_advantages(self, *args: Any) -> Any:
        self.kept = super()._add_returns_and_advantages(*args)
        return self.kept


def log_prob(policy: Any, obs: np.ndarray, action: np.ndarray) -> np.ndarray:
    dist = policy(Batch(obs=obs.reshape(-1, recorder.OBS), info=Batch())).dist
    return dist.log_prob(torch.as_tensor(action.reshape(-1, recorder.ACTIONS))).detach().numpy().reshape(obs.shape[:2])


def run(case: str, ours: dict[str, Any], theirs: dict[str, Any], adam: dict[str, Any], seed: int) -> None:
    recorder.in_double_precision(seed)
    data, rng = recorder.rollout(seed), np.random.default_rng(seed)
    nets = (Net(state_shape=recorder.OBS, hidden_sizes=[recorder.HIDDEN], activation=torch.nn.Tanh) for _ in range(2))
    actor = ContinuousActorProbabilistic(preprocess_net=next(nets), action_shape=recorder.ACTIONS, unbounded=True)
    critic = ContinuousCritic(preprocess_net=next(nets))
    box = functools.partial(gym.spaces.Box, -1e3, 1e3, dtype=np.float64)
    policy = ProbabilisticActorPolicy(
        actor=actor,
        dist_fn=lambda mean_and_std: torch.distributions.Independent(torch.distributions.Normal(*mean_and_std), 1),
        action_space=box((recorder.ACTIONS,)),
        observation_space=box((recorder.OBS,)),
    )
    algorithm = Recorded(policy=policy, critic=critic, optim=AdamOptimizerFactory(**adam), **theirs)
    names = [*actor.preprocess.parameters(), *actor.mu.parameters(), actor.sigma_param]
    tape = recorder.TorchTape([*names, *critic.preprocess.parameters(), *critic.last.parameters()])

    with torch.no_grad():
        mean, std = (x.numpy() for x in actor(data["obs"].reshape(-1, recorder.OBS))[0])
        action = (mean + std * rng.normal(size=mean.shape)).reshape(recorder.TIME, recorder.ENVS, -1)
        value = critic(data["obs"].reshape(-1, recorder.OBS)).numpy().reshape(recorder.TIME, recorder.ENVS)
    arrays = {"action": action, "value": value, "log_prob": log_prob(policy, data["obs"], action)}
    buffer = VectorReplayBuffer(recorder.TIME * recorder.ENVS, recorder.ENVS)
    for t in range(recorder.TIME):
        step = {name: data[name][t] for name in ("obs",)} | {"obs_next": data["next_obs"][t], "act": action[t]}
        flags = {name: data[name][t] > 0 for name in ("terminated", "truncated")}
        info = np.array([{}] * recorder.ENVS)
        buffer.add(Batch(rew=data["reward"][t], info=info, **step, **flags), buffer_ids=np.arange(recorder.ENVS))
    tape.watch(algorithm.optim._optim)
    with policy_within_training_step(policy), torch_train_mode(algorithm):
        size = recorder.TIME * recorder.ENVS // recorder.MINIBATCHES
        algorithm.update(buffer, batch_size=size, repeat=recorder.EPOCHS)
    for name, theirs_ in {"advantage": "adv", "target": "returns"}.items():
        kept = getattr(algorithm.kept, theirs_).numpy()
        arrays[name] = kept.reshape(recorder.ENVS, recorder.TIME).T
    indices = recorder.minibatches([recorder.time_major(p) for p in tape.permutations])
    arrays |= data | tape.read() | {"indices": indices}
    recorder.save("tianshou", "tianshou", case, seed, ours, arrays)


def options(seed: int) -> None:
    common = {"gamma": 0.95, "gae_lambda": 0.9, "dual_clip": 1.5, "max_grad_norm": 0.3, "recompute_advantage": True}
    ours = {"learning_rate": 2e-2, "clip_eps": 0.1, "value_clip_eps": 0.1, "value_coef": 0.8, "entropy_coef": 0.02}
    theirs = {"eps_clip": 0.1, "value_clip": True, "vf_coef": 0.8, "ent_coef": 0.02, "advantage_normalization": False}
    run("options", common | ours | {"advantage_normalize": False}, common | theirs, {"lr": 2e-2}, seed)


if __name__ == "__main__":
    recorder.record({"default": functools.partial(run, "default", {}, {}, {}), "options": options})
