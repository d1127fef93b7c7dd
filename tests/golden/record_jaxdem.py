"""Record JaxDEM's PPOTrainer: whole epochs, advantages and losses alone, priorities and the shaping of rewards.

Run it with a checkout of the commit below, where the packages that it imports are installed:

    pip install jax==0.10.2 flax==0.12.8 optax==0.2.8 distrax==0.1.9 tqdm
    python tests/golden/record_jaxdem.py --source path/to/JaxDEM --seed 0

`epoch` runs without `jit`, so that the functions that it calls get numbers, which are written down.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import _recorder as recorder
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

COMMIT = "5d9c13a"  # 2026-06-29
OBS, ACTIONS, HIDDEN = 3, 2, 8  # where a function is called alone
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
CLIPS, HYPER = ((0.5, 0.5), (1, 1), (2, 2), (0.5, 2), (2, 0.5)), ((0.99, 0.95), (0.9, 0.8), (1, 1))
FIELDS = ("obs", "action", "reward", "done", "value", "log_prob", "ratio")
GIVEN = ("value", "reward", "ratio", "done")
OPTIMIZER = {  # where the state of the optimizer is, and its name in the recording
    "opt_state/1/inner_states/adam/inner_state/0": "adam",
    "opt_state/1/inner_states/adam/inner_state/2": "adam_schedule",
    "opt_state/1/inner_states/muon/inner_state/0": "muon",
    "opt_state/1/inner_states/muon/inner_state/3": "muon_schedule",
    "opt_state/2": "apply_every",
}


def flat(state: Any) -> recorder.Arrays:
    """Copies of a state's arrays, by their paths."""
    leaves = {"/".join(map(str, path)): x.get_value() for path, x in nnx.to_flat_state(state)}
    return {name: np.array(x) for name, x in leaves.items() if hasattr(x, "shape")}


def parameters(model: Any) -> recorder.Arrays:
    return flat(nnx.state(model, nnx.Param))


def optimizer_state(optimizer: Any) -> recorder.Arrays:
    def renamed(path: str) -> str:
        for place, name in OPTIMIZER.items():
            path = path.replace(f"{place}/", f"{name}_")
        return {"step": "nnx_step"}.get(path, path.replace("grad_acc", "acc"))

    return {renamed(path): x for path, x in flat(nnx.state(optimizer)).items()}


class Tape:
    """What `epoch` passes to the functions that it calls, and what it gets from them."""

    def __init__(self) -> None:
        self.rows: dict[str, list[recorder.Arrays]] = defaultdict(list)
        self.given: dict[str, Callable[..., Any]] = {}  # in place of the library's own functions

    def write(self, kind: str, **row: Any) -> None:
        self.rows[kind].append({name: np.array(x) for name, x in row.items()})

    def read(self, kind: str) -> recorder.Arrays:
        return {name: np.stack([row[name] for row in self.rows[kind]]) for name in self.rows[kind][0]}

    @contextlib.contextmanager
    def watch(self, trainer: Any) -> Iterator[None]:
        rollout, advantages = trainer.trajectory_rollout, trainer.compute_advantages
        choice, gradient, update, power = jax.random.choice, nnx.value_and_grad, nnx.Optimizer.update, jnp.power

        def compiled_rollout(*args: Any, **kwargs: Any) -> Any:
            with jax.disable_jit(False):
                return self.given.get("rollout", rollout)(*args, **kwargs)

        def recorded_advantages(*args: Any, last_value: Any) -> Any:
            row = dict(zip(GIVEN, args, strict=False)) | {"last_value": last_value}
            out = self.given.get("advantages", advantages)(*args, last_value=last_value)
            self.write("advantages", **row, returns=out[0], advantage=out[1])
            return out

        def recorded_choice(*args: Any, p: Any = None, **kwargs: Any) -> Any:
            drawn = choice(*args, p=p, **kwargs)
            self.write("draw", prio_probs=p, idx=drawn)
            return drawn

        def recorded_power(base: Any, exponent: Any) -> Any:
            self.write("power", exponent=exponent, out=(out := power(base, exponent)))
            return out

        def recorded_gradient(loss: Any, **kwargs: Any) -> Any:
            def call(model: Any, td: Any, returns: Any, advantage: Any, *args: Any, **carry: Any) -> Any:
                self.write("td", **{name: getattr(td, name) for name in FIELDS})
                self.write("target", returns=returns, advantage_norm_weighted=advantage)
                (value, aux), grads = gradient(loss, **kwargs)(model, td, returns, advantage, *args, **carry)
                self.write("loss", loss=value)
                self.write("aux", **aux)
                self.write("grads", **flat(grads))
                return (value, aux), grads

            return call

        def recorded_update(optimizer: Any, model: Any, grads: Any) -> None:
            self.write("params_before", **parameters(model))
            update(optimizer, model, grads)
            self.write("params_after", **parameters(model))

        with contextlib.ExitStack() as stack:
            for owner, name, function in (
                (trainer, "trajectory_rollout", staticmethod(compiled_rollout)),
                (trainer, "compute_advantages", staticmethod(recorded_advantages)),
                (jax.random, "choice", recorded_choice),
                (jnp, "power", recorded_power),
                (nnx, "value_and_grad", recorded_gradient),
                (nnx.Optimizer, "update", recorded_update),
            ):
                stack.enter_context(mock.patch.object(owner, name, function))
            stack.enter_context(jax.disable_jit())
            yield


