"""Record one update of skrl's PPO (torch): `act` and `record_transition` for each step, `post_interaction`.

The environment returns the final observation of an episode with its last step, as Gymnasium's do.
"""

from typing import Any

import _recorder as recorder
import numpy as np
import torch
from skrl.agents.torch import ExperimentCfg
from skrl.agents.torch.ppo import PPO
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.resources.schedulers.torch import KLAdaptiveLR

MOMENTS = {"running_mean": 0.3, "running_variance": 2.0, "current_count": 50.0}  # of a run that is under way
OPTIONS = {
    "gamma": ("discount_factor", 0.95), "gae_lambda": ("gae_lambda", 0.9), "clip_eps": ("ratio_clip", 0.1),
    "value_clip_eps": ("value_clip", 0.05), "value_coef": ("value_loss_scale", 0.8),
    "entropy_coef": ("entropy_loss_scale", 0.02), "learning_rate": ("learning_rate", 5e-3),
    "max_grad_norm": ("grad_norm_clip", 0.3), "bootstrap_truncations": ("time_limit_bootstrap", True),
}  # fmt: skip


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


def update(seed: int, **settings: Any) -> recorder.Arrays:
    recorder.in_double_precision(seed)
    torch.float32 = torch.float64  # the dtype of the memory
    data = recorder.rollout(seed)
    sizes = {"observation_space": recorder.OBS, "action_space": recorder.ACTIONS}
    spaces = {name: recorder.space(size, np.inf) for name, size in sizes.items()}
    policy, value = Policy(**spaces), Value(**spaces)
    memory = RandomMemory(memory_size=recorder.TIME, num_envs=recorder.ENVS, device="cpu")
    cfg = {"rollouts": recorder.TIME, "learning_epochs": recorder.EPOCHS, "mini_batches": recorder.MINIBATCHES}
    cfg |= {"experiment": ExperimentCfg(write_interval=0, checkpoint_interval=0), **settings}
    agent = PPO(models={"policy": policy, "value": value}, memory=memory, device="cpu", cfg=cfg, **spaces)
    agent.init()
    agent.enable_training_mode(True)
    tape = recorder.TorchTape(*policy.net.parameters(), policy.log_std, *value.parameters())
    with torch.no_grad():
        arrays = {"value": value.net(torch.as_tensor(data["obs"]))[..., 0].numpy()}
    if "value_preprocessor" in settings:
        for name, x in MOMENTS.items():
            getattr(agent._value_preprocessor, name).fill_(x)
        arrays["moments"] = np.array(list(MOMENTS.values()))
    tape.watch(agent.optimizer)
    for t in range(recorder.TIME):
        row = {name: torch.as_tensor(x[t]) for name, x in data.items()}
        with torch.no_grad():
            actions, _ = agent.act(row["obs"], None, timestep=t, timesteps=recorder.TIME)
            agent.record_transition(
                observations=row["obs"], states=None, actions=actions, rewards=row["reward"][:, None],
                next_observations=row["next_obs"], next_states=None, terminated=row["terminated"][:, None] > 0,
                truncated=row["truncated"][:, None] > 0, infos={}, timestep=t, timesteps=recorder.TIME,
            )  # fmt: skip
        agent.post_interaction(timestep=t, timesteps=recorder.TIME)
    arrays["action"] = memory.get_tensor_by_name("actions").detach().numpy()
    for ours, theirs in {"log_prob": "log_prob", "advantage": "advantages", "target": "returns"}.items():
        arrays[ours] = memory.get_tensor_by_name(theirs).detach().numpy()[..., 0]
    return arrays | data | tape.read() | {"indices": recorder.minibatches(tape.permutations)}


if __name__ == "__main__":
    ours = {"target_kl": 0.004, "normalize_value": True, "num_minibatches": recorder.MINIBATCHES}
    theirs = {"learning_rate_scheduler": KLAdaptiveLR, "learning_rate_scheduler_kwargs": {"kl_threshold": 0.004}}
    scaler = {"value_preprocessor": RunningStandardScaler, "value_preprocessor_kwargs": {"size": 1, "device": "cpu"}}
    recorder.record_library("skrl", "skrl", update, OPTIONS, ours, theirs | scaler)
