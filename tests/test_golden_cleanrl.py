"""CleanRL's `ppo.py` and `ppo_continuous_action.py`, number by number, from our chain and learner.

Only the rollouts, the first parameters and the minibatch indices are taken from the recordings
(`golden/cleanrl_pufferlib/README.md`). Everything else, over all minibatches and iterations, comes out of `learner.update`,
each case in one free run that is never put back on the recorded track.

Deviations, all far below the bounds here: optax clips gradients by `c / norm`, torch by `c / (norm + 1e-6)`; k3 is computed with
`expm1`, the peer's `(ratio - 1) - log_ratio` keeps the rounding noise of `ratio`.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp

FOLDER = Path(__file__).parent / "golden" / "cleanrl_pufferlib"
CASES = ("a_default", "a_biglr", "b_noclipv_nonorm", "c_target_kl", "d_continuous", "e_continuous_trunc")
PER_ELEMENT = ("newlogprob", "ratio", "newvalue", "entropy", "mb_advantages")
SCALARS = {  # the peer's name: ours
    "pg_loss": "policy_loss",
    "v_loss": "value_loss",
    "entropy_loss": "entropy",
    "approx_kl": "approx_kl",
    "old_approx_kl": "approx_kl_k1",
    "clipfrac": "clip_fraction",
    "loss": "loss",
}
RTOL = 1e-4
ATOL = 2e-7  # float32 rounding of numbers of size 1: means that cancel, such as the KL and the policy loss at ratio 1


class Tape(NamedTuple):
    """A growing record, as a state that keeps its shape."""

    count: jax.Array
    rows: Any

    @classmethod
    def blank(cls, length: int, row: Any) -> "Tape":
        return cls(jnp.zeros((), jnp.int32), jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), row))

    def write(self, row: Any) -> "Tape":
        return Tape(self.count + 1, jax.tree.map(lambda rows, x: rows.at[self.count].set(x), self.rows, row))


def record(length: int, read: Callable[[pp.Batch], dict[str, jax.Array]], **shapes: tuple[int, ...]) -> pp.Part:
    """A part that changes nothing and writes down what `read` sees."""
    row = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return pp.Part(
        init=lambda params: Tape.blank(length, row),
        update=lambda batch, tape, context: (batch, tape.write(read(batch))),
        name="record",
    )


def record_gradients(length: int) -> optax.GradientTransformation:
    """An optimizer that changes nothing and writes down gradients and the parameters they belong to."""
    return optax.GradientTransformation(
        init=lambda params: Tape.blank(length, {"grad": params, "params": params}),
        update=lambda grads, tape, params: (grads, tape.write({"grad": grads, "params": params})),
    )


def evaluate(params: dict[str, jax.Array], batch: pp.Batch) -> tuple[Any, jax.Array]:
    """Two tanh MLPs; torch's layout, y = x Wᵀ + b."""

    def mlp(name: str) -> jax.Array:
        x = batch.obs
        for layer in (0, 2, 4):
            x = x @ params[f"{name}.{layer}.weight"].T + params[f"{name}.{layer}.bias"]
            x = x if layer == 4 else jnp.tanh(x)
        return x

    value = mlp("critic")[..., 0]
    if "actor_logstd" not in params:
        return distrax.Categorical(mlp("actor")), value
    mean = mlp("actor_mean")
    return distrax.MultivariateNormalDiag(mean, jnp.broadcast_to(jnp.exp(params["actor_logstd"][0]), mean.shape)), value


def rollout(z: dict[str, np.ndarray], it: str, continuous: bool) -> pp.Batch:
    """The recorded rollout in our convention: CleanRL's `dones[t]` belongs to step t - 1, and truncation counts as
    termination."""
    action, value = z[it + "actions"], jnp.asarray(z[it + "values"])
    return pp.Batch(
        obs=jnp.asarray(z[it + "obs"]),
        action=jnp.asarray(action if continuous else action.astype(np.int32)),
        log_prob=jnp.asarray(z[it + "logprobs"]),
        value=value,
        reward=jnp.asarray(z[it + "rewards"]),
        terminated=jnp.concatenate([z[it + "dones"][1:], z[it + "next_done"][None]]),
        next_value=pp.functional.next_values(value, jnp.asarray(z[it + "next_value"])),
    )


