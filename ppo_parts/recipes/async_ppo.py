"""PPO whose actor collects one rollout ahead of the learner; V-trace corrects for the older policy.

    python -m ppo_parts.recipes.async_ppo --env-id gym:HalfCheetah-v5

While the learner updates on one rollout, the actor collects the next one in a thread, with the policy before that
update. This helps if environments step on the host and the learner has its own device or cores. On two cores,
HalfCheetah-v5 ran at 12,400 steps per second, compared with 11,200 with `mujoco_ppo`. A resumed run has no rollout in
progress, so its first rollout uses the latest policy, and it is not bit-identical to an uninterrupted run.
"""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

import ppo_parts as pp
from ppo_parts import envs, training
from ppo_parts.recipes import mujoco_ppo

Config = mujoco_ppo.Config
PRESETS = mujoco_ppo.PRESETS


@training.recipe
def make_train(config: Config, env: envs.Env | None = None, pipeline: pp.Part | None = None) -> training.Train:
    """Return the run of `mujoco_ppo` with V-trace, whose ratios compare the learner's policy with the actor's."""
    vtrace = pp.vtrace(gamma=config.gamma, gae_lambda=config.gae_lambda)
    corrected = mujoco_ppo.make_chain(config, advantages=vtrace, refresh="every_epoch")
    return mujoco_ppo.make_train(config, env, pipeline or corrected)


class OneAhead(training.Program):
    """A program that updates on one rollout while a thread collects the next."""

    def __post_init__(self) -> None:
        if (processes := jax.process_count()) > 1:  # threads may start programs in different orders
            raise pp.errors.UserValueError(f"OneAhead: a run must have one process, got {processes}: use mujoco_ppo")
        super().__post_init__()
        self.ahead: list[Future[Any]] = []  # the rollout in progress

    def advance_from(self, state: training.TrainState) -> Any:
        """Make `advance(state, most) -> (state, metrics)`, which runs one update; metrics have a first axis of 1."""
        seeds, actor = self.options.num_seeds, ThreadPoolExecutor(1, "actor")
        functions = self.train.collect, self.train.learn, lambda state: state.keys[0]
        collect, learn, next_key = (self.jit(training.vmap_over_seeds(each, seeds)) for each in functions)
        if self.mesh is None:  # otherwise the first update compiles, once a rollout's placement is known
            learn = learn.lower(state, jax.eval_shape(collect, state)).compile()
            collect, next_key = collect.lower(state).compile(), next_key.lower(state).compile()

        def collected_by(state: training.TrainState) -> Any:
            with envs.host_errors():  # in the thread where an environment raises
                return jax.block_until_ready(collect(state))  # type: ignore[no-untyped-call]

        def advance(state: training.TrainState, most: int) -> tuple[training.TrainState, dict[str, np.ndarray]]:
            collected = self.ahead.pop().result() if self.ahead else collected_by(state)
            if int(np.max(state.learner.step)) + 1 < self.train.num_updates:
                later = training.TrainState(next_key(state), state.learner, collected[0])
                self.ahead.append(actor.submit(collected_by, later))
            state, metrics = jax.block_until_ready(learn(state, collected))  # type: ignore[no-untyped-call]
            values = np.asarray(metrics.array)
            return state, {name: values[None, ..., i] for i, name in enumerate(metrics.names)}

        return advance


if __name__ == "__main__":
    training.main(make_train, PRESETS, run=functools.partial(training.run, make_program=OneAhead))
