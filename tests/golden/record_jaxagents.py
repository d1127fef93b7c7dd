"""Record jaxagents' IPPO: one update by its own `train()`.

Run it with Python 3.13, which its annotations need, and with the versions of its lock file, which replace those that
the package asks for:

    pip install --no-deps jaxagents==0.2.5
    pip install jax==0.5.3 flax==0.10.6 optax==0.2.4 distrax==0.1.5 gymnax==0.0.8 numpy==2.2.5 jax-tqdm jaxtyping orbax
    python tests/golden/record_jaxagents.py --seed 0

jax runs without `jit`, so that every minibatch is a call with numbers, which a subclass writes down.
"""

import functools
import itertools
import types
from pathlib import Path
from typing import Any

import _recorder as recorder
import distrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.traverse_util import flatten_dict
from gymnax.environments.environment import Environment, EnvParams
from jaxagents.ippo import IPPO
from jaxagents.utils.ippo_utils import AgentConfig, HyperParameters, OptimizerParams, Transition

OBS, LOG_STD, FOREVER = 4, -0.5, 1e6
SIZES = {"batch_size": 8, "minibatch_size": 2, "rollout_length": 12, "actor_epochs": 4, "critic_epochs": 3}
RATES = {"actor_lr": 0.01, "actor_adam_eps": 1e-5, "actor_grad_clip": 0.5}
RATES |= {"critic_lr": 0.005, "critic_adam_eps": 1e-5, "critic_grad_clip": 0.5}
LOSSES = {"gamma": 0.97, "gae_lambda": 0.95, "eps_clip": 0.2, "ent_coeff": 0.01, "vf_coeff": 0.5}
DEFAULTS = {**LOSSES, "kl_threshold": FOREVER, **RATES, **SIZES, "max_episode_steps": 9999, "discrete": 0}
CASES: dict[str, tuple[dict[str, Any], int]] = {  # settings, and the epoch after which the divergence stops the actor
    "cont_nostop": ({"actor_grad_clip": 0.4, "critic_grad_clip": 2.5}, 0),
    "cont_stop2": ({"actor_epochs": 8}, 2),
    "cont_stop2_onemb": ({"actor_epochs": 8, "minibatch_size": 8, "actor_lr": 0.03}, 2),
    "cont_stop3": ({"actor_epochs": 8}, 3),
    "cont_trunc": ({"max_episode_steps": 5}, 0),
    "disc_nostop": ({"discrete": 1, "vf_coeff": 1.0, "actor_grad_clip": 0.2, "critic_grad_clip": 10.0}, 0),
}


class Noise(Environment):
    """Random observations, rewards of two agents and terminations, whatever the actions are."""

    n_actors = 2

    def reset_env(self, key: Any, params: Any) -> Any:
        obs = jax.random.normal(key, (OBS,))
        return obs, obs

    def step_env(self, key: Any, state: Any, action: Any, params: Any) -> Any:
        keys = jax.random.split(key, 3)
        obs, reward = 0.5 * state + jax.random.normal(keys[0], (OBS,)), jax.random.normal(keys[1], (2,))
        return obs, obs, reward, jax.random.bernoulli(keys[2], 0.1), {}


class Network(nn.Module):
    outputs: int
    config: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        hidden = jnp.tanh(nn.Dense(8)(x))
        return nn.Dense(self.outputs)(hidden)


def flat(params: Any) -> recorder.Arrays:
    return {name: np.asarray(x) for name, x in flatten_dict(params["params"], sep="/").items()}


