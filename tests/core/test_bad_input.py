"""Tables of everything that must fail when it is built or first traced: what the error says, and a call.

Instead of a call, there may be the parts of an update, with its batch and options. " ... " in what an error says stands
for anything. Each error is one of `ppo_parts.errors`, except for calls that Python itself refuses.
"""

import functools
import re
from types import SimpleNamespace

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts import compare, distributions, envs, testing
from ppo_parts import functional as f
from tests.common import SEGMENTS, TIME, evaluate, make_params, rollout
from tests.core.common import part, without_critic

SHUFFLED, SEGMENT, FULL = pp.shuffled_minibatches(2), pp.segment_minibatches(2), pp.full_batch()
GAE, VTRACE, NORMALIZE = pp.gae(gamma=0.9, gae_lambda=0.8), pp.vtrace(gamma=0.9), pp.advantage_normalize()
SURROGATE, VALUE, BONUS = pp.clipped_surrogate(clip_eps=0.2), pp.value_loss(), pp.entropy_bonus(coef=0.1)
CLIPPED = pp.clipped_value_loss(clip_eps=0.2)
PRIORITIZED = functools.partial(pp.prioritized_sampler, alpha=1.0, beta=0.0)
mine, LENS = functools.partial(pp.stateless, name="mine"), functools.partial(pp.within, name="lens")
BOTH = jnp.ones((TIME, SEGMENTS, 2))
STREAMS = pp.stateless(lambda b: b.replace(advantage=BOTH), provides=("advantage",))
TARGETS = pp.stateless(lambda b: b.replace(target=jnp.ones((TIME, SEGMENTS, 3))), provides=("target",))
WEIGHTED = pp.combine_advantages({"advantage": pp.field("extras.w")})
ACTOR, CRITIC = pp.chain(FULL, SURROGATE), pp.chain(FULL, VALUE)
PHASES = pp.chain(GAE, pp.phases(actor=ACTOR, critic=CRITIC))
BATCH, SGD, CONTEXT = rollout(), optax.sgd(0.1), pp.Context(key=jax.random.key(0))
WITH_BONUS = BATCH.replace(per_segment={"bonus": jnp.ones(SEGMENTS)})
REPLAY = pp.replay(2, BATCH.replace(obs=BATCH.obs.astype(jnp.uint8)))
TWO, FIVE = {"actor": SGD, "critic": SGD}, jnp.ones(5)
RECURRENT = {"evaluate": pp.Policy(lambda key: {}, lambda params, batch: batch.reset[0], jnp.zeros)}
COUNTS = pp.Part(lambda *_: 0.0, lambda b, s, c: (b, s), "counts", finish=lambda b, s, c: s + b.advantage * 2)
AUGMENT = pp.stateless(lambda b: b.replace(obs=-b.obs), requires=("obs",), provides=("obs",), reads=())
DRAWS = pp.Part(lambda params, key: jax.random.normal(key), lambda b, s, c: (b, s), "draws", reads=())
FAILS = pp.Part(lambda params, key: evaluate(params, foo=1), lambda b, s, c: (b, s), "fails", reads=())
given, learner = BATCH.replace, functools.partial(pp.learner, evaluate, optimizer=SGD)
init = learner(CRITIC).init


def replayed(like, batch):
    part = pp.replay(1, like)
    return part.update(batch, part.init(None), CONTEXT)


def update(*row):
    """Trace one update of parts, which a batch and options may follow; nothing is compiled."""
    parts = [x for x in row if isinstance(x, pp.Part)]
    options = {"batch": BATCH, "evaluate": evaluate, "optimizer": SGD, "params": make_params(), "key": CONTEXT.key}
    for x in row[len(parts) :]:
        options |= x if isinstance(x, dict) else {"batch": x}
    batch, params, key = map(options.pop, ("batch", "params", "key"))
    learner = pp.learner(pipeline=pp.chain(*(parts or (GAE, CRITIC))), **options)
    return jax.eval_shape(functools.partial(learner.update, key), learner.init(params), batch)


def returning(result):
    """Make an update whose `evaluate` returns `result(distribution, value)`."""
    return ({"evaluate": lambda params, batch: result(*evaluate(params, batch))},)


def two_values(params, batch):
    return evaluate(params, batch)[0], BOTH


def metric(name):
    return pp.stateless(lambda batch: batch.add_metrics(**{name: jnp.zeros(())}))


def own_sampler(axis, draw, name="mine", num_minibatches=2):
    plan = lambda key, batch, epoch: jnp.arange(12).reshape(2, 6)  # noqa: E731
    return pp.sampler(name, plan, lambda item, batch, context: draw(item), num_minibatches=num_minibatches, axis=axis)


def draws(draw, axis="step"):
    """Make an update with a sampler whose `draw` returns `draw(item)`; an item is six indices."""
    return GAE, own_sampler(axis, draw), SURROGATE


POPART = pp.critics.normalize_target(lambda params, old, new: params, rate=0.1)
UNDECLARED_STOP = pp.stateless(lambda batch: batch.add_stop(discard=batch.reward[0, 0] > 0), name="undeclared")
SHORT = pp.within(GAE, name="short", write={"advantage": "extras.short"})


def rollout_of(env, **options):
    return pp.rollout(env, evaluate, **({"num_envs": 1, "num_steps": 1} | options))


def collect(space, distribution):
    """Trace a rollout of a policy that ignores its observations, with two environments and three steps."""
    env = envs.make("CartPole-v1")._replace(action_space=space)
    rollout = pp.rollout(env, lambda params, batch: (distribution, batch.obs[..., 0]), num_envs=2, num_steps=3)
    return jax.eval_shape(lambda: rollout.collect(CONTEXT.key, None, rollout.init(CONTEXT.key)))


def policy_with(**methods):
    """Make a policy whose distribution has log_prob and these methods, each of which takes the whole distribution."""

    def policy(params, batch):
        whole, value = evaluate(params, batch)
        own = {name: functools.partial(method, whole) for name, method in methods.items()}
        return SimpleNamespace(**{"log_prob": whole.log_prob} | own), value

    return policy


def doubled(*fields):
    """Make a part that leaves twice as many segments of these fields."""
    twice = lambda x: jnp.concatenate([x, x], axis=1)  # noqa: E731
    return pp.stateless(lambda b: b.replace(**{x: twice(getattr(b, x)) for x in fields}), name="doubled")


