"""Record whole epochs of JaxDEM's PPOTrainer.

Run it with a checkout of the commit below, where the packages that it imports are installed:

    pip install jax==0.10.2 flax==0.12.8 optax==0.2.8 distrax==0.1.9 tqdm
    python tests/golden/record_jaxdem.py --source path/to/JaxDEM --seed 0

`epoch` runs without `jit`, so that the functions that it calls get numbers, which are written down.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import _recorder as recorder
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

COMMIT = "5d9c13a"  # 2026-06-29
HIDDEN = 8
CREATE = {"learning_rate": 0.01, "max_grad_norm": 1.5, "ppo_clip_eps": 0.2, "ppo_value_coeff": 2.0}
CREATE |= {"ppo_entropy_coeff": 0.001, "importance_sampling_alpha": 0.8, "importance_sampling_beta": 0.2}
CREATE |= {"advantage_gamma": 0.99, "advantage_lambda": 0.95, "advantage_rho_clip": 1.0, "advantage_c_clip": 1.0}
CREATE |= {"drip_decay": 0.0, "anneal_importance_sampling_beta": True, "anneal_learning_rate": True, "skip_frames": 0}
MULTI = {"learning_rate": 0.005, "max_grad_norm": 0.3, "ppo_entropy_coeff": 0.02, "drip_decay": 0.5}
MULTI |= {"advantage_rho_clip": 0.8, "advantage_c_clip": 0.9}
SIZES = ("num_envs", "num_steps_epoch", "num_minibatches", "minibatch_size", "num_epochs")
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], dict[str, Any], int]] = {
    "single": ("singleNavigator", {}, (6, 8, 3, 32, 10), {}, 2),
    "multi": ("multiNavigator", {"N": 2, "n_lidar_rays": 4}, (4, 6, 4, 24, 10), MULTI, 2),
    "lrzero": ("singleNavigator", {}, (4, 5, 4, 15, 2), {}, 1),
}
FIELDS = ("obs", "action", "reward", "done", "value", "log_prob", "ratio")
GIVEN = ("value", "reward", "ratio", "done")


def parameters(model: Any) -> recorder.Arrays:
    """Copies of a model's parameters, by their paths."""
    leaves = {"/".join(map(str, path)): x.get_value() for path, x in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    return {name: np.array(x) for name, x in leaves.items() if hasattr(x, "shape")}


class Tape(recorder.Tape):
    """What `epoch` passes to the functions that it calls, and what it gets from them."""

    @contextlib.contextmanager
    def watch(self, trainer: Any) -> Iterator[None]:
        rollout, advantages = trainer.trajectory_rollout, trainer.compute_advantages
        choice, gradient, update = jax.random.choice, nnx.value_and_grad, nnx.Optimizer.update

        def compiled_rollout(*args: Any, **kwargs: Any) -> Any:
            with jax.disable_jit(False):
                return rollout(*args, **kwargs)

        def recorded_advantages(*args: Any, last_value: Any) -> Any:
            row = dict(zip(GIVEN, args, strict=False)) | {"last_value": last_value}
            out = advantages(*args, last_value=last_value)
            kind = "recompute" if "mb/idx" in self.rows else "init"  # of the rollout, or of what was drawn from it
            self.write(kind, row | {"returns": out[0], "advantage": out[1]})
            return out

        def recorded_choice(*args: Any, p: Any = None, **kwargs: Any) -> Any:
            drawn = choice(*args, p=p, **kwargs)
            self.write("mb", {"prio_probs": p, "idx": drawn})
            return drawn

        def recorded_gradient(loss: Any, **kwargs: Any) -> Any:
            def call(*args: Any, **carry: Any) -> Any:
                (value, aux), grads = gradient(loss, **kwargs)(*args, **carry)
                self.write("mb", {"loss": value} | {f"aux/{name}": x for name, x in aux.items()})
                return (value, aux), grads

            return call

        def recorded_update(optimizer: Any, model: Any, grads: Any) -> None:
            update(optimizer, model, grads)
            self.write("mb/params_after", parameters(model))

        with contextlib.ExitStack() as stack:
            for owner, name, function in (
                (trainer, "trajectory_rollout", staticmethod(compiled_rollout)),
                (trainer, "compute_advantages", staticmethod(recorded_advantages)),
                (jax.random, "choice", recorded_choice),
                (nnx, "value_and_grad", recorded_gradient),
                (nnx.Optimizer, "update", recorded_update),
            ):
                stack.enter_context(mock.patch.object(owner, name, function))
            stack.enter_context(jax.disable_jit())
            yield


def run(case: str, source: Path, out: Path, seed: int) -> None:
    """Whole epochs in one of the library's environments."""
    sys.path.insert(0, str(source))
    from jaxdem.rl.environments import Environment
    from jaxdem.rl.models import Model
    from jaxdem.rl.trainers import Trainer

    name, options, sizes, changes, number = CASES[case]
    settings = CREATE | changes | dict(zip(SIZES, sizes, strict=True))
    env = Environment.create(name, **options)
    shape = {"observation_space_size": env.observation_space_size, "action_space_size": env.action_space_size}
    model = Model.create("SharedActorCritic", **shape, architecture=[HIDDEN], key=nnx.Rngs(seed))
    trainer, arrays = Trainer.create("PPO", env=env, model=model, seed=seed, **settings), {}
    agents = trainer.env.max_num_agents
    for i in range(number):
        tape = Tape()
        before = parameters(nnx.merge(trainer.graphdef, trainer.graphstate)[0])
        with tape.watch(type(trainer)):
            trainer, td, metrics = trainer.epoch(trainer, jnp.asarray(i))
        kept = {"params_before": before, "metrics": metrics, "td_end": {name: getattr(td, name) for name in FIELDS}}
        kept |= {"init": {name: x[0] for name, x in tape.read("init").items()}}
        kept |= {group: tape.read(group) for group in ("recompute", "mb")}
        for group, parts in kept.items():
            arrays |= recorder.under(f"epoch{i}/{group}", parts)
    settings |= {"num_agents": agents, "num_segments": agents * sizes[0]}
    config = {name: np.asarray(x, np.float64) for name, x in settings.items()}
    config |= {"seed": np.int32(seed), "n_epochs_recorded": np.int32(number)}
    recorder.write(out / f"jaxdem_head_epoch_{case}.npz", **arrays, **recorder.under("cfg", config))


if __name__ == "__main__":
    recorder.record({case: functools.partial(run, case) for case in CASES}, "jaxdem_jaxagents", source=True)