class Agent(IPPO):
    """The library's agent with a policy, and with copies of what its methods get and return."""

    def __init__(self, settings: dict[str, Any]) -> None:
        actor = functools.partial(Network, 6 if settings["discrete"] else 2)
        sizes = {name: settings[name] for name in (*SIZES, "max_episode_steps")}
        networks = {"actor_network": actor, "critic_network": functools.partial(Network, 2)}
        config = AgentConfig(n_steps=1, **sizes, **networks, optimizer=optax.adam)
        super().__init__(Noise(), EnvParams(max_steps_in_episode=0), config, eval_during_training=False)
        self.discrete = settings["discrete"]
        self.arrays: recorder.Arrays = {}
        self.tape = recorder.Tape()

    def policy(self, training: Any, obs: Any) -> Any:
        return self.distribution(training, training.params, obs)

    def distribution(self, training: Any, params: Any, obs: Any) -> Any:
        out = training.apply_fn(params, obs)
        return distrax.Categorical(out.reshape(2, 3)) if self.discrete else distrax.Normal(out, jnp.exp(LOG_STD))

    def _sample_actions(self, rng: Any, training: Any, obs: Any) -> Any:
        return self.policy(training, obs).sample(seed=rng)

    def _log_prob(self, training: Any, params: Any, obs: Any, actions: Any) -> Any:
        return self.distribution(training, params, obs).log_prob(actions)

    def _entropy(self, training: Any, obs: Any) -> Any:
        return self.policy(training, obs).entropy()

    def copy(self, prefix: str, parts: dict[str, Any]) -> None:
        self.arrays |= recorder.under(prefix, parts)

    def _create_update_runner(self, rng: Any, actor: Any, critic: Any, hyperparams: Any) -> Any:
        self.copy("actor_init", flat(actor.params))
        self.copy("critic_init", flat(critic.params))
        return super()._create_update_runner(rng, actor, critic, hyperparams)

    def _process_trajectory(self, runner: Any, rollout: Any, last_obs: Any) -> Any:
        rollout = super()._process_trajectory(runner, rollout, last_obs)
        self.copy("traj", {**rollout._asdict(), "last_obs": last_obs})
        return rollout

    def _actor_loss_input(self, runner: Any, rollout: Any) -> Any:
        given = super()._actor_loss_input(runner, rollout)
        self.copy("actor_loss_input", dict(zip(("obs", "action", "log_prob", "advantage"), given, strict=False)))
        return given

    def _recorded(self, phase: str, i: int, runner: Any, grad_fn: Any) -> Any:
        def recorded(*inputs: Any) -> Any:
            found = grad_fn(*inputs)
            if phase == "actor":
                grads, (loss, kl) = found[0], self._actor_loss(*inputs)
                self.tape.write(phase, {"mb_loss": loss, "mb_kl": kl})
            else:
                grads, loss = found, self._critic_loss(*inputs)
                self.tape.write(phase, {"mb_loss": loss})
            self.tape.write(f"{phase}_mb_grads", flat(grads.params))
            return found

        runner = getattr(super(), f"_{phase}_minibatch_update")(i, runner, recorded)
        self.tape.write(f"{phase}_mb_params", flat(runner[0].params))
        return runner

    _actor_minibatch_update = functools.partialmethod(_recorded, "actor")
    _critic_minibatch_update = functools.partialmethod(_recorded, "critic")

    def order(self) -> np.ndarray:
        """The order of the trajectories, which is the same in every epoch."""
        rows = Transition(*[jnp.arange(self.config.batch_size)] * len(Transition._fields))
        with jax.disable_jit():
            shuffled, *_ = super()._actor_loss_input(types.SimpleNamespace(hyperparams=None), rows)
        return np.asarray(shuffled).reshape(-1).astype(np.int32)


def hyperparameters(settings: dict[str, Any]) -> HyperParameters:
    def optimizer(phase: str) -> OptimizerParams:
        return OptimizerParams(*(settings[f"{phase}_{name}"] for name in ("lr", "adam_eps", "grad_clip")))

    names = ("gamma", "gae_lambda", "eps_clip", "ent_coeff", "kl_threshold")
    critic = {"critic_optimizer_params": optimizer("critic"), "vf_coeff": settings["vf_coeff"]}
    return HyperParameters(**{x: settings[x] for x in names}, actor_optimizer_params=optimizer("actor"), **critic)


def update(settings: dict[str, Any]) -> recorder.Arrays:
    """One update, by `train()`."""
    agent = Agent(settings)
    last, _ = agent.train(jax.random.PRNGKey(settings["seed"]), hyperparameters(settings))
    arrays, minibatches = agent.arrays, settings["batch_size"] // settings["minibatch_size"]
    arrays["minibatch_idx"] = agent.order()
    for phase, training in (("actor", last.actor_training), ("critic", last.critic_training)):
        for kind in (phase, f"{phase}_mb_grads", f"{phase}_mb_params"):
            rows = agent.tape.read(kind).items()
            agent.copy(kind, {name: x.reshape(-1, minibatches, *x.shape[1:]) for name, x in rows})
        agent.copy(f"{phase}_final", flat(training.params))
        epochs = np.int32(len(agent.arrays[f"{phase}/mb_loss"]))
        agent.copy(phase, {"epochs_run": epochs, "adam_count": training.opt_state[1][0].count})
    return arrays


def updates(out: Path, seed: int) -> None:
    """One update of each case, with the first of the seeds s, s + 1000, ... that is suitable."""
    for case, (changes, stop) in CASES.items():
        settings = {**DEFAULTS, **changes, "n_actors": 2, "log_std": LOG_STD}
        with jax.disable_jit():
            for settings["seed"] in itertools.count(seed, 1000):
                arrays = update(settings | ({"actor_epochs": stop + 1} if stop else {}))
                if magnifies_rounding(arrays):
                    continue
                if not stop:
                    break
                *before, last = arrays["actor/mb_kl"][:, -1]
                highest = max(0.0, *before)
                if last > highest + 0.1:
                    settings["kl_threshold"] = float(highest + last) / 2
                    arrays = update(settings)
                    break
        config = {name: np.array(x, np.int32 if isinstance(x, int) else np.float64) for name, x in settings.items()}
        recorder.write(out / f"ippo_{case}.npz", **arrays, **recorder.under("cfg", config))


def magnifies_rounding(arrays: recorder.Arrays) -> bool:
    """Whether advantages to be standardized nearly agree, or a gradient of Adam's first step is as small as its eps."""
    first = [np.abs(x[0, 0]).min() for name, x in arrays.items() if "_mb_grads/" in name]
    return arrays["actor_loss_input/advantage"].std(axis=1).min() < 1e-3 or min(first) < 2e-4


if __name__ == "__main__":
    recorder.record({"updates": updates}, "jaxdem_jaxagents")