PLANNED = pp.sampler(
    "planned", lambda key, batch, epoch: jnp.argsort(batch.advantage[0])[None], lambda item, *_: (item, None),
    num_minibatches=1, axis="segment", requires=("advantage",),
)  # fmt: skip
OF_THE_ROLLOUT = pp.stateless(
    lambda batch: batch.add_loss("l2", jnp.square(batch.value)), provides=("losses",), reads=(), elementwise=True
)
VALUE_ERRORS = {
    "Context: there is no policy to evaluate: give one": lambda: FULL.update(BATCH, (), CONTEXT),
    "mine: plan must return arrays with leading axis [num_minibatches] = [3], but their leading axes are [(2,)]":
        lambda: own_sampler("step", lambda item: (item, None), num_minibatches=3).update(BATCH, (), CONTEXT),
    "shuffled_minibatches: minibatch must be in [0, 2), got 2":
        lambda: SHUFFLED.update(BATCH, (), CONTEXT.replace(minibatch=2)),
    # the order of a chain
    "shuffled_minibatches and segment_minibatches ... phases": lambda: pp.chain(GAE, SHUFFLED, SEGMENT),
    "gae ... given_indices ... move gae before it": lambda: pp.chain(pp.given_indices([[0]]), GAE),
    "advantage_normalize ... put gae before advantage_normalize": lambda: pp.chain(NORMALIZE, GAE),
    "before it cuts the time axis: use segment_minibatches()":
        lambda: pp.chain(pp.shuffled_minibatches(2), pp.policy_loss(f.gspo, clip_eps=0.2)),
    "shuffled_minibatches before it cuts the time axis":
        lambda: pp.chain(GAE, SHUFFLED, pp.policy_loss(functools.partial(f.gspo, clip_eps=0.1))),
    "phases needs advantage, which is produced later, by gae": lambda: pp.chain(pp.phases(actor=ACTOR), GAE),
    "loss 'early' was added before the sampler": (pp.stateless(lambda b: b.add_loss("early", b.reward)), GAE, ACTOR),
    "requested a stop, which only parts after it may do": (UNDECLARED_STOP, GAE, ACTOR),
    "surrogate, undeclared) requested a stop but does not declare it": (GAE, FULL, SURROGATE, UNDECLARED_STOP),
    "replay must be the first part of its chain, but scale is: put scale before":
        lambda: learner(pp.chain(pp.stateless(lambda b: b, name="scale"), pp.replay(3, BATCH), CRITIC)),
    # what parts read and write
    "gae writes advantage and target, and no part after it reads them, because there is no loss: put one, such as cli":
        (GAE, FULL, SURROGATE, GAE),
    "short writes extras.short, and no part after it ... if only the policy reads it": (GAE, SHORT, ACTOR),
    "advantage_normalize writes advantage, and no part after it reads it, because a later part overwrites it":
        (GAE, NORMALIZE, SEGMENT, GAE, SURROGATE),
    "no loss after the sampler depends on the parameters": (FULL, OF_THE_ROLLOUT),
    "so nothing is learned: evaluate must use params, and a loss what evaluate computes":
        (FULL, OF_THE_ROLLOUT, {"evaluate": pp.microbatched(evaluate, 6)}),
    "mine: declares elementwise, but its loss 'own' has shape (2,), not one number per element: leave elementwise out":
        (GAE, SEGMENT, mine(lambda b: b.add_loss("own", b.current.value[0], per="segment"), elementwise=True)),
    "mine: update changed advantage without declaring it: add provides=('advantage',)":
        (GAE, FULL, mine(lambda b: b.replace(advantage=-b.advantage)), SURROGATE),
    "no part added a loss ... clipped_surrogate": (GAE, FULL, pp.policy_diagnostics(), metric("own")),
    "no part of phase 'all' added a loss":
        (GAE, pp.phases(all=pp.phase(pp.chain(FULL, metric("own")), trains=None)), {"optimizer": {"all": SGD}}),
    "mine needs batch.current.aux.p ... return pp.Output(distribution, value, aux=...) from evaluate":
        (FULL, mine(lambda b: b.add_loss("own", b.current.value), requires=("current.aux.p",))),
    "advantage_normalize needs batch.advantage ... put gae() or vtrace() before it": (FULL, NORMALIZE, SURROGATE),
    "advantage_weight needs batch.weight ... prioritized_sampler()": (GAE, FULL, pp.advantage_weight(), SURROGATE),
    "planned needs batch.advantage ... put gae() or vtrace() before it": (PLANNED, SURROGATE),
    "kl_penalty needs batch.behavior ... keep_distribution=True":
        (GAE, CRITIC, pp.kl_penalty(coef=1.0, estimator="analytic")),
    "early_stop needs batch.metrics.nothing": (GAE, FULL, SURROGATE, pp.early_stop("nothing", 1.0)),
    # a lens, which must not mix two critics
    "gae does not read 'advantage'; it reads reward, value": lambda: LENS(GAE, read={"advantage": "extras.mine"}),
    "chain does not read 'value'; it reads ... current.value":
        lambda: LENS(pp.chain(VALUE), read={"value": "current.aux.v"}),
    "gae does not write 'weight'": lambda: LENS(GAE, read={}, write={"weight": "extras.x"}),
    "the value of one critic with next_value of another: give the path": lambda: LENS(GAE, read={"value": "extras.v"}),
    "gae would ... with next_value of another": lambda: LENS(pp.chain(GAE), read={"value": "extras.v"}),
    "the value of one critic with value of another": lambda: LENS(CLIPPED, read={"current.value": "current.aux.v"}),
    "with current.value of another": lambda: LENS(CLIPPED, read=dict.fromkeys(("value", "target"), "extras.x")),
    "'value' ... name=\"...\"": (GAE, CRITIC, CLIPPED),
    "'early_stop_kl' ... rename one": (GAE, CRITIC, pp.kl_early_stop(1.0), pp.kl_early_stop(2.0)),
    "'a' ... the parts before the sampler, those after it": (GAE, metric("a"), CRITIC, metric("a")),
    "'loss' is written twice ... gradient_metrics ... another name":
        ({"gradient_metrics": lambda gradient: {"loss": 99.0}},),
    # parts outside a learner
    "mine: update removed value from the losses of earlier parts: add its own with batch.add_loss(":
        (GAE, CRITIC, mine(lambda batch: batch.replace(losses={"own": batch.reward}))),
    "mine: update removed explained_variance from the metrics": (GAE, mine(lambda b: b.replace(metrics={})), CRITIC),
    "2 parts but 0 states ... this chain's init": lambda: pp.chain(GAE, NORMALIZE).update(BATCH, (), CONTEXT),
    "clipped_surrogate ... after a sampler ... learner()":
        lambda: pp.chain(SURROGATE).update(given(advantage=BATCH.value), ((),), CONTEXT),
    "vtrace ... ('step',)": lambda: pp.chain(VTRACE).update(given(axes=("step",)), ((),), CONTEXT),
    "planned takes single steps, but the batch has a recurrent carry: use segment_minibatches()":
        (GAE, own_sampler("step", lambda item: (item, None), "planned"), VALUE, given(carry=jnp.zeros(SEGMENTS))),
    "phases ... learner()": lambda: pp.phases(actor=ACTOR).update(BATCH, {}, CONTEXT),
    "step= ... learner()": lambda: pp.optim.scale_by_update_schedule(0.1).update({}, optax.EmptyState()),
    # phases
    "phases ... one sampler": lambda: learner(CRITIC, optimizer={"actor": SGD}),
    "phases(actor=chain(...)": lambda: pp.phases(),
    "actor ... shuffled_minibatches()": lambda: pp.phases(actor=pp.chain(SURROGATE)),
    "got (); None means all": lambda: pp.phase(ACTOR, trains=()),
    "phase 'all': trains(params) must return a boolean for each leaf of the parameters":
        (GAE, pp.phases(all=pp.phase(CRITIC, trains=lambda params: {"value": True})), {"optimizer": {"all": SGD}}),
    "phases ... do not nest": lambda: pp.phases(all=pp.phases(actor=ACTOR)),
    "['actor', 'critic'] ... GradientTransformation": lambda: learner(PHASES),
    "got a dict with ['actor', 'critic', 'x']": lambda: learner(PHASES, optimizer=TWO | {"x": SGD}),
    "mine ... into one of the phases": (PHASES, mine(lambda batch: batch), {"optimizer": TWO}),
    "params['actor'] ... ['policy', 'value']": (PHASES, {"optimizer": TWO}),
    # samplers and replays
    "5 of 4 segments ... replacement": (GAE, PRIORITIZED(1, segments_per_minibatch=5), VALUE),
    "shuffled_minibatches ... carry ... segment_minibatches()":
        (GAE, SHUFFLED, VALUE, given(carry=jnp.zeros(SEGMENTS))),
    "[0, 24) ... 0 to 24": (GAE, pp.given_indices([[0, 24]]), VALUE),
    "[0, 4) for segments ... 0 to 4": (GAE, pp.given_indices([[0, 4]], axis="segment"), VALUE),
    "[K, M] ... (2, 0)": lambda: pp.given_indices(np.zeros((2, 0), int)),
    "one size, got [[0, 1], [2]]": lambda: pp.given_indices([[0, 1], [2]]),
    "weights must lie in [0, inf]": lambda: pp.given_indices([[0]], weights=[[np.nan]]),
    "(2,) ... (1, 2)": lambda: pp.given_indices([[0, 1]], weights=[1.0, 2.0]),
    "given_indices ... one shard, but this one has 2: use shards=1":
        (GAE, pp.given_indices([[0, 1]], "segment"), VALUE, given(shards=2)),
    "short: plan must return arrays with leading axis [num_minibatches] = [3]":
        (GAE, own_sampler("step", lambda item: (item, None), name="short", num_minibatches=3), SURROGATE),
    "mine: draw must return at least one index, got shape (0,)": draws(lambda item: (item[:0], None)),
    "length=4 must divide the 6 steps": (GAE, pp.time_chunks(2, length=4), VALUE),
    "num_minibatches must divide the 24 steps ... got 7 ... 6, 8": (GAE, pp.shuffled_minibatches(7), VALUE),
    "num_minibatches must divide the 4 segments ... got 3 ... 2, 4": (GAE, pp.segment_minibatches(3), VALUE),
    "prioritized_sampler: num_minibatches must divide the 4": (GAE, PRIORITIZED(3), VALUE),
    "shuffled_minibatches: num_minibatches must be at least 1 ... 0": lambda: pp.shuffled_minibatches(0),
    'refresh="minibatch" writes values back into the rollout of shape (6, 4)':
        (doubled(*(name for name, x in vars(BATCH).items() if isinstance(x, jax.Array)), "log_ratio"), GAE,
         pp.shuffled_minibatches(2, refresh="minibatch"), VALUE),
    "learner, after gae, doubled: ... log_prob (6, 8), value (6, 4)":  # but not the target
        (GAE, doubled("obs", "action", "log_prob", "advantage"), SHUFFLED, SURROGATE, VALUE),
    "the rollout has mask, but like does not": lambda: replayed(given(mask=None), BATCH),
    "like has per_segment['bonus'], but the rollout does not": lambda: replayed(WITH_BONUS, BATCH),
    "about 12 elements: ... divides 23 is 23":
        (GAE, pp.given_indices([[*range(23)]]), VALUE, {"evaluate": pp.microbatched(evaluate, 12)}),
    # shards
    "shards=4 ... num_envs = 6": lambda: rollout_of(envs.make("CartPole-v1"), num_envs=6, shards=4),
    "shards=0 ... num_envs = 6": lambda: rollout_of(envs.make("CartPole-v1"), num_envs=6, shards=0),
    "shards=3 must ... the number of segments = 4": (given(shards=3),),
    "num_minibatches must divide the 2 segments N ... got 4; ... (a plan is made for each of 2 shards)":
        lambda: pp.segment_minibatches(4).plan(CONTEXT.key, given(shards=2), 0),
    "shards=3 cannot be divided over a mesh of 2 devices ... make shards 2 or a multiple of it":
        lambda: given(shards=3).sharding(SimpleNamespace(size=2, axis_names=("d",))),
    # policies, rollouts and batches
    "value_loss: the policy returns no value": ({"evaluate": without_critic},),
    "gae: the policy has no value": (FULL, GAE, SURROGATE, {"evaluate": without_critic}),
    "gae: batch.value is missing ... give the policy a critic ... group_advantage()":
        (GAE, FULL, SURROGATE, given(value=None, next_value=None)),
    "rollout: the policy has logits for 3 actions, but the environment has 2":
        lambda: collect(envs.Discrete(2), distributions.Categorical(jnp.zeros((2, 3)))),
    "rollout: the policy has logits for 1 actions, but the environment has 2":
        lambda: collect(envs.Discrete(2), distributions.Categorical(jnp.zeros((2, 1)))),
    "record='next_cost' is already in the batch (next_cost, next_next_cost, policy_key, value)":
        lambda: rollout_of(None, record=("cost", "next_cost")),
    "keep_info='cost' is already in the batch (cost, next_cost, policy_key, value): rename it":
        lambda: rollout_of(None, record=("cost",), keep_info=("cost",)),
    "the parameter tree is empty": lambda: init({}),
    **{f"batch.{field} is missing": (given(**{field: None}),) for field in ("obs", "action", "log_prob")},
    "learner.update: batch.carry is missing: pass the policy's state before step 0 ... pp.rollout records":
        (GAE, SHUFFLED, VALUE, given(reset=BATCH.terminated), RECURRENT),
    "learner.update: batch.reset is missing: pass True at the first step":
        (GAE, SEGMENT, VALUE, given(carry=jnp.zeros(SEGMENTS)), RECURRENT),
    **{
        f"{part.name}: batch.{field} is missing": (part, CRITIC, given(**{field: None}))
        for part in (GAE, VTRACE) for field in ("reward", "terminated", "next_value", "value")
    },
    # numbers, schedules and axes
    "gamma must be one number ... (3,) ... vmap":
        lambda: jax.eval_shape(lambda gamma: pp.gae(gamma=gamma, gae_lambda=0.9).init(None), jnp.ones(3)),
    "axis=1 ... ('step',) ... (12,)": (GAE, SHUFFLED, pp.advantage_normalize(axis=1), SURROGATE),
    "-3 ... (6, 4)": (GAE, pp.advantage_normalize(axis=(0, -3)), ACTOR),
    "advantage_normalize: axis=None ... shape (1,) ... always 0 ... fewer minibatches":
        (GAE, pp.shuffled_minibatches(TIME * SEGMENTS), NORMALIZE, SURROGATE),
    "advantage_normalize: axis=-1 ... shape (6, 1)":
        (GAE, pp.segment_minibatches(SEGMENTS), pp.advantage_normalize(axis=-1), SURROGATE),
    "advantage_normalize: ddof must be an integer in [0, 1] ... 2": lambda: pp.advantage_normalize(ddof=2),
    "must lie in (0, inf], but its schedule is nan": lambda: pp.clipped_surrogate(clip_eps=lambda step: jnp.nan),
    "a rollout has axes=('time', 'segment'), got ('step',)": (given(axes=("step",)),),
    "weight belongs to minibatches: draw with given_indices(weights=...) instead": (given(weight=BATCH.reward),),
    "its schedule is 0 at step 0": lambda: pp.clipped_surrogate(clip_eps=lambda step: 0.0 * step),
    "its schedule is -0.1 at the end": lambda: pp.clipped_surrogate(clip_eps=pp.linear_schedule(0.2, -0.1, 100)),
    "but its schedule returns shape (3,)": lambda: pp.clipped_surrogate(clip_eps=lambda step: jnp.ones(3)),
    "scale_by_update_schedule: learning_rate must lie in [0, inf], got -0.1":
        lambda: pp.optim.scale_by_update_schedule(-0.1),
    "natural_gradient: the losses must be 'kl_penalty' ... and another; got ['policy']":
        (GAE, FULL, SURROGATE, {"optimizer": pp.optim.natural_gradient(0.01)}),
    "field: factor must lie in [-inf, inf], got nan": lambda: np.nan * pp.field("extras.w"),
    "field: factor must be one number, got an array of shape (3,)": lambda: jnp.ones(3) * pp.field("weight"),
    "final_value ... together": lambda: f.next_values(FIVE, jnp.ones(()), FIVE),
    # parts of families
    'group_advantage: scale must be None or ... baseline ... got "group"':
        lambda: pp.tokens.group_advantage(baseline="none"),
    "group_advantage: scale must be None or ... because a group of equal":
        lambda: pp.functional.group_advantage(jnp.ones(2), jnp.zeros(2, int), baseline=jnp.zeros(2)),
    "group_advantage: group must name groups of several segments ... got np.int64(1)":
        lambda: pp.tokens.group_advantage(group=np.int64(1)),
    "group_advantage: group must name groups of several segments ... got 'group'":
        (pp.tokens.group_advantage(group="group"), FULL, SURROGATE,
         jax.tree.map(lambda x: x[:, :1], BATCH).replace(per_segment={"group": jnp.zeros(1, int)})),
    "group_advantage: batch.reward is missing: give it, or score":
        (pp.tokens.group_advantage(group=2), FULL, SURROGATE, given(reward=None)),
    "aggregate: ... leave it out": lambda: pp.tokens.aggregate(by="sequence_mean", length=3),
    "cov_low must be less than cov_high": lambda: pp.policy_loss(f.clip_cov, clip_eps=0.2, cov_low=2.0, cov_high=1.0),
    "delta must lie in (0, inf], but its schedule is -1 at the end": lambda: pp.critics.critic_loss(
        f.huber_value_loss, delta=lambda step: 1 - 2 * jnp.minimum(step, 1)
    ),
    "within: gae writes only advantage, target, which would be discarded": lambda: LENS(GAE),
    "within: the learner averages the losses of value_loss over batch.mask":
        lambda: LENS(VALUE, read={"mask": "extras.kept"}),
    "normalize_target changes the parameters again in phase 'actor', so that phase 'critic' ... swap them":
        (GAE, POPART, pp.phases(actor=pp.chain(pp.full_batch(refresh="epoch"), SURROGATE),
                                critic=pp.chain(FULL, LENS(VALUE, read={"target": "extras.target_normalized"}))),
         {"optimizer": TWO}),
    "aggregate: the batch must have the axes [T, N] only, got shape (6, 4, 2)":
        lambda: pp.tokens.aggregate().update(given(log_prob=BOTH, losses={"policy": BOTH}), (), CONTEXT),
    "group must divide the 2 segments of a shard, got 4": (pp.tokens.group_advantage(group=4), ACTOR, given(shards=2)),
    "put it before the sampler, because the policy has already been evaluated": (GAE, FULL, AUGMENT, SURROGATE),
    "replay: the rollout has truncated, but like does not": lambda: replayed(given(truncated=None), BATCH),
    "zero_sum: ... must write the advantage, but value_loss writes losses": lambda: pp.agents.zero_sum(VALUE),
    "zero_sum ... extras.seat": (pp.agents.zero_sum(GAE), ACTOR),
    "give temporal, spatial or both": lambda: pp.regularizers.smoothness_loss(temporal=None, spatial=None),
    "critic_loss: the loss must have the shape of prediction, got ()":
        lambda: pp.critics.critic_loss(lambda prediction, target, mask=None: jnp.mean(prediction)),
}  # fmt: skip

