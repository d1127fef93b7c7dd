"""Signatures of public functions: words and switches are checked where a function is called, and what defaults are.

A default is a number or a flag that nobody has to give, and each of them means something.
"""

import inspect
import types
import typing
from collections.abc import Mapping

import pytest

import ppo_parts as pp
from ppo_parts import distributions, envs, networks, training
from ppo_parts.errors import UserError

FAMILIES = (pp, pp.tokens, pp.exploration, pp.critics, pp.regularizers, pp.symmetry, pp.agents, pp.optim)
FAMILIES += (distributions, envs, networks)
LEFT_OUT = {"main", "run"}  # read the command line, or a folder

DEFAULTS = """
advantage_normalize ddof=0 eps=1e-08
agents.zero_sum seat='extras.seat' next_seat='extras.next_seat'
clipped_adam eps=1e-05
clipped_surrogate name='policy'
clipped_value_loss coef=1.0 name='value'
critics.critic_loss prediction='value' coef=1.0 name='value'
critics.normalize_target min_scale=0.0001
distributions.Beta low=-1.0 high=1.0
distributions.StateDependentNormal eps=1e-06
distributions.StateDependentTanhNormal low=-1.0 high=1.0 eps=1e-06
distributions.TanhNormal low=-1.0 high=1.0 eps=1e-06
early_stop check='minibatch'
entropy_bonus num_samples=1 name='entropy'
envs.auto_reset reset_ratio=1 zero_sum=False
envs.check num_envs=2
envs.check_laws num_envs=4 num_steps=1000 seed=0
envs.fold_agents agent_id=False
envs.from_brax reset_ratio=1 obs_key='state' action_repeat=1
envs.normalize_observation clip=10.0 eps=1e-08 per_agent=False
envs.normalize_reward clip=10.0 eps=1e-08 per_agent=False
envs.prepare normalize=False rescale=False per_agent=False
exploration.rnd_loss coef=1.0 predictor='predictor' name='rnd'
exploration.rnd_reward gamma=0.99 predictor='predictor' name='rnd'
exploration.self_imitation coef=1.0 value_coef=0.01 name='self_imitation'
full_batch num_epochs=1 refresh='rollout'
functional.advantage_normalize ddof=0 eps=1e-08
functional.aggregate by='token_mean'
functional.approx_kl estimator='k3'
functional.bounds_loss bound=1.1
functional.clip_cov fraction=0.0002 cov_low=1.0 cov_high=5.0
functional.discovered_policy_optimization alpha=2.0 beta=0.6
functional.gae mask_mode='cut' stop_gradient=True implementation='auto'
functional.gmpo clip_eps=0.4
functional.group_advantage baseline='mean' scale='group' ddof=1 eps=1e-06
functional.gspo level='sequence'
functional.huber_value_loss delta=1.0
functional.importance_sampling_weight low=0.0 mode='truncate'
functional.importance_weights normalize=False
functional.kl_cov fraction=0.0002 coef=1.0
functional.masked_mean keepdims=False
functional.outcome_reward kl_coef=0.0
functional.quantile_value_loss kappa=1.0
functional.reverse_recurrence implementation='auto'
functional.reward_to_go gamma=1.0
functional.sapo tau=1.0 tau_negative=1.05
functional.segment_priorities eps=1e-06
functional.sequence_log_ratio level='sequence' reduction='mean'
functional.vtrace gae_lambda=1.0 rho_clip=1.0 c_clip=1.0 stop_gradient=True implementation='auto'
gae mask_mode='cut' implementation='auto'
given_indices axis='step' refresh='rollout'
kl_early_stop estimator='k3' reduction='mean' check='minibatch' name='early_stop_kl'
kl_penalty estimator='k3' direction='reference_to_current' reference='behavior' name='kl_penalty'
networks.action_distribution squash=False
networks.actor_critic activation='tanh' shared=False squash=False log_std=0.0 gsde=False
networks.dense gain=1.4142135623730951
networks.mlp activation='tanh'
networks.multi_agent_actor_critic activation='tanh' independent=False gain=0.01
networks.nature_cnn features=512
networks.orthogonal scale=1.0 column_axis=-1
networks.recurrent cell='lstm'
optim.scale_by_kl_adaptive_rate metric='approx_kl' low=1e-05 high=0.01
phase trains='own' every=1
policy_loss name='policy' needs_time=False
prioritized_sampler num_epochs=1 replacement=False weights='probability' normalize_weights=False eps=1e-06 refresh='rollout'
regularizers.adaptive_entropy_bonus coef=0.01 num_samples=1 name='entropy'
regularizers.bounds_loss bound=1.1 name='bounds'
regularizers.perturbed_mean scale=0.5
regularizers.smoothness_loss temporal=1.0 spatial=1.0 noise_scale=0.05 name='smoothness'
rollout value_each_step=False keep_next_obs=False keep_distribution=False noise_steps=1 shards=1
sampler num_epochs=1 refresh='rollout' weighted=False
segment_minibatches num_epochs=1 refresh='rollout'
shuffled_minibatches num_epochs=1 refresh='rollout'
stateless place='anywhere' needs_time=False elementwise=False
symmetry.mirror_loss coef=1.0 name='mirror'
time_chunks num_epochs=1 burn_in=0 refresh='rollout'
tokens.aggregate loss='policy' by='sequence_mean'
tokens.group_advantage group='group' baseline='mean' scale='group' ddof=1 eps=1e-06
tokens.importance_correction low=0.0 mode='truncate' level='token' reference='sampler_log_prob' name='correction'
tokens.outcome_reward score='score' kl_coef=0.0 reference='reference_log_prob'
tokens.reward_to_go gamma=1.0
value_loss coef=1.0 name='value'
vtrace gae_lambda=1.0 rho_clip=1.0 c_clip=1.0 policy_gradient=False implementation='auto'
"""  # noqa: E501


