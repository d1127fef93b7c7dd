"""Record one update of rl_games' PPO for continuous actions: `train_epoch` in an environment of random numbers.

Its code has few defaults; the case `default` has the settings of its own `configs/mujoco/ant_envpool.yaml`, except for
sizes, the separate networks, the smooth clamp and mixed precision.
"""

from __future__ import annotations

import os

os.environ["PYTORCH_JIT"] = "0"  # so that its statistics are float64, too

import functools
import tempfile
from typing import Any

import _recorder as recorder
import gymnasium as gym
import numpy as np
import torch

SETTINGS = {
    "gamma": 0.99, "tau": 0.95, "learning_rate": 3e-4, "lr_schedule": "adaptive", "kl_threshold": 0.008,
    "schedule_type": "legacy", "grad_norm": 1.0, "truncate_grads": True, "entropy_coef": 0.0, "e_clip": 0.2,
    "clip_value": True, "critic_coef": 2, "bound_loss_type": "regularisation", "bounds_loss_coef": 0.0,
    "normalize_input": False, "normalize_value": True, "normalize_advantage": True, "value_bootstrap": True,
    "mini_epochs": recorder.EPOCHS, "num_actors": recorder.ENVS, "horizon_length": recorder.TIME,
    "minibatch_size": recorder.TIME * recorder.ENVS // recorder.MINIBATCHES, "device": "cpu",
}  # fmt: skip
SPACE = {"mu_activation": "None", "sigma_activation": "None", "mu_init": {"name": "default"}, "fixed_sigma": True}
NETWORK = {
    "name": "actor_critic",
    "separate": True,
    "space": {"continuous": SPACE | {"sigma_init": {"name": "const_initializer", "val": -0.5}}},
    "mlp": {"units": [recorder.HIDDEN], "activation": "tanh", "initializer": {"name": "default"}},
}


class Scripted:
    """Returns a rollout step by step, whatever the actions are."""

    def __init__(self, data: recorder.Arrays, seed: int) -> None:
        self.data, self.t, self.rng = data, 0, np.random.default_rng(seed)

    def reset(self) -> torch.Tensor:
        return torch.as_tensor(self.data["obs"][0])

    def step(self, actions: torch.Tensor) -> Any:
        data, t = self.data, self.t
        self.t += 1
        ended, time_outs = data["terminated"][t] + data["truncated"][t] > 0, torch.as_tensor(data["truncated"][t])
        obs, reward = torch.as_tensor(recorder.after(data, t, self.rng)), torch.tensor(data["reward"][t])
        return obs, reward, torch.as_tensor(ended).byte(), {"time_outs": time_outs}

    def set_train_info(self, frame: int, agent: Any) -> None: ...


def run(case: str, ours: dict[str, Any], theirs: dict[str, Any], moments: list[float], seed: int) -> None:
    recorder.in_double_precision(seed)
    torch.float32 = torch.float64  # the dtype of the experience buffer
    from rl_games.algos_torch.a2c_continuous import A2CAgent
    from rl_games.common.algo_observer import AlgoObserver
    from rl_games.common.tr_helpers import DefaultRewardsShaper

    data = recorder.rollout(seed)
    box = functools.partial(gym.spaces.Box, -1.0, 1.0, dtype=np.float64)
    spaces = {"observation_space": box((recorder.OBS,)), "action_space": box((recorder.ACTIONS,))}
    with tempfile.TemporaryDirectory() as folder:
        config = SETTINGS | theirs | {"name": "recorded", "env_name": "scripted", "train_dir": folder}
        config |= {"env_info": spaces, "vec_env": Scripted(data, seed), "reward_shaper": DefaultRewardsShaper()}
        config["features"] = {"observer": AlgoObserver()}
        model = {"name": "continuous_a2c_logstd"}
        agent = A2CAgent("recorded", {"config": config, "network": NETWORK, "model": model, "algo": {}})
        agent.init_tensors()
        agent.obs = agent.env_reset()
        if moments:  # of a run that is under way
            statistics = agent.model.value_mean_std
            for tensor, x in zip(
                (statistics.running_mean, statistics.running_var, statistics.count), moments, strict=True
            ):
                tensor.fill_(x)
        net = agent.model.a2c_network
        net.mu.weight.data *= 4  # so that some means are out of bounds
        policy = [*net.actor_mlp.parameters(), *net.mu.parameters(), net.sigma]
        tape = recorder.TorchTape([*policy, *net.critic_mlp.parameters(), *net.value.parameters()])
        with torch.no_grad():
            obs = torch.as_tensor(data["obs"])
            arrays = {"value": net.value(net.critic_mlp(obs))[..., 0].numpy()}
        tape.watch(agent.optimizer)
        agent.train_epoch()
    buffer, dataset = agent.experience_buffer.tensor_dict, agent.dataset.values_dict
    arrays |= {"action": buffer["actions"].numpy(), "log_prob": -buffer["neglogpacs"].numpy()}
    for name, theirs_ in {"advantage": "advantages", "target": "returns"}.items():
        arrays[name] = dataset[theirs_].numpy().reshape(recorder.ENVS, recorder.TIME).T
    if moments:
        arrays["moments"] = np.array(moments)
    ours |= {"num_envs": recorder.ENVS, "num_steps": recorder.TIME, "num_actions": recorder.ACTIONS}
    ours |= {"num_minibatches": recorder.MINIBATCHES, "num_epochs": recorder.EPOCHS}
    recorder.save("rl_games", "rl-games", case, seed, ours, arrays | data | tape.read())


def options(seed: int) -> None:
    ours = {"gamma": 0.95, "gae_lambda": 0.9, "clip_eps": 0.1, "clip_value": False, "value_coef": 0.8}
    theirs = {"gamma": 0.95, "tau": 0.9, "e_clip": 0.1, "clip_value": False, "critic_coef": 0.8}
    ours |= {"entropy_coef": 0.02, "learning_rate": 5e-3, "target_kl": 0.0055, "adapt_each_epoch": True}
    theirs |= {"entropy_coef": 0.02, "learning_rate": 5e-3, "kl_threshold": 0.0055, "schedule_type": "standard"}
    ours |= {"max_grad_norm": 0.3, "bounds_coef": 0.5, "normalize_value": False}
    theirs |= {"grad_norm": 0.3, "bounds_loss_coef": 0.5, "bound_loss_type": "bound", "normalize_value": False}
    run("options", ours, theirs, [], seed)


if __name__ == "__main__":
    recorder.record({"default": functools.partial(run, "default", {}, {}, [0.3, 2.0, 50.0]), "options": options})