TYPE_ERRORS = {
    "group_advantage: per_segment['own'] must be floating":
        (pp.tokens.group_advantage(group=2, score="own"), FULL, SURROGATE, given(per_segment={"own": jnp.arange(4)})),
    "what gradient_metrics returns must be a dictionary": ({"gradient_metrics": lambda gradient: jnp.ones(())},),
    # arguments
    "2 were given: name them, as in gamma=..., gae_lambda=...": lambda: pp.gae(0.99, 0.95),
    "unexpected keyword argument 'gae_lamda' ... id you mean 'gae_lambda'?": lambda: pp.gae(gamma=0.9, gae_lamda=0.9),
    "unexpected keyword argument 'lam'; did you mean 'gae_lambda'?": lambda: pp.gae(gamma=0.9, lam=0.9),
    "gae: gamma must be a number or an array, got a function: call it, as in gamma(step)":
        lambda: f.gae(FIVE, FIVE, FIVE, FIVE, gamma=pp.linear_schedule(1.0, 0.0, 9), gae_lambda=0.9),
    "a Batch takes fields by name, as in Batch(obs=obs), got an array of shape (5,)": lambda: pp.Batch(FIVE),
    "unexpected keyword argument 'gama' ... id you mean 'gamma'?": lambda: f.gae(FIVE, FIVE, FIVE, FIVE, gama=0.9),
    "takes from 4 to 5 positional arguments": lambda: f.gae(FIVE, FIVE, FIVE, FIVE, FIVE, 0.9, 0.9),
    "phases() takes 0 positional arguments but 2 were given": lambda: pp.phases(ACTOR, CRITIC),
    "a Batch has no field 'advantge'; did you mean 'advantage'?": lambda: given(advantge=0),
    "gae() got an unexpected keyword argument 'done': pass terminated": lambda: f.gae(FIVE, FIVE, done=FIVE),
    "a Batch has no field 'x'; its fields are obs": lambda: pp.Batch(x=0),
    "a Batch has no field 'done': pass terminated, and truncated for time limits": lambda: pp.Batch(done=0),
    "clipped_surrogate(log_ratio, advantage, mask=..., clip_epsilon=...): missing a required ... 'clip_eps'":
        lambda: pp.policy_loss(f.clipped_surrogate, clip_epsilon=0.2),
    "the loss is called as <lambda>(log_ratio, advantage, mask=...): ... 'mask'; add the parameter mask, 1 where an":
        lambda: pp.policy_loss(lambda log_ratio, advantage: log_ratio * advantage),
    "policy_loss: <built-in function max> does not tell its parameters: wrap it": lambda: pp.policy_loss(max),
    "critic_loss: <built-in function max> does not tell its parameters: wrap it": lambda: pp.critics.critic_loss(max),
    "got the part 'chain': the order is learner(evaluate, pipeline, optimizer)":
        lambda: pp.learner(CRITIC, evaluate, SGD),
    "learner: evaluate must take (params, batch); this one takes (p)": lambda: pp.learner(lambda p: p, CRITIC, SGD),
    "Box ... got -1; the order is Box(shape, low": lambda: envs.Box(-1, 1, (1,)),
    # functions and parts, or none where there should be one
    "got function: did you forget to call it, gae(...)?": lambda: pp.chain(pp.gae, FULL),
    "policy_loss: value_loss takes value and target, not log_ratio and advantage: ... critics.critic_loss":
        lambda: pp.policy_loss(f.value_loss),
    "critic_loss: cispo takes log_ratio and advantage, not prediction and target":
        lambda: pp.critics.critic_loss(f.cispo, clip_eps=0.2),
    "policy_loss: ... takes value and target, not log_ratio and advantage":
        lambda: pp.policy_loss(functools.partial(f.huber_value_loss, delta=1.0)),
    "entropy_bonus: coef must be a number ... got None": lambda: pp.entropy_bonus(coef=None),
    "init of the part 'draws' needs a key: learner.init(params, key)":
        lambda: learner(pp.chain(DRAWS, GAE, CRITIC)).init(make_params()),
    "policy(params, batch): batch must be a Batch, got an array of shape (5,): pass Batch(obs=obs)":
        lambda: pp.Policy(lambda key: {}, evaluate)({}, FIVE),
    "got function: functional.cispo takes arrays: use cispo(...) or": lambda: pp.chain(FULL, pp.functional.cispo),
    "got a list of them ... chain(*parts)": lambda: pp.chain([GAE, FULL]),
    "chain: an optimizer is not a part: pass it to learner(": lambda: pp.chain(GAE, SGD),
    "evaluate ... None": lambda: pp.learner(None, CRITIC, SGD),
    "optax ... call it, sgd(...)?": lambda: learner(CRITIC, optimizer=optax.sgd),
    "actor must be a chain ... 3": lambda: pp.phases(actor=3),
    "put it into phases(name=phase": lambda: pp.chain(GAE, pp.phase(ACTOR)),
    "stateless: requires must be a tuple of strings, got 'reward': write ('reward',)":
        lambda: pp.stateless(abs, requires="reward"),
    "Part: name must be a string, got 3": lambda: part(name=3),
    "expected a part that writes the advantage": lambda: pp.agents.zero_sum(SHUFFLED),
    "learner.update: reward must be an array, got a list": (given(reward=np.asarray(BATCH.reward).tolist()),),
    "such as gae, got 0.9": lambda: pp.agents.zero_sum(0.9),
    "a part that is not a sampler, got the sampler full_batch": lambda: pp.within(pp.chain(GAE, FULL), name="cost"),
    "Policy: evaluate must take (params, batch); this one takes (p)": lambda: pp.Policy(lambda key: {}, lambda p: p),
    "gradient_metrics must take (gradient)": lambda: learner(CRITIC, gradient_metrics=lambda step, gradient: {}),
    "Policy: init must be a function, got 1": lambda: pp.Policy(1, evaluate),
    "phase: trains must take (params)": lambda: pp.phase(pp.full_batch(), trains=lambda params, step: params),
    "old: init must take (params, key)": lambda: pp.Part(lambda params: (), lambda b, s, c: (b, s), "old"),
    "learner: evaluate must take (params, batch); this one takes (batch, params)":
        lambda: pp.learner(lambda batch, params: None, CRITIC, SGD),
    "learner.init(params, key): key must be one key, such as jax.random.key(0), got dict":
        lambda: init(CONTEXT.key, make_params()),
    "part_state: state must be a LearnerState, got Chain: the order is part_state(state, pipeline, name)":
        lambda: pp.part_state(pp.chain(GAE, CRITIC), init(make_params()), "gae"),
    "check_part: batch must be a function, got Batch": lambda: testing.check_part(GAE, batch=BATCH),
    "check_part: batch must take (seed, dtype)": lambda: testing.check_part(GAE, batch=lambda: BATCH),
    "short: update must take (batch, state, context); this one takes (batch)":
        lambda: pp.Part(lambda params, key: (), lambda batch: batch, "short"),
    "mine: plan must take (key, batch, epoch); this one takes (key)": lambda:
        pp.sampler("mine", lambda key: key, lambda item, batch, context: (item, None), num_minibatches=2, axis="step"),
    "gae: gamma must be a number or a schedule step -> value ... takes 0 positional arguments":
        lambda: pp.gae(gamma=lambda: 0.9, gae_lambda=0.9),
    "mine: the function must take (batch); this one takes (b, *, context)": lambda: mine(lambda b, *, context: b),
    "mine: the function must take (batch, context, scale=...); this one takes (batch, factor)":
        lambda: mine(lambda batch, factor: batch, numbers={"scale": 1.0}),
    # what functions return
    "mine ... must return (batch, state)": (pp.Part(lambda p, key: (), lambda b, s, c: (b.reward, ()), "mine"), FULL),
    "mine ... (batch, state), got Batch": (pp.Part(lambda p, key: (), lambda b, s, c: b, "mine"), FULL),
    "mine: the function must return the new batch, got NoneType": (mine(lambda batch: None), CRITIC),
    "drifting: update changed its state from int32[] to float32[]: keep its structure":
        (GAE, CRITIC, pp.Part(lambda params, key: jnp.int32(0), lambda b, s, c: (b, s + 0.5), "drifting")),
    "mine: amend must return (params, opt_state), got dict": (GAE, CRITIC, part(name="mine", amend=lambda p, *rest: p)),
    "mine: amend changed params from ... 'value': 'float32[3]' ... to ... 'value': 'float16[3]' ... keep its structure":
        (GAE, CRITIC, part(name="mine", amend=lambda p, s, *rest: (jax.tree.map(jnp.float16, p), s))),
    "learner: the optimizer must be an optax transformation, got the part 'gae'": ({"optimizer": GAE},),
    "learner: the optimizer's update(gradient, state, params, step=) raised TypeError":
        ({"optimizer": optax.GradientTransformationExtraArgs(lambda p: (), lambda g, s, p, *, step: len(step))},),
    "mine: draw must return (indices, weight), got 3 items": draws(lambda item: (item, None, None)),
    "mine: draw must return an array for axis='step', got list": draws(lambda item: ([0, 1], None)),
    "mine: draw must return an array for axis='step', got NoneType": draws(lambda item: (None, None)),
    "permutation: size must be an integer in [1, 2147483647], got 2.5": lambda: f.permutation(CONTEXT.key, 2.5),
    "read_curve: window must be ... got 2.5": lambda: compare.read_curve("a", ["a"], window=2.5),
    "mine: draw must return integers, got float32": draws(lambda item: (item * 1.0, None)),
    "mine: draw must return Windows for axis='window'": draws(lambda item: (item, None), "window"),
    "add_loss: mine must be floating, got int32": (GAE, FULL, pp.stateless(lambda b: b.add_loss("mine", b.action))),
    "mine must be an array, got 'a'": (GAE, pp.stateless(lambda b: b.add_metrics(mine="a")), CRITIC),
    "(distribution, value) ... 4 items": returning(lambda d, v: (d, v, 0, 0)),
    "got Categorical as the value: exchange it with an array of shape (6, 4)": returning(lambda d, v: (v, d)),
    "got Categorical as the value: exchange": returning(lambda d, v: pp.Output(v, d)),
    # what is trained, and on what
    "int32 at ['steps'] ... phase(..., trains=...)": ({"params": make_params() | {"steps": jnp.int32(3)}},),
    "draws=False), which is not an array: pass what its init returns": lambda: init(pp.Policy(abs, evaluate)),
    "learner.init: the parameters are <built-in function abs>, which is not an array":
        lambda: learner(pp.chain(GAE, ACTOR)).init(abs, CONTEXT.key),
    "the parameters to train contain key<fry> at the top, which has no gradient": lambda: init(CONTEXT.key),
    "state must be a LearnerState, as learner.init(params) returns it, got dict":
        lambda: learner(CRITIC).update(jax.random.key(0), make_params(), BATCH),
    "at ['act'], which is not an array": lambda: init({"w": jnp.ones(2), "act": jnp.tanh}),
    "learner.update: key must be one key, such as jax.random.key(0), got 0": ({"key": 0},),
    "learner.update: key must be one key ... got keys of shape (2,)": ({"key": jax.random.split(jax.random.key(0))},),
    "ppo_parts.Batch ... dict": ({"batch": {"obs": BATCH.obs}},),
    "value must be floating ... int32 ... astype": (given(value=BATCH.action),),
    "smoothness_loss ... not floating ... spatial=None":
        (FULL, pp.regularizers.smoothness_loss(temporal=None), given(obs=BATCH.obs.astype(int))),
    "replay: the rollout has float32 where like has uint8":
        (GAE, pp.phases(all=pp.phase(pp.chain(REPLAY, CRITIC), trains=None)), {"optimizer": {"all": SGD}}),
    "integers ... float64": lambda: pp.given_indices([[0.0, 1.0]]),
    # policies and rollouts
    "env must be an environment, got the part 'gae': pass it as pipeline=": lambda: rollout_of(GAE),
    "rollout: ... is not an environment: make one with envs.make": lambda: rollout_of(gymnax.make("CartPole-v1")[0]),
    "actions are float32[2, 1], but each of [2] environments takes one of 2 actions":
        lambda: collect(envs.Discrete(2), distributions.Normal(jnp.zeros((2, 1)), jnp.ones(1))),
    "actions are int32[2], but each of [2] environments takes numbers of shape (1,): ... mean [..., 1]":
        lambda: collect(envs.Box((1,)), distributions.Categorical(jnp.zeros((2, 2)))),
    "needs sample(seed=), but an array of shape (2, 2) has no sample: use one of ppo_parts.distributions":
        lambda: collect(envs.Discrete(2), jnp.zeros((2, 2))),
    "an array of shape (6, 4, 2) has no log_prob": returning(lambda d, v: (d.logits, v)),
    "SimpleNamespace defines neither entropy() nor sample": (FULL, BONUS, {"evaluate": policy_with()}),
    # numbers and schedules
    "clipped_adam: max_grad_norm must be a number or an array, and cannot follow a schedule":
        lambda: pp.clipped_adam(1e-3, max_grad_norm=lambda step: 0.5),
    "kl_penalty: coef must be a number or an array, and cannot follow a schedule":
        lambda: pp.kl_penalty(coef=lambda step: 1.0, target_kl=0.1),
    "kl_penalty: coef must be one number for the whole batch, and cannot be the field 'extras.w'":
        lambda: pp.kl_penalty(coef=pp.field("extras.w"), target_kl=0.01),
    "linear_schedule: init_value must be a number": lambda: pp.linear_schedule("0.2", 1.0, 9),
    "advantage_normalize: axis must ... 'time'": lambda: pp.advantage_normalize(axis="time"),
    "clip_eps must be a schedule that JAX can trace": lambda: pp.clipped_surrogate(
        clip_eps=lambda step: float(np.interp(step, [0, 10], [0.2, 0.1]))
    ),
    "gamma must be a number, but its schedule is 'x' at step 0": lambda: pp.gae(gamma=lambda _: "x", gae_lambda=0.9),
    "for all steps, and ... failed at 536870912: index":
        lambda: pp.clipped_surrogate(clip_eps=lambda step: np.array([0.2, 0.1])[step]),
}  # fmt: skip

