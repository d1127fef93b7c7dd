"""Record one update of rsl_rl's PPO: `act` and `process_env_step` for each step, `compute_returns`, `update`.

Before the update the parameters are disturbed, so that the divergence of the first minibatch is not a rounding error,
whose sign would decide on the learning rate.
"""

from __future__ import annotations

import functools
from typing import Any

import _recorder as recorder
import numpy as np
import torch
from rsl_rl.algorithms import PPO
from rsl_rl.models import MLPModel
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict


def run(case: str, ours: dict[str, Any], theirs: dict[str, Any], seed: int) -> None:
    recorder.in_double_precision(seed)
    data, rng = recorder.rollout(seed), np.random.default_rng(seed)

    def observation(x: np.ndarray) -> TensorDict:
        return TensorDict({"obs": torch.as_tensor(x)}, batch_size=[recorder.ENVS])

    first = observation(data["obs"][0])
    model = functools.partial(
        MLPModel, first, {"actor": ["obs"], "critic": ["obs"]}, hidden_dims=[recorder.HIDDEN], activation="tanh"
    )
    gaussian = {"class_name": "GaussianDistribution", "std_type": "log"}
    actor, critic = model("actor", recorder.ACTIONS, distribution_cfg=gaussian), model("critic", 1)
    storage = RolloutStorage("rl", recorder.ENVS, recorder.TIME, first, [recorder.ACTIONS])
    sizes = {"num_learning_epochs": recorder.EPOCHS, "num_mini_batches": recorder.MINIBATCHES}
    algorithm = PPO(actor, critic, storage, **sizes, **theirs)
    names = [*actor.mlp.parameters(), actor.distribution.log_std_param, *critic.parameters()]
    behavior = recorder.TorchTape(names).flat()
    for t in range(recorder.TIME):
        algorithm.act(observation(data["obs"][t]))
        ended = torch.as_tensor(data["terminated"][t] + data["truncated"][t])
        extras = {"time_outs": torch.as_tensor(data["truncated"][t])}
        obs = observation(recorder.after(data, t, rng))
        algorithm.process_env_step(obs, torch.as_tensor(data["reward"][t]), ended, extras)
    algorithm.compute_returns(observation(data["next_obs"][-1]))
    kept = {"action": "actions", "value": "values", "log_prob": "actions_log_prob"}
    kept |= {"advantage": "advantages", "target": "returns"}
    arrays = {ours: getattr(storage, name).numpy().copy() for ours, name in kept.items()}
    arrays = {name: x[..., 0] if name != "action" else x for name, x in arrays.items()}
    with torch.no_grad():
        for tensor in names:
            tensor += 0.02 * torch.randn_like(tensor)
    tape = recorder.TorchTape(names)
    tape.watch(algorithm.optimizer)
    algorithm.update()
    indices = recorder.minibatches(tape.permutations * recorder.EPOCHS)  # one permutation for all epochs
    arrays |= data | tape.read() | {"indices": indices, "behavior": behavior}
    recorder.save("rsl_rl", "rsl-rl-lib", case, seed, ours, arrays)


def options(seed: int) -> None:
    common = {"gamma": 0.95, "learning_rate": 5e-3, "max_grad_norm": 0.3, "value_loss_coef": 0.8}
    ours = {"gae_lambda": 0.9, "clip_eps": 0.1, "value_coef": 0.8, "entropy_coef": 0.02, "target_kl": 0.003}
    theirs = {"lam": 0.9, "clip_param": 0.1, "entropy_coef": 0.02, "desired_kl": 0.003}
    ours |= {name: common[name] for name in ("gamma", "learning_rate", "max_grad_norm")}
    ours |= {"advantage_normalize_rollout": False, "clip_value": False}
    theirs |= common | {"normalize_advantage_per_mini_batch": True, "use_clipped_value_loss": False}
    run("options", ours, theirs, seed)


if __name__ == "__main__":
    recorder.record({"default": functools.partial(run, "default", {}, {}), "options": options})
