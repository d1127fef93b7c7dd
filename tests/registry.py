"""Every public part, once or a few times with different settings; `test_laws.py` holds each to the same laws.

A new part is tested by adding a line here (and a completeness test fails until it is).
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
    """A part under test.

    Attributes:
        make: the public factory.
        args, options: what it is called with besides
        numeric: its numeric hyperparameters: each may be a float, an array or a schedule.
        after: True: it is given a minibatch `[T, M]` with the policy being trained; False: a rollout.
        note: what tells it from another case of the same factory.
        continuous: whether the actions are continuous and the policy is Gaussian.
        without: fields of the batch that it rejects.
    """

    make: Callable[..., pp.Part]
    args: tuple[Any, ...] = ()
    numeric: Mapping[str, float] = {}
    options: Mapping[str, Any] = {}
    after: bool = False
    note: str = ""
    continuous: bool = False
    without: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return self.make.__name__ + (f"-{self.note}" if self.note else "")

    def part(self, **numeric: Any) -> pp.Part:
        return self.make(*self.args, **{**self.numeric, **self.options, **numeric})


def _double(batch: pp.Batch) -> pp.Batch:
    return batch.replace(reward=2 * batch.reward)


def _halves(key, batch, epoch):
    return jnp.arange(batch.log_prob.size).reshape(2, -1)


def _draw(key):
    return 0.1 * jax.random.normal(key, (OBS, 2))


def _embed(network, obs):
    return jnp.tanh(obs @ network)


def _whole_item(item, batch, context):
    return item, None


_ROWS = np.arange(TIME * SEGMENTS).reshape(2, -1)
_ESTIMATE = {"gamma": 0.9, "gae_lambda": 0.8}
_CLIPS = {"rho_clip": 1.2, "c_clip": 0.9}

CASES = (
    Case(pp.identity),
    Case(pp.policy_diagnostics, after=True),
    Case(pp.stateless, (_double,)),
    Case(pp.chain, note="empty"),
    Case(pp.chain, (pp.gae(**_ESTIMATE), pp.advantage_normalize()), note="of two"),
    Case(pp.gae, numeric=_ESTIMATE, note="rollout"),
    Case(pp.gae, numeric=_ESTIMATE, after=True, note="minibatch"),
    Case(pp.vtrace, numeric=_ESTIMATE | _CLIPS, note="rollout"),
    Case(pp.vtrace, numeric=_ESTIMATE | _CLIPS, after=True, note="minibatch"),
    Case(
        pp.vtrace,
        numeric={"gamma": 0.9, "pg_rho_clip": 1.1, "pg_lambda": 0.7},
        options={"policy_gradient": True},
        after=True,
        note="policy gradient",
    ),
    Case(pp.advantage_normalize, numeric={"eps": 1e-3}, options={"ddof": 1}, after=True),
    Case(pp.advantage_normalize, options={"axis": 0}, after=True, note="axis 0"),
    Case(pp.advantage_weight, after=True),
    Case(pp.clipped_surrogate, numeric={"clip_eps": 0.2}, after=True),
    Case(
        pp.clipped_surrogate,
        numeric={"clip_eps": 0.1, "clip_eps_high": 0.3, "dual_clip": 1.5},
        options={"name": "other"},
        after=True,
        note="all bounds",
    ),
    Case(pp.policy_loss, (pp.functional.clipped_surrogate,), {"clip_eps": 0.2, "dual_clip": 3.0}, after=True),
    Case(pp.kl_penalty, numeric={"coef": 0.1}, after=True),
    Case(
        pp.kl_penalty,
        numeric={"coef": 0.1},
        options={"estimator": "k3+", "direction": "current_to_reference", "reference": "own"},
        after=True,
        note="to another policy",
    ),
    Case(pp.kl_penalty, (), {"target_kl": 0.1}, {"coef": 0.5, "estimator": "analytic"}, after=True, note="adaptive"),
    Case(pp.regularizers.adaptive_entropy_bonus, numeric={"target_entropy": 0.5, "learning_rate": 0.1}, after=True),
    Case(pp.regularizers.bounds_loss, numeric={"coef": 0.1, "bound": 0.5}, after=True, continuous=True),
    Case(
        pp.symmetry.mirror_segments,
        options={"observation": lambda obs: -obs, "action": lambda action: action[..., ::-1]},
        continuous=True,
        without=("behavior",),
    ),
    Case(
        pp.symmetry.mirror_loss,
        numeric={"coef": 0.5},
        options={"observation": lambda obs: -obs, "action": lambda action: action[..., ::-1]},
        after=True,
        continuous=True,
    ),
    Case(
        pp.regularizers.smoothness_loss,
        numeric={"temporal": 0.5, "spatial": 2.0, "noise_scale": 0.1},
        after=True,
        continuous=True,
    ),
    Case(pp.regularizers.proximal_average, numeric={"decay": 0.9}, after=True),
    Case(pp.regularizers.perturbed_mean, numeric={"scale": 0.5}, after=True, continuous=True),
    Case(pp.tokens.importance_correction, numeric={"high": 1.2, "low": 0.9}, options={"reference": "own"}),
    Case(
        pp.tokens.importance_correction,
        (),
        {"high": 1.2},
        {"reference": "own", "mode": "mask"},
        after=True,
        note="mask",
    ),
    Case(
        pp.tokens.importance_correction, (), {"high": 1.2}, {"reference": "own", "level": "sequence"}, note="sequence"
    ),
    Case(pp.exploration.self_imitation, numeric={"coef": 0.5, "value_coef": 0.1}, after=True),
    Case(pp.policy_loss, (pp.functional.gspo,), {"clip_eps": 0.2}, after=True, note="gspo"),
    Case(pp.tokens.clip_cov, numeric={"clip_eps": 0.2, "fraction": 0.3}, options={"cov_low": 0.01}, after=True),
    Case(pp.tokens.kl_cov, numeric={"fraction": 0.3, "coef": 0.5}, after=True),
    Case(pp.tokens.aggregate, ("given",), {"length": 4.0}, {"by": "sequence_sum"}, after=True),
    Case(pp.tokens.aggregate, ("given",), after=True, note="sequence mean"),
    Case(pp.tokens.group_advantage, numeric={"eps": 1e-3}, options={"ddof": 0}),
    Case(pp.tokens.group_advantage, (), {}, {"group": 2, "baseline": "leave_one_out", "scale": None}, note="neighbors"),
    Case(pp.tokens.outcome_reward, numeric={"kl_coef": 0.1}, options={"score": "score", "reference": "own"}),
    Case(pp.exploration.rnd_reward, (_draw, _embed), {"gamma": 0.9}, {"num_envs": SEGMENTS, "predictor": "policy"}),
    Case(pp.tokens.reward_to_go, numeric={"gamma": 0.9}),
    Case(pp.clipped_value_loss, numeric={"clip_eps": 0.2, "coef": 0.5}, after=True),
    Case(pp.value_loss, numeric={"coef": 0.5}, after=True),
    Case(pp.critics.critic_loss, (pp.functional.huber_value_loss,), {"coef": 0.5, "delta": 0.3}, after=True),
    Case(pp.critics.normalize_target, (lambda params, old, new: params,), {"rate": 0.1}),
    Case(pp.entropy_bonus, numeric={"coef": 0.01}, after=True),
    Case(pp.loss_weight, ("given",), after=True),
    Case(pp.kl_early_stop, (), numeric={"target_kl": 0.1}, after=True),
    Case(pp.kl_early_stop, (), {"target_kl": 5.0}, {"estimator": "k1", "reduction": "sum"}, after=True, note="sum"),
    Case(pp.kl_early_stop, (), {"target_kl": 0.1}, {"check": "epoch", "over": "mean"}, after=True, note="epoch mean"),
    Case(pp.shuffled_minibatches, (2,)),
    Case(pp.segment_minibatches, (2,)),
    Case(pp.prioritized_sampler, (2,), numeric={"alpha": 0.8, "beta": 0.4}),
    Case(pp.prioritized_sampler, (2,), {"alpha": 0.8, "beta": 0.4}, {"replacement": True}, note="replacement"),
    Case(pp.prioritized_sampler, (2,), {"alpha": 0.8, "beta": 0.4}, {"weights": "inclusion"}, note="inclusion"),
    Case(pp.full_batch),
    Case(pp.early_stop, ("given",), {"limit": 0.1}, after=True),
    Case(
        pp.within,
        (pp.gae(**_ESTIMATE),),
        options={"name": "within", "read": {"reward": "extras.own"}, "write": {"advantage": "extras.advantage"}},
    ),
    Case(pp.agents.zero_sum, (pp.gae(**_ESTIMATE),), options={"seat": "extras.own", "next_seat": "extras.own"}),
    Case(
        pp.agents.zero_sum,
        (pp.vtrace(gamma=0.9),),
        {},
        {"seat": "extras.own", "next_seat": "extras.own"},
        True,
        "vtrace",
    ),
    Case(pp.combine_advantages, ({"advantage": 0.5, "extras.own": 2.0},)),
    Case(pp.time_chunks, (2,), options={"length": 3, "burn_in": 1}),
    Case(pp.sampler, ("sampler", _halves, _whole_item), options={"num_minibatches": 2, "axis": "step"}),
    Case(pp.given_indices, (_ROWS,)),
    Case(pp.given_indices, ([[0, 2], [1, 0]], "segment", [[1.0, 0.5], [2.0, 1.0]]), note="weighted segments"),
)
ELSEWHERE = {"phase", "phases", "replay"}  # only a learner runs them, or the state has shapes: see test_contract.py
ELSEWHERE |= {"rnd_loss"}  # it reads what rnd_reward writes: see test_catalogue_values.py


@functools.cache
def subject(case_id: str) -> Subject:
    """The part of a case with what it is given; its compiled update is shared by the laws."""
    [case] = [case for case in CASES if case.id == case_id]
    given = functools.partial(given_batch, case.after, case.continuous, without=case.without)
    return Subject(case.part(), given, example_context, case.after)


@functools.cache
def given_batch(
    after: bool, continuous: bool, seed: int = 0, dtype: Any = jnp.float32, without: tuple[str, ...] = ()
) -> pp.Batch:
    """A batch with everything that any part reads, except the fields `without`."""
    batch = example_batch(seed, dtype, after_sampler=after, continuous=continuous)
    return batch.replace(current=None, **dict.fromkeys(without))
