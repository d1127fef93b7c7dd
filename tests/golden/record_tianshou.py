"""Record one update of Tianshou's PPO, `PPO.update` on a buffer that was filled by its initial policy."""

from typing import Any

import _recorder as recorder
import numpy as np
import torch
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Batch, VectorReplayBuffer
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic
from tianshou.utils.torch_utils import policy_within_training_step, torch_train_mode

OPTIONS = {
    "gamma": ("gamma", 0.95), "gae_lambda": ("gae_lambda", 0.9), "dual_clip": ("dual_clip", 1.5),
    "max_grad_norm": ("max_grad_norm", 0.3), "recompute_advantage": ("recompute_advantage", True),
    "advantage_normalize": ("advantage_normalization", False), "clip_eps": ("eps_clip", 0.1),
    "value_coef": ("vf_coef", 0.8), "entropy_coef": ("ent_coef", 0.02), "learning_rate": ("lr", 2e-2),
}  # fmt: skip


class Recorded(PPO):
    """Keeps the batch with its advantages, as they are after preprocessing or recomputing."""

    kept: Any = None

    def _add_returns_and_advantages(self, *args: Any) -> Any:
        self.kept = super()._add_returns_and_advantages(*args)
        return self.kept


def log_prob(policy: Any, obs: np.ndarray, action: np.ndarray) -> np.ndarray:
    dist = policy(Batch(obs=obs.reshape(-1, recorder.OBS), info=Batch())).dist
    return dist.log_prob(torch.as_tensor(action.reshape(-1, recorder.ACTIONS))).detach().numpy().reshape(obs.shape[:2])


def update(seed: int, **settings: Any) -> recorder.Arrays:
    recorder.in_double_precision(seed)
    data, rng = recorder.rollout(seed), np.random.default_rng(seed)
    nets = (Net(state_shape=recorder.OBS, hidden_sizes=[recorder.HIDDEN], activation=torch.nn.Tanh) for _ in range(2))
    actor = ContinuousActorProbabilistic(preprocess_net=next(nets), action_shape=recorder.ACTIONS, unbounded=True)
    critic = ContinuousCritic(preprocess_net=next(nets))
    policy = ProbabilisticActorPolicy(
        actor=actor,
        dist_fn=lambda mean_and_std: torch.distributions.Independent(torch.distributions.Normal(*mean_and_std), 1),
        action_space=recorder.space(recorder.ACTIONS),
        observation_space=recorder.space(recorder.OBS),
    )
    adam = AdamOptimizerFactory(**({"lr": settings.pop("lr")} if "lr" in settings else {}))
    algorithm = Recorded(policy=policy, critic=critic, optim=adam, **settings)
    tape = recorder.TorchTape(
        *actor.preprocess.parameters(), *actor.mu.parameters(), actor.sigma_param, *critic.preprocess.parameters(),
        *critic.last.parameters(),
    )  # fmt: skip

    with torch.no_grad():
        mean, std = (x.numpy() for x in actor(data["obs"].reshape(-1, recorder.OBS))[0])
        action = (mean + std * rng.normal(size=mean.shape)).reshape(recorder.TIME, recorder.ENVS, -1)
        value = critic(data["obs"].reshape(-1, recorder.OBS)).numpy().reshape(recorder.TIME, recorder.ENVS)
    arrays = {"action": action, "value": value, "log_prob": log_prob(policy, data["obs"], action)}
    buffer = VectorReplayBuffer(recorder.TIME * recorder.ENVS, recorder.ENVS)
    for t in range(recorder.TIME):
        step = {"obs": data["obs"][t], "obs_next": data["next_obs"][t], "act": action[t], "rew": data["reward"][t]}
        step |= {name: data[name][t] > 0 for name in ("terminated", "truncated")}
        buffer.add(Batch(info=np.array([{}] * recorder.ENVS), **step), buffer_ids=np.arange(recorder.ENVS))
    tape.watch(algorithm.optim._optim)
    with policy_within_training_step(policy), torch_train_mode(algorithm):
        algorithm.update(buffer, batch_size=recorder.MINIBATCH, repeat=recorder.EPOCHS)
    arrays |= {"advantage": recorder.by_time(algorithm.kept.adv), "target": recorder.by_time(algorithm.kept.returns)}
    indices = recorder.minibatches([recorder.time_major(p) for p in tape.permutations])
    return arrays | data | tape.read() | {"indices": indices}


if __name__ == "__main__":
    clip = {"value_clip_eps": 0.1}  # where the library takes eps_clip
    recorder.record_library("tianshou", "tianshou", update, OPTIONS, ours=clip, theirs={"value_clip": True})