def public(room):
    """Its functions, and the distributions, by name."""
    found = {name: getattr(room, name) for name in getattr(room, "__all__", dir(room)) if name[0] != "_"}
    ours = {name: x for name, x in found.items() if getattr(x, "__module__", "").startswith("ppo_parts.")}
    return {name: x for name, x in ours.items() if inspect.isfunction(x) or (room is distributions and callable(x))}


def is_word(hint):
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    plain = (str, bool, type(None), tuple[str, ...])
    return all(kind in plain or typing.get_origin(kind) in (typing.Literal, Mapping) for kind in kinds)


WORDS = [
    (function, parameter)
    for function in dict.fromkeys(x for room in (*FAMILIES, training) for x in public(room).values())
    if inspect.isfunction(function) and function.__name__ not in LEFT_OUT
    for parameter in inspect.signature(function).parameters.values()
    if is_word(typing.get_type_hints(function).get(parameter.name))
]


@pytest.mark.parametrize(("function", "parameter"), WORDS, ids=lambda x: getattr(x, "name", None) or x.__name__)
def test_words_and_switches_are_checked_at_the_door(function, parameter):
    several = parameter.kind is parameter.VAR_POSITIONAL
    with pytest.raises(UserError, match=rf"\b{parameter.name} must be"):
        function(object()) if several else function(**{parameter.name: object()})


def test_defaults_are_those_that_are_documented_here():
    found = set()
    for room in (*FAMILIES, pp.functional):
        for name, function in public(room).items():
            parameters = inspect.signature(function).parameters.values()
            given = [f"{x.name}={x.default!r}" for x in parameters if isinstance(x.default, int | float | str)]
            if given:
                found.add(" ".join([f"{room.__name__}.{name}".removeprefix("ppo_parts."), *given]))
    assert sorted(found) == DEFAULTS.split("\n")[1:-1]