def create(env: str, options: dict[str, Any], sizes: tuple[int, ...], seed: int, **changes: Any) -> Any:
    from jaxdem.rl.environments import Environment
    from jaxdem.rl.trainers import Trainer

    one = Environment.create(env, **options)
    model = network(seed, one.observation_space_size, one.action_space_size)
    return Trainer.create(
        "PPO", env=one, model=model, seed=seed, **(CREATE | changes | dict(zip(SIZES, sizes, strict=True)))
    )


def network(seed: int, inputs: int, outputs: int, **options: Any) -> Any:
    from jaxdem.rl.models import Model

    sizes = {"observation_space_size": inputs, "action_space_size": outputs, "architecture": [HIDDEN]}
    return Model.create("SharedActorCritic", **sizes, key=nnx.Rngs(seed), **options)


def save(out: Path, name: str, arrays: dict[str, Any]) -> None:
    path = out / f"jaxdem_head_{name}.npz"
    recorder.write(path, **arrays)


def epochs(source: Path, out: Path, seed: int) -> None:
    """Whole epochs in the library's environments."""
    sys.path.insert(0, str(source))
    for case in CASES:
        save(out, f"epoch_{case}", play(case, seed))


def play(case: str, seed: int) -> dict[str, Any]:
    env, options, sizes, changes, number = CASES[case]
    trainer, arrays = create(env, options, sizes, seed, **changes), {}
    agents = trainer.env.max_num_agents
    for i in range(number):
        tape = Tape()

        def keep(group: str, parts: dict[str, Any], prefix: str = f"epoch{i}") -> None:
            arrays.update({f"{prefix}/{group}/{name}": np.array(x) for name, x in parts.items()})

        model, optimizer = nnx.merge(trainer.graphdef, trainer.graphstate)
        keep("params_before", parameters(model))
        keep("opt_before", optimizer_state(optimizer))
        with tape.watch(type(trainer)):
            trainer, td, metrics = trainer.epoch(trainer, jnp.asarray(i))
        model, optimizer = nnx.merge(trainer.graphdef, trainer.graphstate)
        keep("params_after", parameters(model))
        keep("opt_after", optimizer_state(optimizer))
        keep("td_end", {name: getattr(td, name) for name in FIELDS})
        first, *again = tape.rows["advantages"]
        keep("init", first)
        tape.rows["advantages"] = again
        keep("recompute", tape.read("advantages"))
        keep("metrics", metrics)
        for group in ("params_before", "td", "aux", "grads", "params_after"):
            keep(f"mb/{group}", tape.read(group))
        for group in ("draw", "target", "loss"):
            keep("mb", tape.read(group))
    settings = CREATE | changes | dict(zip(SIZES, sizes, strict=True))
    settings |= {"num_agents": agents, "num_segments": agents * sizes[0]}
    arrays |= {f"cfg/{name}": np.float64(x) for name, x in settings.items()}
    counts = {"seed": seed, "n_epochs_recorded": number}
    return arrays | {f"cfg/{name}": np.int32(x) for name, x in counts.items()}