SHAPE_ERRORS = {
    "Metrics.of: these must have the same shape, got a (5,), b ()": lambda: pp.Metrics.of({"a": FIVE, "b": FIVE[0]}),
    "'mine' ... (6, 4) ... reduce it": (GAE, pp.stateless(lambda b: b.add_metrics(mine=b.reward)), CRITIC),
    "'mine' has shape (), expected (6, 4)": (GAE, FULL, pp.stateless(lambda b: b.add_loss("mine", jnp.mean(b.value)))),
    "combine_advantages: advantage has shape (6, 4, 2) and a coefficient of shape ()":
        (STREAMS, pp.combine_advantages({"advantage": 0.5}), ACTOR),
    "combine_advantages: advantage has shape (6, 4) and a coefficient of shape (6, 4, 1)":
        (GAE, WEIGHTED, ACTOR, given(extras={"w": BATCH.reward[..., None]})),
    "importance_correction ... advantage (6, 4, 2), log_prob (6, 4)":
        (STREAMS, pp.tokens.importance_correction(high=2.0, reference="w"), ACTOR, given(extras={"w": BATCH.log_prob})),
    "proximal_average ... advantage (6, 4, 2), log_prob (6, 4)":
        (STREAMS, FULL, pp.regularizers.proximal_average(decay=0.9), SURROGATE),
    "normalize_target ... target (6, 4, 3), log_prob (6, 4)":
        lambda: POPART.update(given(target=jnp.ones((TIME, SEGMENTS, 3))), None, CONTEXT),
    "prioritized_sampler ... (6, 4, 2) ... combine the streams": (STREAMS, PRIORITIZED(2), SURROGATE),
    "same number of streams, got (6, 4, 2), (6, 4, 3)": (TARGETS, CRITIC, given(value=BOTH), {"evaluate": two_values}),
    "a value of shape (6, 4, 2), but batch.value has (6, 4)": ({"evaluate": two_values},),
    "field('extras.w') must have the axes of log_prob, (6, 4), got shape (4, 6)":
        (mine(lambda b: b.add_extras(w=b.reward.T)), pp.gae(gamma=pp.field("extras.w"), gae_lambda=0.9), ACTOR),
    "value_loss: coef of shape (6, 4, 2) does not fit arrays of shape (6, 4)":
        (GAE, FULL, pp.value_loss(coef=pp.field("extras.w")), given(extras={"w": BOTH})),
    "gae ... reward (6, 4) ... value (6, 4, 3) ... 3 streams, all of them need 3 numbers":
        (GAE, ACTOR, given(value=jnp.ones((TIME, SEGMENTS, 3)), next_value=jnp.ones((TIME, SEGMENTS, 3)))),
    "combine the streams of the advantage first": (STREAMS, ACTOR),
    "combine_advantages ... per_segment.bonus (4,)":
        (GAE, pp.combine_advantages({"advantage": 1.0, "per_segment.bonus": 1.0}), ACTOR, WITH_BONUS),
    "add_stop: discard must be one boolean, got shape ... jnp.any": lambda: BATCH.add_stop(discard=BATCH.reward > 0),
    "[T, N] ... (6,) ... axis of size 1": (jax.tree.map(lambda x: x[:, 0], BATCH),),
    "obs ... (6, 4) ... (6, 3, 3)": (given(obs={"image": BATCH.obs[:, 1:]}),),
    "carry ... (4,) ... (3, 2)": (GAE, SEGMENT, VALUE, given(carry=jnp.zeros((3, 2)))),
    "value of shape (6, 4, 1) ... value[..., 0]": returning(lambda d, v: (d, v[..., None])),
    "log_prob has shape (6, 4, 1) ... distributions.Normal":
        ({"evaluate": policy_with(log_prob=lambda d, action: d.log_prob(action)[..., None])},),
    "'entropy' ... (6, 4, 1)": (FULL, BONUS, {"evaluate": policy_with(entropy=lambda d: d.entropy()[..., None])}),
    "last_value ... (2,) ... ()": lambda: f.next_values(jnp.ones((5, 2)), jnp.ones(())),
    "mine: draw must return indices of shape [M], got ()": draws(lambda item: (item[0], None)),
    "mine: draw must return one weight for each index, (6,), got ()": draws(lambda item: (item, jnp.ones(()))),
    "mine: draw must return one weight for each index, (4,), got (6,)": draws(lambda _: (None, jnp.ones(6)), "segment"),
    "mine: draw must return counts [L, M] for M windows, got (2, 1) for starts of shape (2,)":
        draws(lambda item: (pp.Windows(item[:2], item[:2], jnp.ones((2, 1), bool)), None), "window"),
    "extras['x'] must begin with the axes [T, N] ... per_segment": (given(extras={"x": jnp.zeros(SEGMENTS)}),),
    "per_segment['x'] must begin with the axis [N]": (given(per_segment={"x": BATCH.reward}),),
    "field('shared.s') must be one number, which all elements share, got shape (6,)":
        (GAE, FULL, pp.clipped_surrogate(clip_eps=pp.field("shared.s")), given(shared={"s": jnp.ones(TIME)})),
    "gradient_metrics must return scalars, but 'norms' has shape (2,)":
        ({"gradient_metrics": lambda gradient: {"norms": jnp.ones(2)}},),
    **{
        f"{field} (5, 4) ... Nothing is broadcast": (VTRACE, CRITIC, given(**{field: BATCH.value[1:]}))
        for field in ("value", "reward", "terminated", "truncated", "next_value", "mask", "log_prob", "reset",
                      "log_ratio", "advantage", "target")
    },
}  # fmt: skip

