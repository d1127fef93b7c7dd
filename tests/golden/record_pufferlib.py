"""Record PufferLib 3.0: one `evaluate` and one `train` of `PuffeRL`.

Run it where PufferLib is installed: `pip install pufferlib==3.0.0 && python tests/golden/record_pufferlib.py --seed 0`.
Its setup downloads raylib and compiles a CUDA extension; without these, build the C++ kernel of its source archive.
The environment sends random numbers. The tape reads the local variables of `train` when it calls `backward`.
"""

import ast
import configparser
import functools
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import _recorder as recorder
import gymnasium as gym
import numpy as np
import pufferlib
import torch
from pufferlib import pufferl
from pufferlib.pytorch import layer_init
from torch.optim.optimizer import register_optimizer_step_post_hook

SEGMENTS, HORIZON, INPUTS, ACTIONS = 16, 8, 5, 3
SIZES = {"batch_size": SEGMENTS * HORIZON, "bptt_horizon": HORIZON, "minibatch_size": 4 * HORIZON, "update_epochs": 1.5}
SIZES |= {"total_timesteps": 10 * SEGMENTS * HORIZON}
CASES: dict[str, dict[str, Any]] = {
    "adam_epoch0": {"learning_rate": 0.008},
    "adam_epoch6": {"learning_rate": 0.03, "vtrace_rho_clip": 2.0, "vtrace_c_clip": 0.5, "epoch": 6},
    "adam_tinyadv_h16": {"learning_rate": 1e-6, "hidden": 16, "scale": 1e-6},
}
ROWS = ("advantages", "prio_weights", "prio_probs", "idx", "mb_prio")
ROWS += ("old_approx_kl", "approx_kl", "clipfrac", "pg_loss", "v_loss", "entropy_loss", "loss")
FILES = ("pufferl.py", "pytorch.py")


class Noise:
    """A vector of environments that sends random numbers, whatever the actions are."""

    single_observation_space = gym.spaces.Box(-np.inf, np.inf, (INPUTS,), np.float32)
    single_action_space = gym.spaces.Discrete(ACTIONS)
    num_agents = agents_per_batch = SEGMENTS

    def __init__(self, seed: int, scale: float) -> None:
        self.rng, self.scale = np.random.default_rng(seed), scale

    def async_reset(self, seed: int) -> None: ...
    def send(self, actions: Any) -> None: ...

    def recv(self) -> Any:
        obs = self.rng.normal(size=(SEGMENTS, INPUTS)).astype(np.float32)
        reward = (0.8 * self.scale * self.rng.normal(size=SEGMENTS)).astype(np.float32)
        ended = self.rng.random((2, SEGMENTS)) < 0.1  # terminated, truncated
        return obs, reward, *ended, [], np.arange(SEGMENTS), np.ones(SEGMENTS, bool)


class Policy(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(INPUTS, hidden), torch.nn.Linear(hidden, hidden)
        self.decoder = layer_init(torch.nn.Linear(hidden, ACTIONS), std=0.01)
        self.value = layer_init(torch.nn.Linear(hidden, 1), std=1.0)

    def forward(self, obs: Any, state: Any = None) -> Any:
        hidden = torch.tanh(self.fc2(torch.tanh(self.fc1(obs))))
        return self.decoder(hidden), self.value(hidden)

    forward_eval = forward


class Tape(recorder.Tape):
    """What `train` computes in each minibatch."""

    def __init__(self, policy: torch.nn.Module) -> None:
        super().__init__()
        self.policy, self.kernel = policy, pufferl.compute_puff_advantage

    def watch(self) -> None:
        recorder.on_backward(self.before_backward)
        pufferl.compute_puff_advantage = self.recorded_kernel
        register_optimizer_step_post_hook(lambda *_: self.write("mb/param_after", dict(self.policy.named_parameters())))

    def before_backward(self, loss: Any, frame: Any) -> None:
        self.write("mb", {name: frame.f_locals[name] for name in ROWS})
        self.beta = frame.f_locals["anneal_beta"]

    def recorded_kernel(self, values: Any, rewards: Any, terminals: Any, ratio: Any, *args: Any) -> Any:
        if len(values) == SEGMENTS:  # not those of a minibatch, which are discarded
            self.write("mb", {"values_before": values, "ratio_before": ratio})
        return self.kernel(values, rewards, terminals, ratio, *args)


def configuration(changes: dict[str, Any]) -> dict[str, Any]:
    """The library's defaults with our sizes."""
    file = configparser.ConfigParser()
    file.read(Path(pufferlib.__file__).parent / "config" / "default.ini")
    defaults: dict[str, Any] = {}
    for name, text in file["train"].items():
        try:
            defaults[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            defaults[name] = text
    return defaults | SIZES | changes | {"env": "noise", "device": "cpu", "optimizer": "adam", "use_rnn": False}


def run(case: str, out: Path, seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    changes = {"hidden": 64, "scale": 1.0, "epoch": 0} | CASES[case] | {"seed": seed}
    hidden, scale, epoch = (changes.pop(name) for name in ("hidden", "scale", "epoch"))
    policy, vecenv = Policy(hidden), Noise(seed, scale)
    if scale < 1:
        torch.nn.init.zeros_(policy.value.weight)
    pufferl.Utilization = types.SimpleNamespace
    pufferl.PuffeRL.print_dashboard = lambda *_, **__: None
    trainer = pufferl.PuffeRL(configuration(changes), vecenv, policy)
    for _ in range(epoch):
        trainer.scheduler.step()
    trainer.epoch = epoch
    rate = trainer.optimizer.param_groups[0]["lr"]
    trainer.evaluate()
    buffers = ("observations", "actions", "logprobs", "rewards", "terminals", "values")
    arrays = {name: getattr(trainer, name).numpy().copy() for name in buffers}
    arrays |= recorder.under("params_start", dict(policy.named_parameters()))
    tape = Tape(policy)
    tape.watch()
    trainer.train()
    rows = tape.read("mb")
    arrays |= recorder.under("mb", rows | {"idx": rows["idx"].astype(np.int16)})
    arrays |= {"lr": rate, "lr_next": trainer.optimizer.param_groups[0]["lr"], "anneal_beta": tape.beta}
    folder = Path(pufferlib.__file__).parent
    meta = {"file_sha256": {name: recorder.digest(folder / name) for name in FILES}, "config": trainer.config}
    meta |= {name: getattr(trainer, name) for name in ("total_epochs", "total_minibatches")}
    meta |= {"epoch": epoch, "hidden": hidden, "versions": recorder.versions("torch", "numpy")}
    meta |= {"peer": "PufferLib", "version": version("pufferlib"), "case": f"puffer_{case}", "seed": seed}
    recorder.write(out / f"puffer_{case}.npz", meta, **arrays)


if __name__ == "__main__":
    recorder.record({case: functools.partial(run, case) for case in CASES}, "cleanrl_pufferlib")
