"""Record one update of skrl's PPO (torch): `act` and `record_transition` for each step, `post_interaction`.

The environment returns the final observation of an episode with its last step, as Gymnasium's do.
"""

from __future__ import annotations

import functools
from typing import Any

import _recorder as recorder
import gymnasium as gym
import numpy as np
import torch
from skrl.agents.torch import ExperimentCfg
from skrl.agents.torch.ppo import PPO
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.resources.schedulers.torch import KLAdaptiveLR


def network(outputs: int) -> torch.nn.Module:
    first = torch.nn.Linear(recorder.OBS, recorder.HIDDEN)
    return torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(recorder.HIDDEN, outputs))


class Policy(GaussianMixin, Model):
    def __init__(self, **spaces: Any) -> None:
        Model.__init__(self, **spaces, device="cpu")
        GaussianMixin.__init__(self)
        self.net, self.log_std = network(recorder.ACTIONS), torch.nn.Parameter(torch.full((recorder.ACTIONS,), -0.5))

    def compute(self, inputs: Any, role: str) -> Any:
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Value(DeterministicMixin, Model):
    def __init__(self, **spaces: Any) -> None:
        Model.__init__(self, **spaces, device="cpu")
        DeterministicMixin.__init__(self)
        self.net = network(1)

    def compute(self, inputs: Any, role: str) -> Any:
        return self.net(inputs["observations"]), {}


def run(case: str, ours: dict[str, Any], theirs: dict[str, Any], moments: dict[str, float], seed: int) -> None:
    recorder.in_double_precision(seed)
    torch.float32 = torch.float64  # the dtype of the memory
    data = recorder.rollout(seed)
    box = functools.partial(gym.spaces.Box, -np.inf, np.inf, dtype=np.float64)
    spaces = {"observation_space": box((recorder.OBS,)), "action_space": box((recorder.ACTIONS,))}
    models = {"policy": Policy(**spaces), "value": Value(**spaces)}
    sizes = {"rollouts": recorder.TIME, "learning_epochs": recorder.EPOCHS, "mini_batches": recorder.MINIBATCHES}
    quiet = {"write_interval": 0, "checkpoint_interval": 0}
    memory = RandomMemory(memory_size=recorder.TIME, num_envs=recorder.ENVS, device="cpu")
    agent = PPO(
        models=models,
        memory=memory,
        device="cpu",
        cfg=sizes | theirs | {"experiment": ExperimentCfg(**quiet)},
        **spaces,
    )
    agent.init()
    agent.enable_training_mode(True)
    for name, x in moments.items():  # of a run that is under way
        getattr(agent._value_preprocessor, name).fill_(x)
    policy, value = models["policy"], models["value"]
    tape = recorder.TorchTape([*policy.net.parameters(), policy.log_std, *value.parameters()])
    with torch.no_grad():
        arrays = {"value": value.net(torch.as_tensor(data["obs"]))[..., 0].numpy()}
    tape.watch(agent.optimizer)
    column = {"dtype": torch.float64, "device": "cpu"}
    for t in range(recorder.TIME):
        obs, next_obs = (torch.as_tensor(data[name][t]) for name in ("obs", "next_obs"))
        with torch.no_grad():
            actions, _ = agent.act(obs, None, timestep=t, timesteps=recorder.TIME)
            agent.record_transition(
                observations=obs,
                states=None,
                actions=actions,
                rewards=torch.tensor(data["reward"][t][:, None], **column),
                next_observations=next_obs,
                next_states=None,
                terminated=torch.as_tensor(data["terminated"][t][:, None] > 0),
                truncated=torch.as_tensor(data["truncated"][t][:, None] > 0),
                infos={},
                timestep=t,
                timesteps=recorder.TIME,
            )
        agent.post_interaction(timestep=t, timesteps=recorder.TIME)
    arrays["action"] = memory.get_tensor_by_name("actions").detach().numpy()
    for name, theirs_ in {"log_prob": "log_prob", "advantage": "advantages", "target": "returns"}.items():
        arrays[name] = memory.get_tensor_by_name(theirs_).detach().numpy()[..., 0]
    if moments:
        arrays["moments"] = np.array([moments[x] for x in ("running_mean", "running_variance", "current_count")])
    arrays |= data | tape.read() | {"indices": recorder.minibatches(tape.permutations)}
    recorder.save("skrl", "skrl", case, seed, ours, arrays)


def options(seed: int) -> None:
    ours = {"gamma": 0.95, "gae_lambda": 0.9, "clip_eps": 0.1, "value_clip_eps": 0.05, "value_coef": 0.8}
    theirs = {"discount_factor": 0.95, "gae_lambda": 0.9, "ratio_clip": 0.1, "value_clip": 0.05}
    ours |= {"entropy_coef": 0.02, "learning_rate": 5e-3, "target_kl": 0.004, "max_grad_norm": 0.3}
    theirs |= {"value_loss_scale": 0.8, "entropy_loss_scale": 0.02, "learning_rate": 5e-3, "grad_norm_clip": 0.3}
    theirs |= {"learning_rate_scheduler": KLAdaptiveLR, "learning_rate_scheduler_kwargs": {"kl_threshold": 0.004}}
    ours |= {"bootstrap_truncations": True, "normalize_value": True, "num_minibatches": recorder.MINIBATCHES}
    theirs |= {"time_limit_bootstrap": True, "value_preprocessor": RunningStandardScaler}
    theirs |= {"value_preprocessor_kwargs": {"size": 1, "device": "cpu"}}
    run("options", ours, theirs, {"running_mean": 0.3, "running_variance": 2.0, "current_count": 50.0}, seed)


if __name__ == "__main__":
    recorder.record({"default": functools.partial(run, "default", {}, {}, {}), "options": options})
