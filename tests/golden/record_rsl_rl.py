"""Record one update of rsl_rl's PPO: `act` and `process_env_step` for each step, `compute_returns`, `update`.

Before the update the parameters are disturbed, so that the divergence of the first minibatch is not a rounding error,
whose sign would decide on the learning rate.
"""

import functools
from typing import Any

import _recorder as recorder
import numpy as np
import torch
from rsl_rl.algorithms import PPO
from rsl_rl.models import MLPModel
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict

OPTIONS = {
    "gamma": ("gamma", 0.95), "gae_lambda": ("lam", 0.9), "clip_eps": ("clip_param", 0.1),
    "value_coef": ("value_loss_coef", 0.8), "entropy_coef": ("entropy_coef", 0.02), "target_kl": ("desired_kl", 0.003),
    "learning_rate": ("learning_rate", 5e-3), "max_grad_norm": ("max_grad_norm", 0.3),
    "clip_value": ("use_clipped_value_loss", False),
}  # fmt: skip


def observation(x: np.ndarray) -> TensorDict:
    return TensorDict({"obs": torch.as_tensor(x)}, batch_size=[recorder.ENVS])


def update(seed: int, **settings: Any) -> recorder.Arrays:
    recorder.in_double_precision(seed)
    scripted = recorder.Scripted(seed)
    data = scripted.data
    obs = first = observation(data["obs"][0])
    model = functools.partial(
        MLPModel, first, {"actor": ["obs"], "critic": ["obs"]}, hidden_dims=[recorder.HIDDEN], activation="tanh"
    )
    gaussian = {"class_name": "GaussianDistribution", "std_type": "log"}
    actor, critic = model("actor", recorder.ACTIONS, distribution_cfg=gaussian), model("critic", 1)
    storage = RolloutStorage("rl", recorder.ENVS, recorder.TIME, first, [recorder.ACTIONS])
    sizes = {"num_learning_epochs": recorder.EPOCHS, "num_mini_batches": recorder.MINIBATCHES}
    algorithm = PPO(actor, critic, storage, **sizes, **settings)
    parameters = [*actor.mlp.parameters(), actor.distribution.log_std_param, *critic.parameters()]
    behavior = recorder.TorchTape(*parameters).flat()
    for _ in range(recorder.TIME):
        algorithm.act(obs)
        after, reward, terminated, truncated, _ = scripted.next()
        obs, ended = observation(after), torch.as_tensor((terminated | truncated).astype(float))
        time_outs = torch.as_tensor(truncated.astype(float))
        algorithm.process_env_step(obs, torch.as_tensor(reward), ended, {"time_outs": time_outs})
    algorithm.compute_returns(observation(data["next_obs"][-1]))
    kept = {"value": "values", "log_prob": "actions_log_prob", "advantage": "advantages", "target": "returns"}
    arrays = {ours: getattr(storage, theirs).numpy()[..., 0].copy() for ours, theirs in kept.items()}
    arrays["action"] = storage.actions.numpy().copy()
    with torch.no_grad():
        for tensor in parameters:
            tensor += 0.02 * torch.randn_like(tensor)
    tape = recorder.TorchTape(*parameters)
    tape.watch(algorithm.optimizer)
    algorithm.update()
    indices = recorder.minibatches(tape.permutations * recorder.EPOCHS)  # one permutation for all epochs
    return arrays | data | tape.read() | {"indices": indices, "behavior": behavior}


if __name__ == "__main__":
    ours = {"advantage_normalize_rollout": False}
    theirs = {"normalize_advantage_per_mini_batch": True}
    recorder.record_library("rsl_rl", "rsl-rl-lib", update, OPTIONS, ours, theirs)
