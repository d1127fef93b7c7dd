"""Record JaxDEM's PPOTrainer: whole epochs, advantages and losses alone, priorities and the shaping of rewards.

Run it with a checkout of the commit below, where the packages that it imports are installed:

    pip install jax==0.10.2 flax==0.12.8 optax==0.2.8 distrax==0.1.9 tqdm
    python tests/golden/record_jaxdem.py --source path/to/JaxDEM --seed 0

`epoch` runs without `jit`, so that the functions that it calls get numbers, which are written down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
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


class Tape(recorder.Tape):
    """What `epoch` passes to the functions that it calls, and what it gets from them."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, Callable[..., Any]] = {}  # in place of the library's own functions

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
            kind = "recompute" if "draw/idx" in self.rows else "init"  # of the rollout, or of what was drawn from it
            self.write(kind, row | {"returns": out[0], "advantage": out[1]})
            return out

        def recorded_choice(*args: Any, p: Any = None, **kwargs: Any) -> Any:
            drawn = choice(*args, p=p, **kwargs)
            self.write("draw", {"prio_probs": p, "idx": drawn})
            return drawn

        def recorded_power(base: Any, exponent: Any) -> Any:
            out = power(base, exponent)
            self.write("power", {"exponent": exponent, "out": out})
            return out

        def recorded_gradient(loss: Any, **kwargs: Any) -> Any:
            def call(model: Any, td: Any, returns: Any, advantage: Any, *args: Any, **carry: Any) -> Any:
                self.write("td", {name: getattr(td, name) for name in FIELDS})
                self.write("target", {"returns": returns, "advantage_norm_weighted": advantage})
                (value, aux), grads = gradient(loss, **kwargs)(model, td, returns, advantage, *args, **carry)
                self.write("loss", {"loss": value})
                self.write("aux", aux)
                self.write("grads", flat(grads))
                return (value, aux), grads

            return call

        def recorded_update(optimizer: Any, model: Any, grads: Any) -> None:
            self.write("params_before", parameters(model))
            update(optimizer, model, grads)
            self.write("params_after", parameters(model))

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


def settings_under(prefix: str, settings: dict[str, Any]) -> recorder.Arrays:
    return recorder.under(prefix, {name: np.asarray(x, np.float64) for name, x in settings.items()})


def save(out: Path, name: str, arrays: dict[str, Any]) -> None:
    recorder.write(out / f"jaxdem_head_{name}.npz", **arrays)


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

        model, optimizer = nnx.merge(trainer.graphdef, trainer.graphstate)
        kept = {"params_before": parameters(model), "opt_before": optimizer_state(optimizer)}
        with tape.watch(type(trainer)):
            trainer, td, metrics = trainer.epoch(trainer, jnp.asarray(i))
        model, optimizer = nnx.merge(trainer.graphdef, trainer.graphstate)
        kept |= {"params_after": parameters(model), "opt_after": optimizer_state(optimizer), "metrics": metrics}
        kept |= {"init": {name: x[0] for name, x in tape.read("init").items()}, "recompute": tape.read("recompute")}
        kept |= {"td_end": {name: getattr(td, name) for name in FIELDS}}
        kept |= {f"mb/{group}": tape.read(group) for group in ("params_before", "td", "aux", "grads", "params_after")}
        kept |= {"mb": tape.read("draw") | tape.read("target") | tape.read("loss")}
        for group, parts in kept.items():
            arrays |= recorder.under(f"epoch{i}/{group}", parts)
    settings = CREATE | changes | dict(zip(SIZES, sizes, strict=True))
    settings |= {"num_agents": agents, "num_segments": agents * sizes[0]}
    counts = {"seed": np.int32(seed), "n_epochs_recorded": np.int32(number)}
    return arrays | settings_under("cfg", settings) | recorder.under("cfg", counts)


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
        arrays |= recorder.under(f"{i}", given | last | {"returns": returns, "advantage": advantage})
        arrays |= settings_under(f"{i}/cfg", config)
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
        arrays |= recorder.under(f"{i}", given) | settings_under(f"{i}/cfg", config | {"box": boxed})
        for group, parts in {"params": parameters(model), "aux": aux, "grads": flat(grads)}.items():
            arrays |= recorder.under(f"{i}/{group}", parts)
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
        raised, corrected = tape.rows["power/out"]
        row = {"advantage": advantage, "prio_weights": raised, "seg_w": corrected}
        row |= {"beta_t": -tape.rows["power/exponent"][1]}
        row |= {name: tape.rows[f"draw/{name}"][0] for name in ("prio_probs", "idx")}
        row |= {"advantage_norm_weighted": tape.rows["target/advantage_norm_weighted"][0]}
        config = {"alpha": alpha, "beta0": beta, "anneal": anneal, "num_epochs": number, "epoch": epoch}
        arrays |= recorder.under(f"{i}", row) | settings_under(f"{i}/cfg", config)
    arrays["n"] = np.int32(i + 1)
    for i, (steps, envs, decay) in enumerate(((5, 3, 0.8), (17, 4, 1.0), (9, 2, 0.0), (64, 3, 0.5))):
        trainer = create("singleNavigator", {}, (envs, steps, 1, steps, 10), seed)
        plain, shaped = (
            one_epoch(dataclasses.replace(trainer, drip_decay=jnp.asarray(x)), np.random.default_rng((seed, i)), 0)
            for x in (0.0, decay)
        )
        before = {name: plain.rows[f"init/{name}"][0] for name in ("reward", "done")}
        arrays |= recorder.under(f"drip{i}", before | {"out": shaped.rows["init/reward"][0]})
        arrays |= settings_under(f"drip{i}/cfg", {"decay": decay})
    save(out, "priority", arrays)


if __name__ == "__main__":
    parts = (epochs, advantages, losses, priorities)
    recorder.record({part.__name__: part for part in parts}, "jaxdem_jaxagents", source=True)