REFUSED_BY_PYTHON = {
    "raised by the part 'mine': declare what it reads": (GAE, FULL, mine(lambda b: b.add_loss("own", b.extras["x"]))),
    "raised by finish of the part 'kl_penalty', which receives the whole rollout, as recorded unless":
        (pp.stateless(lambda b: b.add_extras(ref=b.log_prob), provides=("extras.ref",)), GAE,
         pp.full_batch(refresh="epoch"), SURROGATE,
         pp.kl_penalty(coef=0.1, target_kl=0.01, direction="current_to_reference", reference="ref")),
    "got an unexpected keyword argument 'foo'": lambda: learner(pp.chain(FAILS, GAE, CRITIC)).init(make_params()),
    "raised by finish of the part 'counts'": (COUNTS, GAE, FULL, SURROGATE),
    "no attribute 'nothing'": (FULL, BONUS, {"evaluate": policy_with(entropy=lambda d: d.nothing)}),
    "add the part that records it; a minibatch has clip_fraction, policy_loss":
        (GAE, FULL, SURROGATE, {"optimizer": optax.GradientTransformationExtraArgs(
            lambda params: (), lambda gradient, *_, metrics, **extra: (gradient, metrics["approx_kl"]))}),
}  # fmt: skip


TABLES = {ValueError: VALUE_ERRORS, TypeError: TYPE_ERRORS, pp.errors.ShapeError: SHAPE_ERRORS}
TABLES[TypeError, KeyError, AttributeError] = REFUSED_BY_PYTHON
ROWS = [(error, says, call) for error, rows in TABLES.items() for says, call in rows.items()]


