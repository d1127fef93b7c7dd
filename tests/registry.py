"""A registry of every public part, each with one or more settings; `test_laws.py` holds all of them to the same laws.

To test a new part, add a line here (until then, a completeness test fails).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ppo_parts as pp
from ppo_parts.testing import Subject, example_batch, example_context
from tests.common import OBS, SEGMENTS, TIME


class Case(NamedTuple):
    """A part under test: a public factory, and the arguments that it is called with."""

    make: Callable[..., pp.Part]
    args: tuple[Any, ...]
    numeric: Mapping[str, float]  # its numeric hyperparameters: each may be a float, an array or a schedule
    options: Mapping[str, Any]
    after: bool  # it gets a minibatch `[T, M]` with the policy being trained; otherwise, a rollout
    note: str  # what distinguishes it from other cases of the same factory
    continuous: bool  # actions are continuous, and the policy is Gaussian
    without: tuple[str, ...]  # fields of the batch that it rejects

    @property
    def id(self) -> str:
        return self.make.__name__ + (f"-{self.note}" if self.note else "")

    def part(self, **numeric: Any) -> pp.Part:
        return self.make(*self.args, **{**self.numeric, **self.options, **numeric})


def rollout(make, *args, note="", fixed=None, after=False, continuous=False, without=(), **given) -> Case:
    """Make a case on a rollout; all given floats are numeric hyperparameters, except those that are `fixed`."""
    numeric = {name: x for name, x in given.items() if isinstance(x, float)}
    options = {name: x for name, x in given.items() if name not in numeric} | (fixed or {})
    return Case(make, args, numeric, options, after, note, continuous, without)


minibatch = functools.partial(rollout, after=True)


def _double(batch: pp.Batch) -> pp.Batch:
    return batch.replace(reward=2 * batch.reward)


def embed(network, obs):
    return jnp.tanh(obs @ network)


_RND = lambda key: 0.1 * jax.random.normal(key, (OBS, 2)), embed
_ROWS = np.arange(TIME * SEGMENTS).reshape(2, -1)
_ESTIMATE = {"gamma": 0.9, "gae_lambda": 0.8}
_VTRACE = {**_ESTIMATE, "rho_clip": 1.2, "c_clip": 0.9}
_GAE = pp.gae(**_ESTIMATE)
_MIRROR = {"observation": lambda obs: -obs, "action": lambda action: action[..., ::-1], "continuous": True}
_SEATS = {"seat": "extras.own", "next_seat": "extras.own"}
_OTHER = {"estimator": "k3+", "direction": "current_to_reference", "reference": "own"}
_WITHIN = {"name": "within", "read": {"reward": "extras.own"}, "write": {"advantage": "extras.advantage"}}

CASES = (
    rollout(pp.identity),
    minibatch(pp.policy_diagnostics),
    rollout(pp.stateless, _double),
    rollout(pp.chain, note="empty"),
    rollout(pp.chain, _GAE, pp.advantage_normalize(), note="of two"),
    rollout(pp.gae, note="rollout", **_ESTIMATE),
    minibatch(pp.gae, note="minibatch", **_ESTIMATE),
    rollout(pp.vtrace, note="rollout", **_VTRACE),
    minibatch(pp.vtrace, note="minibatch", **_VTRACE),
    minibatch(pp.vtrace, note="policy gradient", gamma=0.9, pg_rho_clip=1.1, pg_lambda=0.7, policy_gradient=True),
    minibatch(pp.advantage_normalize, eps=1e-3, ddof=1),
    minibatch(pp.advantage_normalize, note="axis 0", axis=0),
    minibatch(pp.advantage_weight),
    minibatch(pp.clipped_surrogate, clip_eps=0.2),
    minibatch(pp.clipped_surrogate, note="all bounds", clip_eps=0.1, clip_eps_high=0.3, dual_clip=1.5, name="other"),
    minibatch(pp.policy_loss, pp.functional.clipped_surrogate, clip_eps=0.2, dual_clip=3.0),
    minibatch(pp.policy_loss, pp.functional.gspo, note="gspo", clip_eps=0.2),
    minibatch(pp.policy_loss, pp.functional.clip_cov, note="clip_cov", clip_eps=0.2, fraction=0.3, cov_low=0.01),
    minibatch(pp.kl_penalty, coef=0.1),
    minibatch(pp.kl_penalty, note="to another policy", coef=0.1, **_OTHER),
    minibatch(pp.kl_penalty, note="adaptive", target_kl=0.1, fixed={"coef": 0.5}, estimator="analytic"),
    minibatch(pp.regularizers.adaptive_entropy_bonus, target_entropy=0.5, learning_rate=0.1),
    minibatch(pp.regularizers.bounds_loss, coef=0.1, bound=0.5, continuous=True),
    minibatch(pp.regularizers.smoothness_loss, temporal=0.5, spatial=2.0, noise_scale=0.1, continuous=True),
    minibatch(pp.regularizers.proximal_average, decay=0.9),
    minibatch(pp.regularizers.perturbed_mean, scale=0.5, continuous=True),
    rollout(pp.symmetry.mirror_segments, without=("behavior",), **_MIRROR),
    minibatch(pp.symmetry.mirror_loss, coef=0.5, **_MIRROR),
    rollout(pp.tokens.importance_correction, high=1.2, low=0.9, reference="own"),
    minibatch(pp.tokens.importance_correction, note="mask", high=1.2, reference="own", mode="mask"),
    rollout(pp.tokens.importance_correction, note="sequence", high=1.2, reference="own", level="sequence"),
    minibatch(pp.tokens.aggregate, "given", length=4.0, by="sequence_sum"),
    minibatch(pp.tokens.aggregate, "given", note="sequence mean"),
    rollout(pp.tokens.group_advantage, eps=1e-3, ddof=0),
    rollout(pp.tokens.group_advantage, note="neighbors", group=2, baseline="leave_one_out", scale=None),
    rollout(pp.tokens.outcome_reward, kl_coef=0.1, score="score", reference="own"),
    rollout(pp.tokens.reward_to_go, gamma=0.9),
    minibatch(pp.exploration.self_imitation, coef=0.5, value_coef=0.1),
    rollout(pp.exploration.rnd_reward, *_RND, gamma=0.9, num_envs=SEGMENTS, predictor="policy"),
    minibatch(pp.exploration.rnd_loss, embed, coef=0.5, predictor="policy"),
    minibatch(pp.clipped_value_loss, clip_eps=0.2, coef=0.5),
    minibatch(pp.value_loss, coef=0.5),
    minibatch(pp.critics.critic_loss, pp.functional.huber_value_loss, coef=0.5, delta=0.3),
    rollout(pp.critics.normalize_target, lambda params, old, new: params, rate=0.1),
    minibatch(pp.entropy_bonus, coef=0.01),
    minibatch(pp.kl_early_stop, target_kl=0.1),
    minibatch(pp.kl_early_stop, note="sum", target_kl=5.0, estimator="k1", reduction="sum"),
    minibatch(pp.kl_early_stop, note="epoch", target_kl=0.1, check="epoch"),
    minibatch(pp.early_stop, "given", limit=0.1),
    rollout(pp.within, _GAE, **_WITHIN),
    rollout(pp.agents.zero_sum, _GAE, **_SEATS),
    minibatch(pp.agents.zero_sum, pp.vtrace(gamma=0.9), note="vtrace", **_SEATS),
    rollout(pp.combine_advantages, {"advantage": 0.5, "extras.own": 2.0}),
    rollout(pp.shuffled_minibatches, 2),
    rollout(pp.segment_minibatches, 2),
    rollout(pp.full_batch),
    rollout(pp.prioritized_sampler, 2, alpha=0.8, beta=0.4),
    rollout(pp.time_chunks, 2, length=3, burn_in=1),
    rollout(pp.sampler, "sampler", lambda *_: _ROWS, lambda item, *_: (item, None), num_minibatches=2, axis="step"),
    rollout(pp.given_indices, _ROWS),
    rollout(pp.given_indices, [[0, 2], [1, 0]], "segment", [[1.0, 0.5], [2.0, 1.0]], note="weighted segments"),
)
BEYOND: dict[str, tuple[float, ...]] = {  # the nearest numbers outside a hyperparameter's range
    **dict.fromkeys(("gamma", "gae_lambda", "pg_lambda", "fraction", "decay", "rate", "beta"), (-0.01, 1.01)),
    **dict.fromkeys(("rho_clip", "c_clip", "pg_rho_clip", "clip_eps", "clip_eps_high", "high", "length"), (0.0,)),
    **dict.fromkeys(("slope", "tau", "tau_negative", "sigma", "delta"), (0.0,)),
    **dict.fromkeys(("eps", "kappa", "kl_coef", "bound", "low", "coef", "value_coef", "alpha", "scale"), (-1e-9,)),
    **dict.fromkeys(("learning_rate", "target_kl", "noise_scale", "temporal", "spatial"), (-1e-9,)),
    **dict.fromkeys(("cov_low", "cov_high", "target_entropy", "limit"), ()),
    "dual_clip": (1.0,),
}
ELSEWHERE = {"phases", "replay"}  # only a learner runs these, or their state has shapes: see test_contract.py


@functools.cache
def subject(case_id: str) -> Subject:
    """Return the part of a case, together with its inputs."""
    [case] = [case for case in CASES if case.id == case_id]
    given = functools.partial(given_batch, case.after, case.continuous, without=case.without)
    return Subject(case.part(), given, example_context, case.after)


@functools.cache
def given_batch(
    after: bool, continuous: bool, seed: int = 0, dtype: Any = jnp.float32, without: tuple[str, ...] = ()
) -> pp.Batch:
    """Return a batch with everything that any part reads, except the fields `without`."""
    batch = example_batch(seed, dtype, after_sampler=after, continuous=continuous)
    embedded = embed(jnp.ones((OBS, 2), dtype), batch.obs)  # as `rnd_reward` does
    return batch.add_extras(rnd_target=embedded).replace(current=None, **dict.fromkeys(without))
