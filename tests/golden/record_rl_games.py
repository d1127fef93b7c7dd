"""Record one update of rl_games' PPO for continuous actions: `train_epoch` in an environment of random numbers.

Its code has few defaults; the case `default` has the settings of its own `configs/mujoco/ant_envpool.yaml`, except for
sizes, the separate networks, the smooth clamp and mixed precision.
"""

import os

os.environ["PYTORCH_JIT"] = "0"  # so that its statistics are float64, too

import tempfile
from typing import Any

import _recorder as recorder
import numpy as np
import torch

SETTINGS = {
    "gamma": 0.99, "tau": 0.95, "learning_rate": 3e-4, "lr_schedule": "adaptive", "kl_threshold": 0.008,
    "schedule_type": "legacy", "grad_norm": 1.0, "truncate_grads": True, "entropy_coef": 0.0, "e_clip": 0.2,
    "clip_value": True, "critic_coef": 2, "bound_loss_type": "regularisation", "bounds_loss_coef": 0.0,
    "normalize_input": False, "normalize_value": True, "normalize_advantage": True, "value_bootstrap": True,
    "mini_epochs": recorder.EPOCHS, "num_actors": recorder.ENVS, "horizon_length": recorder.TIME,
    "minibatch_size": recorder.MINIBATCH, "device": "cpu",
}  # fmt: skip
SPACE = {"mu_activation": "None", "sigma_activation": "None", "mu_init": {"name": "default"}, "fixed_sigma": True}
NETWORK = {
    "name": "actor_critic",
    "separate": True,
    "space": {"continuous": SPACE | {"sigma_init": {"name": "const_initializer", "val": -0.5}}},
    "mlp": {"units": [recorder.HIDDEN], "activation": "tanh", "initializer": {"name": "default"}},
}
MOMENTS = {"running_mean": 0.3, "running_var": 2.0, "count": 50.0}  # of a run that is under way
SIZES = {"num_envs": recorder.ENVS, "num_steps": recorder.TIME, "num_actions": recorder.ACTIONS}
SIZES |= {"num_minibatches": recorder.MINIBATCHES, "num_epochs": recorder.EPOCHS}
OPTIONS = {
    "gamma": ("gamma", 0.95), "gae_lambda": ("tau", 0.9), "clip_eps": ("e_clip", 0.1),
    "clip_value": ("clip_value", False), "value_coef": ("critic_coef", 0.8), "entropy_coef": ("entropy_coef", 0.02),
    "learning_rate": ("learning_rate", 5e-3), "target_kl": ("kl_threshold", 0.0055),
    "max_grad_norm": ("grad_norm", 0.3), "bounds_coef": ("bounds_loss_coef", 0.5),
    "normalize_value": ("normalize_value", False),
}  # fmt: skip


class Environments(recorder.Scripted):
    """The scripted environments by the library's protocol."""

    def reset(self) -> torch.Tensor:
        return torch.as_tensor(self.data["obs"][0])

    def step(self, actions: torch.Tensor) -> Any:
        obs, reward, terminated, truncated, _ = self.next()
        time_outs = torch.as_tensor(truncated.astype(float))
        ended = torch.as_tensor(terminated | truncated).byte()
        return torch.as_tensor(obs), torch.tensor(reward), ended, {"time_outs": time_outs}

    def set_train_info(self, frame: int, agent: Any) -> None: ...


def update(seed: int, **settings: Any) -> recorder.Arrays:
    recorder.in_double_precision(seed)
    torch.float32 = torch.float64  # the dtype of the experience buffer
    from rl_games.algos_torch.a2c_continuous import A2CAgent
    from rl_games.common.algo_observer import AlgoObserver
    from rl_games.common.tr_helpers import DefaultRewardsShaper

    environments = Environments(seed)
    sizes = {"observation_space": recorder.OBS, "action_space": recorder.ACTIONS}
    spaces = {name: recorder.space(size, 1.0) for name, size in sizes.items()}
    with tempfile.TemporaryDirectory() as folder:
        config = SETTINGS | settings | {"name": "recorded", "env_name": "scripted", "train_dir": folder}
        config |= {"env_info": spaces, "vec_env": environments, "reward_shaper": DefaultRewardsShaper()}
        config["features"] = {"observer": AlgoObserver()}
        model = {"name": "continuous_a2c_logstd"}
        agent = A2CAgent("recorded", {"config": config, "network": NETWORK, "model": model, "algo": {}})
        agent.init_tensors()
        agent.obs = agent.env_reset()
        net, arrays = agent.model.a2c_network, {}
        if config["normalize_value"]:
            for name, x in MOMENTS.items():
                getattr(agent.model.value_mean_std, name).fill_(x)
            arrays["moments"] = np.array(list(MOMENTS.values()))
        net.mu.weight.data *= 4  # so that some means are out of bounds
        policy = [*net.actor_mlp.parameters(), *net.mu.parameters(), net.sigma]
        tape = recorder.TorchTape(*policy, *net.critic_mlp.parameters(), *net.value.parameters())
        with torch.no_grad():
            obs = torch.as_tensor(environments.data["obs"])
            arrays["value"] = net.value(net.critic_mlp(obs))[..., 0].numpy()
        tape.watch(agent.optimizer)
        agent.train_epoch()
    buffer, dataset = agent.experience_buffer.tensor_dict, agent.dataset.values_dict
    arrays |= {"action": buffer["actions"].numpy(), "log_prob": -buffer["neglogpacs"].numpy()}
    arrays |= {"advantage": recorder.by_time(dataset["advantages"]), "target": recorder.by_time(dataset["returns"])}
    return arrays | environments.data | tape.read()


if __name__ == "__main__":
    ours = {"adapt_each_epoch": True}
    theirs = {"schedule_type": "standard", "bound_loss_type": "bound"}
    recorder.record_library("rl_games", "rl-games", update, OPTIONS, ours, theirs, always=SIZES)