@pytest.mark.parametrize(("error", "says", "call"), ROWS, ids=[says for _, says, _ in ROWS])
def test_bad_input(error, says, call):
    with pytest.raises(error, match=".*".join(map(re.escape, says.split(" ... ")))) as raised:
        call() if callable(call) else update(*call)
    assert isinstance(raised.value, pp.errors.UserError) == (says not in REFUSED_BY_PYTHON)


def test_a_shape_error_is_a_value_error():
    assert issubclass(pp.errors.ShapeError, ValueError)
    assert pp.errors.ShapeError is f.ShapeError


def test_what_only_looks_bad_is_accepted():
    """Logits without an axis of actions do not count the actions; a carry that is None need not be in the batch."""
    coin = SimpleNamespace(logits=jnp.zeros(2), sample=lambda seed: jnp.zeros(2, int), log_prob=lambda x: 0.0 * x)
    assert collect(envs.Discrete(1), coin)[1].action.shape == (3, 2)
    update(GAE, SEGMENT, VALUE, {"evaluate": pp.Policy(lambda key: {}, evaluate, lambda num_envs: None)})
    # Names may contain dots, and a part may read a metric that an earlier part of its own chain adds.
    penalty = pp.kl_penalty(coef=0.1, estimator="k2", direction="current_to_reference", reference="v1.5")
    stopping = pp.within(pp.chain(SURROGATE, pp.early_stop("clip_fraction", 1.0)), name="ppo.own")
    also = pp.early_stop("ppo.own/clip_fraction", 1.0)
    update(GAE, pp.given_indices([[*range(13)]]), VALUE, {"evaluate": pp.microbatched(evaluate, 4)})  # 13 pieces of 1
    update(GAE, FULL, stopping, also, penalty, given(extras={"v1.5": BATCH.log_prob}))
    compiled = jax.jit(lambda b: b.replace(advantage=-b.advantage))  # it returns new arrays for all fields
    update(GAE, FULL, mine(compiled, provides=("advantage",)), SURROGATE)
    narrow = given(log_ratio=jnp.zeros_like(BATCH.log_prob, "float16"))
    update(VTRACE, pp.full_batch(2, refresh="epoch"), SURROGATE, narrow)