def advantages(source: Path, out: Path, seed: int) -> None:
    """`compute_advantages` alone."""
    sys.path.insert(0, str(source))
    from jaxdem.rl.trainers.ppo_trainer import PPOTrainer

    rng, arrays = np.random.default_rng(seed), {}
    shapes = ((1, 1), (2, 3), (7, 5), (16, 4), (33, 2), (64, 6))
    for i, (shape, (rho_clip, c_clip), has_last) in enumerate(itertools.product(shapes, CLIPS, (False, True))):
        gamma, gae_lambda = HYPER[i % 3]
        given = {name: rng.normal(size=shape).astype(np.float32) for name in ("value", "reward", "ratio")}
        given |= {"ratio": np.exp(0.6 * given["ratio"]), "done": rng.random(shape) < 0.2}
        last = {"last_value": rng.normal(size=shape[1:]).astype(np.float32)} if has_last else {}
        args = [jnp.asarray(given[name]) for name in GIVEN]
        returns, advantage = PPOTrainer.compute_advantages(*args, rho_clip, c_clip, gamma, gae_lambda, **last)
        config = {"rho_clip": rho_clip, "c_clip": c_clip, "gamma": gamma, "gae_lambda": gae_lambda}
        config |= {"has_last_value": has_last}
        arrays |= {f"{i}/{name}": x for name, x in (given | last).items()}
        arrays |= {f"{i}/returns": returns, f"{i}/advantage": advantage}
        arrays |= {f"{i}/cfg/{name}": np.float64(x) for name, x in config.items()}
    save(out, "advantages", arrays | {"n": np.int32(i + 1)})


def losses(source: Path, out: Path, seed: int) -> None:
    """`loss_fn` alone, with and without a box as action space."""
    sys.path.insert(0, str(source))
    from jaxdem.rl.action_spaces import ActionSpace
    from jaxdem.rl.trainers import TrajectoryData
    from jaxdem.rl.trainers.ppo_trainer import PPOTrainer

    rng, arrays = np.random.default_rng(seed), {}
    shapes = ((6, 4), (9, 3), (5, 7), (8, 5))
    coefficients = ((0.2, 0.5, 0.03), (0.1, 2.0, 0.0), (0.3, 1.0, 0.2), (0.2, 2.0, 0.001))

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    for i, (boxed, k) in enumerate(itertools.product((False, True), range(4))):
        shape, config = shapes[k], dict(zip(("clip_eps", "value_coeff", "entropy_coeff"), coefficients[k], strict=True))
        limits = {"x_min": np.full(ACTIONS, -1.5), "x_max": np.ones(ACTIONS), "width": 1.3}
        space = ActionSpace.create("box", **limits) if boxed else None
        model = network(seed + i, OBS, ACTIONS, action_space=space, critic_scale=1.0)
        nnx.update(model, jax.tree.map(lambda x: x + 0.1 * draw(*x.shape), nnx.state(model, nnx.Param)))
        obs = draw(*shape, OBS)
        policy, value = model(jnp.asarray(obs), sequence=True)
        action = policy.sample(seed=jax.random.key(seed + i))
        new = np.asarray(policy.log_prob(action))
        given = {"obs": obs, "action": action, "reward": draw(*shape), "done": rng.random(shape) < 0.2}
        given |= {"old_value": value[..., 0] + 0.3 * draw(*shape), "old_log_prob": new + 0.3 * draw(*shape)}
        given |= {"returns": draw(*shape), "advantage": draw(*shape)}
        td = TrajectoryData(
            **{name: jnp.asarray(given[name]) for name in ("obs", "action", "reward", "done")},
            value=given["old_value"],
            log_prob=given["old_log_prob"],
            ratio=jnp.ones(shape),
        )
        inputs = (td, given["returns"], given["advantage"], *config.values())
        (loss, aux), grads = nnx.value_and_grad(PPOTrainer.loss_fn, has_aux=True)(model, *inputs)
        given |= {"loss": loss, "new_value": value[..., 0], "new_log_prob": new, "entropy_per_state": policy.entropy()}
        if boxed:
            half = (1 - 1e-6) * (limits["x_max"] - limits["x_min"]) / 2
            config |= {"box_center": (limits["x_min"] + limits["x_max"]) / 2, "box_half": half}
            config |= {"box_width": limits["width"], "box_eps": 1e-6}
        parts = {"params": parameters(model), "aux": aux, "grads": flat(grads)}
        parts |= {"cfg": {name: np.asarray(x, np.float64) for name, x in (config | {"box": boxed}).items()}}
        arrays |= {f"{i}/{name}": np.array(x) for name, x in given.items()}
        arrays |= {f"{i}/{group}/{name}": x for group, part in parts.items() for name, x in part.items()}
    save(out, "loss", arrays | {"n": np.int32(i + 1)})