def read_minibatch(batch: pp.Batch) -> dict[str, jax.Array]:
    seen = {theirs: batch.metrics[ours] for theirs, ours in SCALARS.items() if ours != "loss"}
    return seen | {
        "loss": sum(pp.functional.masked_mean(loss) for loss in batch.losses.values()),
        "newlogprob": batch.current.log_prob,
        "ratio": jnp.exp(batch.current_log_ratio()),
        "newvalue": batch.current.value,
        "entropy": batch.current.distribution.entropy(),
        "mb_advantages": batch.advantage,
    }


class Iteration(NamedTuple):
    """Ours of one iteration."""

    recorded: str  # prefix of the peer's arrays
    count: int  # minibatches the peer ran
    rollout: dict[str, np.ndarray]
    minibatches: dict[str, np.ndarray]
    grad: dict[str, np.ndarray]
    params: dict[str, np.ndarray]  # before each minibatch, and once more after the last
    metrics: dict[str, np.ndarray]


@functools.cache
def play(case: str) -> tuple[dict[str, np.ndarray], dict[str, Any], list[Iteration]]:
    """Run all iterations of a case through the learner; optimizer state and step go on from one to the next."""
    z = dict(np.load(FOLDER / f"cleanrl_{case}.npz"))
    args = json.loads(str(z["meta"]))["args"]
    epochs, per_epoch, size = args["update_epochs"], args["num_minibatches"], args["minibatch_size"]
    iterations, steps = args["num_iterations"], args["update_epochs"] * args["num_minibatches"]
    normalize = (pp.advantage_normalize(ddof=1),) if args["norm_adv"] else ()
    stop = (pp.kl_early_stop(args["target_kl"], check="epoch"),) if args["target_kl"] else ()
    value_loss = functools.partial(pp.clipped_value_loss, clip_eps=args["clip_coef"]) if args["clip_vloss"] else None
    annealed = pp.linear_schedule(args["learning_rate"], 0.0, iterations)
    optimizer = optax.chain(
        record_gradients(steps),
        optax.clip_by_global_norm(args["max_grad_norm"]),
        optax.scale_by_adam(eps=1e-5),
        pp.per_update_learning_rate(annealed if args["anneal_lr"] else args["learning_rate"]),
    )

    def learner(indices: np.ndarray) -> pp.Learner:
        before = record(
            1,
            lambda batch: {"advantages": batch.advantage, "returns": batch.target},
            advantages=(args["num_steps"], args["num_envs"]),
            returns=(args["num_steps"], args["num_envs"]),
        )
        after = record(steps, read_minibatch, **dict.fromkeys(PER_ELEMENT, (size,)), **dict.fromkeys(SCALARS, ()))
        pipeline = pp.chain(
            pp.gae(gamma=args["gamma"], gae_lambda=args["gae_lambda"]),
            before,
            pp.given_indices(indices),
            *normalize,
            pp.clipped_surrogate(clip_eps=args["clip_coef"]),
            (value_loss or pp.value_loss)(coef=args["vf_coef"]),
            pp.entropy_bonus(coef=args["ent_coef"]),
            *stop,
            after,
        )
        return pp.learner(evaluate, pipeline, optimizer)

    params = {name: jnp.asarray(z[f"it0/params_start/{name}"]) for name in z["param_names"]}
    state, played = None, []
    for i in range(iterations):
        it = f"it{i}/"
        indices = z[it + "mb/mb_inds"].astype(np.int32).reshape(-1, per_epoch, size)
        # Where the peer stopped early the last epoch is repeated, so that a learner that does not stop runs on.
        indices = np.concatenate([indices, *[indices[-1:]] * (epochs - len(indices))])
        ours = learner(indices)
        fresh = ours.init(params)
        if state is None:
            state = fresh
        else:  # blank tapes; everything else goes on
            state = state._replace(pipeline=fresh.pipeline, opt_state=(fresh.opt_state[0], *state.opt_state[1:]))
        state, metrics = jax.jit(ours.update)(jax.random.key(i), state, rollout(z, it, "actor_logstd" in params))
        before, after = state.pipeline[1][0][-1], state.pipeline[1][1][-1]
        steps_tape, count = state.opt_state[0], len(z[it + "mb/epoch"])
        assert int(after.count) == int(steps_tape.count)
        history = {k: np.concatenate([v[:count], state.params[k][None]]) for k, v in steps_tape.rows["params"].items()}
        played.append(
            Iteration(
                it,
                count,
                {k: np.asarray(v[0]) for k, v in before.rows.items()},
                {k: np.asarray(v[:count]) for k, v in after.rows.items()},
                {k: np.asarray(v[:count]) for k, v in steps_tape.rows["grad"].items()},
                history,
                {k: np.asarray(v) for k, v in metrics.items()},
            )
        )
    return z, args, played
