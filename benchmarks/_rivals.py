"""Run other libraries' PPO: rejax, PureJaxRL, sbx and stable-baselines3 in this process, CleanRL in another one."""

import importlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import gymnax
import jax
from gymnax.wrappers import purerl

Run = Callable[[jax.Array], Any]
STEPS, EPOCHS, MINIBATCHES, HIDDEN = 128, 4, 4, 64  # for every rival, unless a benchmark changes them
MODULES = {"sb3": "stable_baselines3"}  # the others have the names of their modules


class FiveTuple(purerl.GymnaxWrapper):
    """A gymnax environment with the `step` of gymnax 0.0, which has one flag for both ends of an episode."""

    def step(self, *args: Any) -> Any:
        """Take a step."""
        obs, state, reward, terminated, truncated, _ = self._env.step(*args)
        return obs, state, reward, terminated | truncated, {}


def make_rejax(env_id: str, num_envs: int, updates: int) -> Run:
    """Make rejax's PPO, without its evaluations."""
    from rejax import PPO

    env, env_params = gymnax.make(env_id)
    algorithm = PPO.create(
        env=FiveTuple(env), env_params=env_params, num_envs=num_envs, num_steps=STEPS, num_epochs=EPOCHS,
        num_minibatches=MINIBATCHES, max_grad_norm=0.5, learning_rate=2.5e-4,
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (HIDDEN, HIDDEN)},
    )  # fmt: skip

    def train(key: jax.Array) -> Any:
        state = algorithm.init_state(key)
        return jax.lax.scan(lambda s, _: (algorithm.train_iteration(s), None), state, None, length=updates)[0]

    return train


def make_purejaxrl(clone: str, env_id: str, num_envs: int, updates: int) -> Run:
    """Make PureJaxRL's `ppo.py` from a clone of its repository, with its own settings."""
    make = gymnax.make

    def make_five_tuple(name: str) -> Any:
        env, env_params = make(name)
        return FiveTuple(env), env_params

    absent = ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix")
    stubs, path = dict.fromkeys(absent, mock.MagicMock()), [str(Path(clone) / "purejaxrl"), *sys.path]
    with mock.patch.dict(sys.modules, stubs), mock.patch.object(sys, "path", path):
        module = importlib.import_module("ppo")
    config = {
        "LR": 2.5e-4, "NUM_ENVS": num_envs, "NUM_STEPS": STEPS, "TOTAL_TIMESTEPS": updates * num_envs * STEPS,
        "UPDATE_EPOCHS": EPOCHS, "NUM_MINIBATCHES": MINIBATCHES, "GAMMA": 0.99, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2,
        "ENT_COEF": 0.01, "VF_COEF": 0.5, "MAX_GRAD_NORM": 0.5, "ACTIVATION": "tanh", "ENV_NAME": env_id,
        "ANNEAL_LR": True, "DEBUG": False,
    }  # fmt: skip
    with mock.patch.object(gymnax, "make", make_five_tuple):
        return module.make_train(config)


def make_on_host(name: str, env_id: str, num_envs: int, updates: int, normalize: bool = False, **changes: Any) -> Any:
    """Make a function that trains sbx or stable-baselines3 in this process; `changes` are arguments of their PPO."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    settings: dict[str, Any] = {
        "n_steps": STEPS, "n_epochs": EPOCHS, "learning_rate": 2.5e-4, "ent_coef": 0.01,
        "policy_kwargs": {"net_arch": {"pi": [HIDDEN, HIDDEN], "vf": [HIDDEN, HIDDEN]}},
    } | changes  # fmt: skip
    settings.setdefault("batch_size", STEPS * num_envs // MINIBATCHES)
    if name == "sb3":
        importlib.import_module("torch").set_num_threads(1)
        settings["device"] = "cpu"
    environments = make_vec_env(env_id, num_envs)
    library = importlib.import_module(MODULES.get(name, name))
    model = library.PPO("MlpPolicy", VecNormalize(environments) if normalize else environments, **settings)
    return lambda: model.learn(updates * num_envs * settings["n_steps"]).num_timesteps


def is_installed(name: str) -> bool:
    """Return whether a rival is installed."""
    return importlib.util.find_spec(MODULES.get(name, name)) is not None


def run_cleanrl(python: str, script: str, given: dict[str, Any]) -> str:
    """Run a script of CleanRL, unchanged, with these options on a CPU; return what it prints."""
    # It runs in another folder. Do not resolve the path of Python, which is a link in a virtual environment.
    command = [str(Path(shutil.which(python) or python).absolute()), str(Path(script).absolute()), "--no-cuda"]
    command += [f"--{name}={value}" for name, value in given.items()]
    with tempfile.TemporaryDirectory() as folder:
        out = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if out.returncode:
        raise RuntimeError(f"{script} failed:\n{out.stderr[-2000:]}")
    return out.stdout