def one_epoch(trainer: Any, rng: np.random.Generator, epoch: int, advantage: Any = None) -> Tape:
    """An epoch with a random rollout, and perhaps with given advantages."""
    from jaxdem.rl.trainers import TrajectoryData

    steps, envs = trainer.num_steps_epoch, trainer.env.num_envs
    inputs, outputs = trainer.env.observation_space_size, trainer.env.action_space_size

    def rollout(env: Any, graphdef: Any, graphstate: Any, key: Any, *_: Any, **__: Any) -> Any:
        def draw(*shape: int) -> Any:
            return jnp.asarray(rng.normal(size=(steps, envs, 1, *shape)), jnp.float32)

        fields = {"obs": draw(inputs), "action": draw(outputs), "done": draw() > 1}
        td = TrajectoryData(**fields, value=draw(), log_prob=draw(), reward=draw(), ratio=jnp.ones((steps, envs, 1)))
        return env, graphstate, key, td

    def given(value: Any, *_: Any, **__: Any) -> Any:
        return value, jnp.asarray(advantage)[:, : value.shape[1]]

    tape = Tape()
    tape.given = {"rollout": rollout} | ({} if advantage is None else {"advantages": given})
    with tape.watch(type(trainer)):
        trainer.epoch(trainer, jnp.asarray(epoch))
    return tape


def priorities(source: Path, out: Path, seed: int) -> None:
    """What `epoch` makes of given advantages and of random rewards."""
    sys.path.insert(0, str(source))
    rng, arrays = np.random.default_rng(seed), {}
    settings = itertools.product(((4, 5, 2), (16, 8, 4), (32, 24, 12)), (0.0, 0.4, 0.8, 1.0), range(2))
    for i, ((steps, envs, drawn), alpha, _) in enumerate(settings):
        beta, anneal, number = rng.choice((0.1, 0.2, 0.5)), rng.choice(2), int(rng.choice((7, 10, 1000)))
        epoch, sizes = int(rng.integers(number)), (envs, steps, 1, drawn * steps, number)
        weights = {"importance_sampling_alpha": alpha, "importance_sampling_beta": beta}
        weights |= {"anneal_importance_sampling_beta": anneal}
        advantage = rng.normal(size=(steps, envs)).astype(np.float32) * rng.exponential(size=envs).astype(np.float32)
        tape = one_epoch(create("singleNavigator", {}, sizes, seed, **weights), rng, epoch, advantage)
        raised, corrected = tape.rows["power"]
        row = {"advantage": advantage, "prio_weights": raised["out"], "seg_w": corrected["out"]}
        row |= {"beta_t": -corrected["exponent"], **tape.rows["draw"][0]}
        row |= {"advantage_norm_weighted": tape.rows["target"][0]["advantage_norm_weighted"]}
        config = {"alpha": alpha, "beta0": beta, "anneal": anneal, "num_epochs": number, "epoch": epoch}
        arrays |= {f"{i}/{name}": x for name, x in row.items()}
        arrays |= {f"{i}/cfg/{name}": np.float64(x) for name, x in config.items()}
    arrays["n"] = np.int32(i + 1)
    for i, (steps, envs, decay) in enumerate(((5, 3, 0.8), (17, 4, 1.0), (9, 2, 0.0), (64, 3, 0.5))):
        trainer = create("singleNavigator", {}, (envs, steps, 1, steps, 10), seed)
        plain, shaped = (
            one_epoch(dataclasses.replace(trainer, drip_decay=jnp.asarray(x)), np.random.default_rng((seed, i)), 0)
            for x in (0.0, decay)
        )
        before, after = (tape.rows["advantages"][0] for tape in (plain, shaped))
        arrays |= {f"drip{i}/{name}": before[name] for name in ("reward", "done")}
        arrays |= {f"drip{i}/out": after["reward"], f"drip{i}/cfg/decay": np.float64(decay)}
    save(out, "priority", arrays)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "jaxdem_jaxagents")
    parts = (epochs, advantages, losses, priorities)
    recorder.record({part.__name__: part for part in parts}, parser)
