"""Everything that must fail, in one table: when built or first traced, naming the value and what to do instead."""

import re
from types import SimpleNamespace

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts import envs, networks
from ppo_parts import functional as f
from tests.common import SEGMENTS, TIME, Softmax, evaluate, make_params, rollout

SHUFFLED, SEGMENT, FULL = pp.shuffled_minibatches(2), pp.segment_minibatches(2), pp.full_batch()
GAE, VTRACE, NORMALIZE = pp.gae(gamma=0.9, gae_lambda=0.8), pp.vtrace(gamma=0.9), pp.advantage_normalize()
SURROGATE, VALUE = pp.clipped_surrogate(clip_eps=0.2), pp.value_loss()
ACTOR, CRITIC = pp.chain(FULL, SURROGATE), pp.chain(FULL, VALUE)
BATCH, SGD = rollout(), optax.sgd(0.1)
TABLE = []


def bad(name, call, error, says):
    """One row: `call()` raises `error`, and the message has these words in it; " ... " stands for anything."""
    TABLE.append(pytest.param(call, error, ".*".join(map(re.escape, says.split(" ... "))), id=name))


def update(*parts, batch=BATCH, evaluate=evaluate, optimizer=SGD, params=None, key=None):
    """Trace one update; nothing is compiled."""
    learner = pp.learner(evaluate, pp.chain(*parts), optimizer)
    state = learner.init(make_params() if params is None else params)
    key = jax.random.key(0) if key is None else key
    return jax.eval_shape(lambda state, batch: learner.update(key, state, batch), state, batch)


def without(*fields):
    return BATCH.replace(**dict.fromkeys(fields))


def with_column(field):
    """The batch with a `[T, N, 1]` where there should be a `[T, N]`."""
    return BATCH.replace(**{field: getattr(BATCH, field)[..., None]})


# --- chains ----------------------------------------------------------------------------------------------------------

bad(
    "loss before the sampler",
    lambda: pp.chain(GAE, SURROGATE, SHUFFLED),
    ValueError,
    "clipped_surrogate ... move it after shuffled_minibatches",
)
bad(
    "stop before the sampler",
    lambda: pp.chain(GAE, pp.kl_early_stop(0.1), SHUFFLED),
    ValueError,
    "kl_early_stop ... after shuffled_minibatches",
)
bad(
    "entropy before the sampler",
    lambda: pp.chain(pp.entropy_bonus(coef=0.1), FULL),
    ValueError,
    "entropy_bonus ... after full_batch",
)
bad(
    "two samplers",
    lambda: pp.chain(GAE, SHUFFLED, SEGMENT),
    ValueError,
    "shuffled_minibatches and segment_minibatches ... phases",
)
bad(
    "two nested samplers",
    lambda: pp.chain(pp.chain(GAE, FULL), pp.chain(FULL, VALUE)),
    ValueError,
    "full_batch and full_batch ... phases",
)
bad(
    "a sampler and phases",
    lambda: pp.chain(FULL, pp.phases(actor=ACTOR)),
    ValueError,
    "full_batch and phases ... phases",
)
bad(
    "vtrace after a step sampler",
    lambda: pp.chain(SHUFFLED, VTRACE),
    ValueError,
    "vtrace ... shuffled_minibatches ... segment_minibatches",
)
bad(
    "gae, implementation",
    lambda: pp.gae(gamma=0.9, gae_lambda=0.9, implementation="x"),
    pp.errors.UserValueError,
    "'scan'",
)
bad("vtrace, implementation", lambda: pp.vtrace(gamma=0.9, implementation="x"), pp.errors.UserValueError, "'scan'")
bad(
    "a clip that follows a schedule",
    lambda: pp.clipped_adam(1e-3, max_grad_norm=lambda step: 0.5),
    TypeError,
    "clipped_adam: max_grad_norm must be a number or an array, and cannot follow a schedule",
)
bad(
    "gae after a step sampler",
    lambda: pp.chain(pp.given_indices([[0]]), GAE),
    ValueError,
    "gae ... given_indices ... move gae before it",
)
bad(
    "normalize before gae",
    lambda: pp.chain(NORMALIZE, GAE),
    ValueError,
    "advantage_normalize ... put gae before advantage_normalize",
)
bad(
    "prioritized before gae",
    lambda: pp.chain(pp.prioritized_sampler(2, alpha=1.0, beta=1.0), GAE),
    ValueError,
    "prioritized_sampler ... put gae before",
)
bad(
    "weight without a loss yet",
    lambda: pp.chain(GAE, FULL, pp.loss_weight("value"), VALUE),
    ValueError,
    "loss_weight ... put value_loss before",
)
bad("a part not called", lambda: pp.chain(pp.gae, FULL), TypeError, "function gae ... forget to call it, gae(...)")
bad("not a part", lambda: pp.chain(GAE, "gae"), TypeError, "expected parts, got 'gae'")
bad("a list of parts", lambda: pp.chain([GAE, FULL]), TypeError, "got a list of them ... chain(*parts)")
bad(
    "a state of another chain",
    lambda: pp.chain(GAE, NORMALIZE).update(BATCH, (), pp.Context(key=jax.random.key(0))),
    ValueError,
    "2 parts but 0 states ... this chain's init",
)
bad(
    "a part that returns no batch",
    lambda: update(pp.Part(lambda params, key: (), lambda batch, state, context: (batch.reward, ()), "mine"), FULL),
    TypeError,
    "mine ... must return (batch, state)",
)
RETURNS_BATCH = pp.Part(lambda params, key: (), lambda batch, state, context: batch, "mine")
bad(
    "a part without its state",
    lambda: update(RETURNS_BATCH, FULL, VALUE),
    TypeError,
    "mine ... (batch, state), got Batch",
)
bad("a place in words", lambda: pp.stateless(abs, place="after"), ValueError, "abs: place must be one of 'anywhere', ")
bad(
    "a field that is not in a tuple",
    lambda: pp.stateless(abs, requires="reward"),
    TypeError,
    "abs: requires must be a tuple of fields, got 'reward': write ('reward',)",
)
bad(
    "metrics of two shapes",
    lambda: pp.Metrics.of({"a": jnp.zeros(3), "b": jnp.zeros(())}),
    f.ShapeError,
    "Metrics.of: these must have the same shape, got a (3,), b ()",
)
bad(
    "stateless that returns nothing",
    lambda: update(pp.stateless(lambda batch: None, name="mine"), FULL, VALUE),
    TypeError,
    "mine: the function must return the new batch, got NoneType",
)
bad(
    "a chain without a loss",
    lambda: pp.learner(evaluate, pp.chain(GAE, FULL, pp.advantage_normalize()), SGD),
    ValueError,
    "advantage_normalize writes ... because there is no loss: put one, such as clipped_surrogate(), after the sampler",
)
bad(
    "an advantage without a critic",
    lambda: update(GAE, FULL, SURROGATE, batch=without("value", "next_value")),
    ValueError,
    "gae: batch.value is missing ... give the policy a critic ... group_advantage()",
)
bad("stateless of no function", lambda: pp.stateless(3), TypeError, "batch -> batch ... 3")
bad(
    "a loss outside a learner",
    lambda: pp.chain(SURROGATE).update(BATCH.replace(advantage=BATCH.value), ((),), pp.Context(key=jax.random.key(0))),
    ValueError,
    "clipped_surrogate ... after a sampler ... learner()",
)
bad(
    "vtrace on steps",
    lambda: pp.chain(VTRACE).update(BATCH.replace(axes=("step",)), ((),), pp.Context(key=jax.random.key(0))),
    ValueError,
    "vtrace ... ('step',)",
)
bad(
    "phases run as a part",
    lambda: pp.phases(actor=ACTOR).update(BATCH, {}, pp.Context(key=jax.random.key(0))),
    ValueError,
    "learner()",
)

# --- the learner -----------------------------------------------------------------------------------------------------

bad("no sampler", lambda: update(GAE, SURROGATE), ValueError, "no sampler ... shuffled_minibatches() or full_batch()")
bad(
    "no loss",
    lambda: update(GAE, FULL, pp.policy_diagnostics(), metric("own")),
    ValueError,
    "no part added a loss ... clipped_surrogate",
)
bad(
    "nothing made advantages",
    lambda: update(FULL, NORMALIZE, SURROGATE),
    ValueError,
    "advantage_normalize needs batch.advantage ... put gae() or vtrace() before it",
)
bad(
    "nothing made targets",
    lambda: update(FULL, VALUE),
    ValueError,
    "value_loss needs batch.target ... put gae() or vtrace() before it",
)
bad(
    "prioritized without advantages",
    lambda: update(pp.prioritized_sampler(2, alpha=1.0, beta=0.0), VALUE),
    ValueError,
    "prioritized_sampler ... batch.advantage ... gae()",
)
bad(
    "nothing made weights",
    lambda: update(GAE, FULL, pp.advantage_weight(), SURROGATE),
    ValueError,
    "advantage_weight needs batch.weight ... prioritized_sampler()",
)
bad(
    "weight of no losses",
    lambda: update(GAE, pp.prioritized_sampler(2, alpha=1.0, beta=1.0), pp.loss_weight("value")),
    ValueError,
    "no loss is named 'value' ... after the losses",
)
bad(
    "weight of an unknown loss",
    lambda: update(GAE, pp.prioritized_sampler(2, alpha=1.0, beta=1.0), VALUE, pp.loss_weight("policy")),
    ValueError,
    "'policy' ... losses are: value",
)
bad(
    "two losses of one name",
    lambda: update(GAE, FULL, VALUE, pp.clipped_value_loss(clip_eps=0.2)),
    ValueError,
    "'value' ... name=\"...\"",
)
bad(
    "two metrics of one name",
    lambda: update(GAE, FULL, VALUE, pp.kl_early_stop(1.0), pp.kl_early_stop(2.0)),
    ValueError,
    "'early_stop_kl' ... another name",
)
bad(
    "a metric of the learner's",
    lambda: update(GAE, FULL, VALUE, pp.entropy_bonus(coef=0.1, name="loss")),
    ValueError,
    "'loss' ... another name",
)
bad(
    "a metric on both sides",
    lambda: update(GAE, metric("a"), FULL, VALUE, metric("a")),
    ValueError,
    "'a' ... the parts before the sampler, those after it",
)
bad(
    "a metric that is no scalar",
    lambda: update(GAE, pp.stateless(lambda batch: batch.add_metrics(mine=batch.reward)), FULL, VALUE),
    f.ShapeError,
    "'mine' ... (6, 4) ... reduce it",
)
bad(
    "a loss that is reduced",
    lambda: update(GAE, FULL, pp.stateless(lambda batch: batch.add_loss("mine", jnp.mean(batch.value)))),
    f.ShapeError,
    "'mine' has shape (), expected (6, 4)",
)
bad(
    "a loss named 3",
    lambda: update(GAE, FULL, pp.value_loss(name=3)),
    TypeError,
    "name of a loss must be a string, got 3",
)
bad(
    "a loss of integers",
    lambda: update(GAE, FULL, pp.stateless(lambda batch: batch.add_loss("mine", batch.action))),
    TypeError,
    "add_loss: mine must be floating, got int32",
)
bad(
    "a metric in words",
    lambda: update(GAE, pp.stateless(lambda batch: batch.add_metrics(mine="a")), FULL, VALUE),
    TypeError,
    "mine must be an array, got 'a'",
)
bad(
    "parameters that are counts",
    lambda: update(GAE, FULL, VALUE, params=make_params() | {"steps": jnp.int32(3)}),
    pp.errors.UserTypeError,
    "int32 at ['steps'] ... phase(..., trains=...)",
)
bad(
    "parameters for a state",
    lambda: pp.learner(evaluate, pp.chain(FULL, VALUE), SGD).update(jax.random.key(0), make_params(), BATCH),
    pp.errors.UserTypeError,
    "state must be a LearnerState, as learner.init(params) returns it, got dict",
)
bad(
    "gradient metrics that are a number",
    lambda: pp.learner(evaluate, pp.chain(FULL, VALUE), SGD, gradient_metrics=3),
    pp.errors.UserTypeError,
    "gradient_metrics must be a function of the gradient, got 3",
)
bad(
    "the name of an environment",
    lambda: pp.rollout("CartPole-v1", evaluate, num_envs=1, num_steps=1),
    pp.errors.UserTypeError,
    "rollout: 'CartPole-v1' is not an environment: make one with envs.make(...)",
)


def collect(space, distribution):
    """Trace a rollout of a policy that ignores its observations, two environments for three steps."""
    env = envs.make("CartPole-v1")._replace(action_space=space)
    rollout = pp.rollout(env, lambda params, batch: (distribution, batch.obs[..., 0]), num_envs=2, num_steps=3)
    key = jax.random.key(0)
    return jax.eval_shape(lambda: rollout.collect(key, None, rollout.init(key)))


bad(
    "an environment of gymnax that is not wrapped",
    lambda: pp.rollout(gymnax.make("CartPole-v1")[0], evaluate, num_envs=1, num_steps=1),
    pp.errors.UserTypeError,
    "rollout: ... is not an environment: make one with envs.make(...)",
)
bad(
    "numbers for one of two actions",
    lambda: collect(envs.Discrete(2), pp.distributions.Normal(jnp.zeros((2, 1)), jnp.ones(1))),
    pp.errors.UserTypeError,
    "actions are float32[2, 1], but each of [2] environments takes one of 2 actions: return distributions.Categorical",
)
bad(
    "one of two actions for a number",
    lambda: collect(envs.Box((1,)), pp.distributions.Categorical(jnp.zeros((2, 2)))),
    pp.errors.UserTypeError,
    "actions are int32[2], but each of [2] environments takes numbers of shape (1,): ... with a mean [..., 1]",
)
bad(
    "two numbers for one",
    lambda: collect(envs.Box((1,)), pp.distributions.Normal(jnp.zeros((2, 2)), jnp.ones(2))),
    pp.errors.UserTypeError,
    "actions are float32[2, 2], but each",
)
bad(
    "three actions where there are two",
    lambda: collect(envs.Discrete(2), pp.distributions.Categorical(jnp.zeros((2, 3)))),
    pp.errors.UserValueError,
    "rollout: the policy has logits for 3 actions, but the environment has 2",
)
bad(
    "logits for a distribution",
    lambda: collect(envs.Discrete(2), jnp.zeros((2, 2))),
    pp.errors.UserTypeError,
    "needs sample(seed=), but an array of shape (2, 2) has no sample: use one of ppo_parts.distributions",
)
for name, optimizer in {
    "lbfgs": optax.lbfgs(),
    "a line search": optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5)),
    "sophia": optax.contrib.sophia(1e-3),
    "lookahead": optax.lookahead(optax.sgd(0.1), 5, 0.5),
}.items():
    bad(
        f"the optimizer {name}",
        lambda optimizer=optimizer: update(
            pp.gae(gamma=0.9, gae_lambda=0.9), pp.full_batch(), pp.value_loss(), optimizer=optimizer
        ),
        pp.errors.UserTypeError,
        "learner: the optimizer's update(gradient, state, params, step=, value=, metrics=) raised ... loop of your own",
    )
bad(
    "a mask of what a phase trains with two parameters",
    lambda: pp.phase(pp.full_batch(), trains=lambda params, step: params),
    pp.errors.UserTypeError,
    "phase: trains must take (params)",
)
bad(
    "an entry of aux named like the value",
    lambda: pp.rollout(None, evaluate, num_envs=1, num_steps=1, record=("value",)),
    ValueError,
    "record='value' has the name of batch.value",
)
bad(
    "an entry of aux named like the next value of another",
    lambda: pp.rollout(None, evaluate, num_envs=1, num_steps=1, record=("cost", "next_cost")),
    ValueError,
    "record='next_cost' has the name of the next value of 'cost'",
)
bad(
    "an entry of info named like one of aux",
    lambda: pp.rollout(None, evaluate, num_envs=1, num_steps=1, record=("cost",), keep_info=("cost",)),
    ValueError,
    "keep_info='cost' has the name of an entry that record keeps: give this entry of info another name",
)
bad(
    "advantages in a list",
    lambda: pp.combine_advantages(["advantage"]),
    TypeError,
    "coefficient for each path ... got [",
)
bad(
    "an advantage of segments",
    lambda: update(
        GAE,
        pp.combine_advantages({"advantage": 1.0, "per_segment.bonus": 1.0}),
        FULL,
        SURROGATE,
        batch=BATCH.replace(per_segment={"bonus": jnp.ones(SEGMENTS)}),
    ),
    f.ShapeError,
    "combine_advantages ... per_segment.bonus (4,)",
)
bad(
    "a lens on what is not read",
    lambda: pp.within(GAE, name="other", read={"advantage": "extras.mine"}),
    ValueError,
    "within: gae does not read 'advantage'; it reads reward, value",
)
bad(
    "noise in observations that are integers",
    lambda: update(
        FULL,
        pp.regularizers.smoothness_loss(temporal=None),
        batch=BATCH.replace(obs=BATCH.obs.astype(int)),
    ),
    TypeError,
    "smoothness_loss ... not floating ... spatial=None",
)
bad(
    "a replay that rounds",
    lambda: update(
        GAE,
        pp.phases(all=pp.chain(pp.replay(2, BATCH.replace(obs=BATCH.obs.astype(jnp.uint8))), FULL, VALUE)),
        optimizer={"all": SGD},
        params={"all": make_params()},
        evaluate=lambda params, batch: evaluate(params["all"], batch),
    ),
    TypeError,
    "replay: the rollout has float32 where like has uint8",
)
bad("no evaluate", lambda: pp.learner(None, pp.chain(FULL, VALUE), SGD), TypeError, "evaluate ... None")
bad(
    "a pipeline before evaluate",
    lambda: pp.learner(pp.chain(FULL, VALUE), evaluate, SGD),
    TypeError,
    "got the part 'chain': the order is learner(evaluate, pipeline, optimizer)",
)
bad("a list for a pipeline", lambda: pp.learner(evaluate, [FULL, VALUE], SGD), TypeError, "expected parts")
bad("no optimizer", lambda: pp.learner(evaluate, pp.chain(FULL, VALUE), 1e-3), TypeError, "optax ... 0.001")
bad(
    "an optimizer not called",
    lambda: pp.learner(evaluate, pp.chain(FULL, VALUE), optax.sgd),
    TypeError,
    "optax ... call it, sgd(...)?",
)
bad(
    "a dict of optimizers",
    lambda: pp.learner(evaluate, pp.chain(FULL, VALUE), {"actor": SGD}),
    ValueError,
    "phases ... one sampler",
)
bad(
    "the optimizer's step missing",
    lambda: pp.optim.scale_by_update_schedule(0.1).update({}, optax.EmptyState()),
    ValueError,
    "step= ... learner()",
)


def metric(name):
    return pp.stateless(lambda batch: batch.add_metrics(**{name: jnp.zeros(())}))


# --- phases ----------------------------------------------------------------------------------------------------------

PHASES = pp.chain(GAE, pp.phases(actor=ACTOR, critic=CRITIC))
bad("no phase", lambda: pp.phases(), ValueError, "phases(actor=chain(...)")
bad(
    "a phase without a sampler",
    lambda: pp.phases(actor=pp.chain(SURROGATE)),
    ValueError,
    "actor ... shuffled_minibatches()",
)
bad("a phase that trains nothing", lambda: pp.phase(ACTOR, trains=()), ValueError, "got (); None means all")
bad(
    "a mask without all parameters",
    lambda: update(GAE, pp.phases(all=pp.phase(CRITIC, trains=lambda params: {"value": True})), optimizer={"all": SGD}),
    ValueError,
    "phase 'all': trains(params) must return a boolean for each leaf of the parameters",
)
bad("phases in a phase", lambda: pp.phases(all=pp.phases(actor=ACTOR)), ValueError, "phases ... do not nest")
bad("a phase that is no part", lambda: pp.phases(actor=3), TypeError, "actor must be a chain ... 3")
bad(
    "one optimizer for phases",
    lambda: pp.learner(evaluate, PHASES, SGD),
    ValueError,
    "['actor', 'critic'] ... GradientTransformation",
)
bad(
    "an optimizer too few",
    lambda: pp.learner(evaluate, PHASES, {"actor": SGD}),
    ValueError,
    "['actor', 'critic'] ... ['actor']",
)
bad(
    "an optimizer too many",
    lambda: pp.learner(evaluate, PHASES, dict.fromkeys(("actor", "critic", "x"), SGD)),
    ValueError,
    "'x'",
)
bad(
    "a part after phases",
    lambda: update(PHASES, pp.stateless(lambda batch: batch, name="mine"), optimizer={"actor": SGD, "critic": SGD}),
    ValueError,
    "mine ... into one of the phases",
)
bad(
    "parameters without the phases",
    lambda: update(PHASES, optimizer={"actor": SGD, "critic": SGD}),
    ValueError,
    "params['actor'] ... ['policy', 'value']",
)
bad(
    "parameters that are no dict",
    lambda: update(PHASES, optimizer={"actor": SGD, "critic": SGD}, params=jnp.ones(2)),
    ValueError,
    "params['actor'] ... Array",
)

# --- samplers --------------------------------------------------------------------------------------------------------

bad(
    "steps that do not divide",
    lambda: update(GAE, pp.shuffled_minibatches(7), VALUE),
    ValueError,
    "num_minibatches must divide the 24 steps ... got 7 ... 6, 8",
)
bad(
    "segments that do not divide",
    lambda: update(GAE, pp.segment_minibatches(3), VALUE),
    ValueError,
    "num_minibatches must divide the 4 segments ... got 3 ... 2, 4",
)
bad(
    "more minibatches than segments",
    lambda: update(GAE, pp.segment_minibatches(8), VALUE),
    ValueError,
    "num_minibatches must divide the 4 segments ... got 8",
)
bad(
    "draws that do not divide",
    lambda: update(GAE, pp.prioritized_sampler(3, alpha=1.0, beta=0.0), VALUE),
    ValueError,
    "num_minibatches must divide the 4 segments ... got 3",
)
bad(
    "more draws than segments",
    lambda: update(GAE, pp.prioritized_sampler(1, alpha=1.0, beta=0.0, segments_per_minibatch=5), VALUE),
    ValueError,
    "5 of 4 segments ... replacement",
)
bad(
    "inclusion with replacement",
    lambda: pp.prioritized_sampler(1, alpha=1.0, beta=0.0, weights="inclusion", replacement=True),
    ValueError,
    "prioritized_sampler: weights must be 'probability' with replacement=True",
)
for shown, axis, sampler in (
    ("axis=None ... shape (1,)", None, pp.shuffled_minibatches(TIME * SEGMENTS)),
    (f"axis=-1 ... shape ({TIME}, 1)", -1, pp.segment_minibatches(SEGMENTS)),
):
    bad(
        f"advantages standardized one by one, {axis}",
        lambda axis=axis, sampler=sampler: update(GAE, sampler, pp.advantage_normalize(axis=axis), SURROGATE),
        ValueError,
        f"advantage_normalize: {shown} ... always 0 ... fewer minibatches",
    )
bad(
    "groups of one",
    lambda: pp.tokens.group_advantage(group=1),
    ValueError,
    "group_advantage: group must name groups of several segments ... got 1",
)
bad(
    "one segment as a group",
    lambda: update(
        pp.tokens.group_advantage(group="group"),
        pp.full_batch(),
        SURROGATE,
        batch=jax.tree.map(lambda x: x[:, :1], BATCH).replace(per_segment={"group": jnp.zeros(1, int)}),
    ),
    ValueError,
    "group_advantage: group must name groups of several segments ... got 'group'",
)
bad(
    "steps of a recurrent policy",
    lambda: update(GAE, SHUFFLED, VALUE, batch=BATCH.replace(carry=jnp.zeros(SEGMENTS))),
    ValueError,
    "shuffled_minibatches ... carry ... segment_minibatches()",
)
bad(
    "given steps of a recurrent policy",
    lambda: update(GAE, pp.given_indices([[0, 1]]), VALUE, batch=BATCH.replace(carry=jnp.zeros(SEGMENTS))),
    ValueError,
    "given_indices ... carry ... segment_minibatches()",
)
bad("no minibatch", lambda: pp.shuffled_minibatches(0), ValueError, "num_minibatches ... at least 1 ... 0")
bad("half a minibatch", lambda: pp.segment_minibatches(2.5), TypeError, "num_minibatches ... whole number ... 2.5")
bad("minibatches in words", lambda: pp.shuffled_minibatches("4"), TypeError, "num_minibatches ... '4'")
bad("minibatches yes", lambda: pp.shuffled_minibatches(True), TypeError, "num_minibatches ... True")
bad("no epoch", lambda: pp.full_batch(0), ValueError, "num_epochs ... 0")
bad(
    "negative epochs",
    lambda: pp.prioritized_sampler(2, alpha=1.0, beta=1.0, num_epochs=-1),
    ValueError,
    "num_epochs ... -1",
)
bad(
    "no segments per minibatch",
    lambda: pp.prioritized_sampler(2, alpha=1.0, beta=1.0, segments_per_minibatch=0),
    ValueError,
    "segments_per_minibatch ... 0",
)
bad(
    "refresh of something else",
    lambda: pp.full_batch(refresh="update"),
    ValueError,
    "'rollout', 'epoch', 'minibatch' ... 'update'",
)
bad("indices out of range", lambda: update(GAE, pp.given_indices([[0, 24]]), VALUE), ValueError, "[0, 24) ... 0 to 24")
bad("negative indices", lambda: update(GAE, pp.given_indices([[-1, 2]]), VALUE), ValueError, "[0, 24) ... -1 to 2")
bad(
    "segments out of range",
    lambda: update(GAE, pp.given_indices([[0, 4]], axis="segment"), VALUE),
    ValueError,
    "[0, 4) for segments ... 0 to 4",
)
bad("indices that are no integers", lambda: pp.given_indices([[0.0, 1.0]]), TypeError, "integers ... float64")
bad("indices of one minibatch", lambda: pp.given_indices([0, 1]), ValueError, "[K, M] ... (2,)")
bad("no indices", lambda: pp.given_indices(np.zeros((2, 0), int)), ValueError, "[K, M] ... (2, 0)")
bad("minibatches of two sizes", lambda: pp.given_indices([[0, 1], [2]]), ValueError, "one size, got [[0, 1], [2]]")
bad("a weight of NaN", lambda: pp.given_indices([[0]], weights=[[np.nan]]), ValueError, "weights must lie in [0, inf]")
bad("indices of another axis", lambda: pp.given_indices([[0]], axis="time"), ValueError, "'step', 'segment' ... 'time'")
bad("weights of another shape", lambda: pp.given_indices([[0, 1]], weights=[1.0, 2.0]), ValueError, "(2,) ... (1, 2)")

# --- hyperparameters -------------------------------------------------------------------------------------------------

for wrong in (-0.2, 0, float("nan")):
    bad(
        f"surrogate clip {wrong}",
        lambda wrong=wrong: pp.clipped_surrogate(clip_eps=wrong),
        ValueError,
        f"clip_eps ... (0, inf] ... {wrong}",
    )
    bad(
        f"value clip {wrong}",
        lambda wrong=wrong: pp.clipped_value_loss(clip_eps=wrong),
        ValueError,
        f"clip_eps ... (0, inf] ... {wrong}",
    )
    bad(
        f"rho clip {wrong}",
        lambda wrong=wrong: pp.vtrace(gamma=0.9, rho_clip=wrong),
        ValueError,
        f"rho_clip ... {wrong}",
    )
    bad(f"c clip {wrong}", lambda wrong=wrong: pp.vtrace(gamma=0.9, c_clip=wrong), ValueError, f"c_clip ... {wrong}")
for wrong in (-0.1, 1.5, np.float32(1.01), np.nan):
    bad(
        f"gamma {wrong}",
        lambda wrong=wrong: pp.gae(gamma=wrong, gae_lambda=0.9),
        ValueError,
        f"gae: gamma ... [0, 1] ... {wrong!r}",
    )
    bad(
        f"lambda {wrong}",
        lambda wrong=wrong: pp.vtrace(gamma=0.9, gae_lambda=wrong),
        ValueError,
        f"vtrace: gae_lambda ... [0, 1] ... {wrong!r}",
    )
    bad(
        f"beta {wrong}",
        lambda wrong=wrong: pp.prioritized_sampler(2, alpha=1.0, beta=wrong),
        ValueError,
        f"beta ... [0, 1] ... {wrong!r}",
    )
for wrong in ("0.9", True, np.True_, None, [0.9, "x"], {}, b"0.9", 0.9 + 1j):
    bad(
        f"gamma {wrong!r}",
        lambda wrong=wrong: pp.gae(gamma=wrong, gae_lambda=0.9),
        TypeError,
        f"gae: gamma must be a number ... schedule ... {wrong!r}",
    )
    bad(
        f"coef {wrong!r}",
        lambda wrong=wrong: pp.entropy_bonus(coef=wrong),
        TypeError,
        f"entropy_bonus: coef must be a number ... {wrong!r}",
    )
    bad(
        f"target {wrong!r}",
        lambda wrong=wrong: pp.kl_early_stop(wrong),
        TypeError,
        f"kl_early_stop: target_kl must be a number ... {wrong!r}",
    )
bad(
    "several gammas",
    lambda: pp.gae(gamma=np.array([0.9, 0.99]), gae_lambda=0.9),
    ValueError,
    "gamma must be one number ... (2,) ... vmap",
)
bad("a list of gammas", lambda: pp.gae(gamma=[0.9], gae_lambda=0.9), ValueError, "gamma must be one number ... (1,)")
bad(
    "several traced gammas",
    lambda: jax.eval_shape(lambda gamma: pp.gae(gamma=gamma, gae_lambda=0.9).init(None), jnp.ones(3)),
    ValueError,
    "gamma must be one number ... (3,)",
)
for wrong in (None, "0.9"):
    bad(
        f"a schedule that returns {wrong!r}",
        lambda wrong=wrong: pp.gae(gamma=lambda step: wrong, gae_lambda=0.9),
        pp.errors.UserTypeError,
        f"gae: gamma must be a number, but its schedule is {wrong!r} at step 0",
    )
bad(
    "a schedule without a step",
    lambda: pp.gae(gamma=lambda: 0.9, gae_lambda=0.9),
    pp.errors.UserTypeError,
    "gae: gamma must be a number or a schedule step -> value ... takes 0 positional arguments",
)
bad(
    "a rate out of its bounds",
    lambda: pp.optim.scale_by_kl_adaptive_rate(1.0, 0.01),
    ValueError,
    "learning_rate must lie in [1e-05, 0.01], got 1.0",
)
bad("negative coefficient", lambda: pp.value_loss(coef=-0.5), ValueError, "coef ... [0, inf] ... -0.5")
bad("negative value coefficient", lambda: pp.clipped_value_loss(clip_eps=0.2, coef=-0.5), ValueError, "coef ... -0.5")
bad("negative entropy coefficient", lambda: pp.entropy_bonus(coef=-0.01), ValueError, "coef ... -0.01")
bad(
    "negative upper clip",
    lambda: pp.clipped_surrogate(clip_eps=0.2, clip_eps_high=-0.1),
    ValueError,
    "clip_eps_high ... -0.1",
)
bad(
    "a dual clip of 1",
    lambda: pp.clipped_surrogate(clip_eps=0.2, dual_clip=1.0),
    ValueError,
    "dual_clip ... (1, inf] ... 1.0",
)
bad("negative alpha", lambda: pp.prioritized_sampler(2, alpha=-1.0, beta=1.0), ValueError, "alpha ... -1.0")
bad("negative target", lambda: pp.kl_early_stop(-0.01), ValueError, "target_kl ... [0, inf] ... -0.01")
bad("negative eps", lambda: pp.advantage_normalize(eps=-1e-8), ValueError, "eps ... -1e-08")
bad(
    "a number as key",
    lambda: update(GAE, FULL, SURROGATE, key=0),
    TypeError,
    "learner.update: key must be one key, such as jax.random.key(0), got 0",
)
bad(
    "a state as key",
    lambda: update(GAE, FULL, SURROGATE, key=BATCH),
    TypeError,
    "learner.update: key must be one key ... got Batch",
)
bad(
    "a part whose state changes its dtype",
    lambda: update(
        GAE,
        FULL,
        SURROGATE,
        pp.Part(lambda params, key: jnp.int32(0), lambda b, s, c: (b, s + 0.5), "drifting", place="after_sampler"),
    ),
    TypeError,
    "drifting: update changed its state from int32[] to float32[]: keep its structure",
)
bad(
    "a stop with a shape",
    lambda: BATCH.add_stop(discard=BATCH.reward > 0),
    pp.errors.ShapeError,
    "add_stop: discard must be one boolean, got shape ... jnp.any",
)
bad("a box in another order", lambda: envs.Box(-1, 1, (1,)), TypeError, "Box ... got -1; the order is Box(shape, low")
bad(
    "a name in place of an environment",
    lambda: networks.actor_critic("CartPole-v1"),
    TypeError,
    "is not an environment",
)
bad(
    "several keys",
    lambda: update(GAE, FULL, SURROGATE, key=jax.random.split(jax.random.key(0))),
    TypeError,
    "learner.update: key must be one key ... got keys of shape (2,)",
)
bad(
    "a field with another name",
    lambda: BATCH.replace(advantge=0),
    TypeError,
    "Batch.replace: a Batch has no field 'advantge'; its fields are obs",
)
bad(
    "complex rewards",
    lambda: pp.functional.gae(np.ones((2, 1), complex), *[np.ones((2, 1))] * 3, gamma=0.9, gae_lambda=0.9),
    TypeError,
    "gae: reward must hold real numbers, got complex128",
)
bad(
    "words as rewards",
    lambda: pp.functional.gae(np.array([["a"]]), *[np.ones((1, 1))] * 3, gamma=0.9, gae_lambda=0.9),
    TypeError,
    "gae: reward must hold real numbers, got <U1",
)
bad(
    "a hyperparameter with another name",
    lambda: pp.policy_loss(pp.functional.clipped_surrogate, clip_epsilon=0.2),
    TypeError,
    "missing a required argument: 'clip_eps'; it has no 'clip_epsilon'",
)
bad("ddof 2", lambda: pp.advantage_normalize(ddof=2), ValueError, "ddof must be 0 or 1 ... 2")
bad("ddof yes", lambda: pp.advantage_normalize(ddof=True), ValueError, "ddof must be 0 or 1 ... True")
bad("an axis in words", lambda: pp.advantage_normalize(axis="time"), TypeError, "axis ... 'time'")
bad(
    "an axis that is not there",
    lambda: update(GAE, SHUFFLED, pp.advantage_normalize(axis=1), SURROGATE),
    ValueError,
    "axis=1 ... ('step',) ... (12,)",
)
bad(
    "an axis too far back",
    lambda: update(GAE, pp.advantage_normalize(axis=(0, -3)), FULL, SURROGATE),
    ValueError,
    "-3 ... (6, 4)",
)
bad("estimator", lambda: pp.kl_early_stop(0.1, estimator="k4"), ValueError, "'k1', 'k2', 'k3' ... 'k4'")
bad("reduction", lambda: pp.kl_early_stop(0.1, reduction="max"), ValueError, "'mean', 'sum' ... 'max'")
bad("check", lambda: pp.kl_early_stop(0.1, check="update"), ValueError, "'minibatch', 'epoch' ... 'update'")
bad("over", lambda: pp.kl_early_stop(0.1, check="epoch", over="first"), ValueError, "'last', 'mean' ... 'first'")
bad("mean over no epoch", lambda: pp.kl_early_stop(0.1, over="mean"), ValueError, 'over="mean" ... check="epoch"')
bad("no losses to weigh", lambda: pp.loss_weight(), TypeError, 'loss_weight("policy")')
bad("losses to weigh by number", lambda: pp.loss_weight(1), TypeError, 'loss_weight("policy") ... 1')
bad("no samples", lambda: pp.entropy_bonus(coef=0.1, num_samples=0), ValueError, "num_samples ... 0")
bad("positional hyperparameters", lambda: pp.gae(0.99, 0.95), TypeError, "positional")
bad("unknown hyperparameter", lambda: pp.gae(gamma=0.9, lam=0.9), TypeError, "lam")
bad("missing hyperparameter", lambda: pp.clipped_surrogate(), TypeError, "clip_eps")
bad("unknown field", lambda: pp.Batch(rewards=BATCH.reward), TypeError, "rewards")
bad("unknown field replaced", lambda: BATCH.replace(done=BATCH.terminated), TypeError, "done")

# --- batches ---------------------------------------------------------------------------------------------------------

for field in ("obs", "action", "log_prob"):
    bad(
        f"no {field}",
        lambda field=field: update(GAE, FULL, VALUE, batch=without(field)),
        ValueError,
        f"batch.{field} is missing",
    )
for field in ("reward", "terminated", "next_value", "value"):
    bad(
        f"gae without {field}",
        lambda field=field: update(GAE, FULL, VALUE, batch=without(field)),
        ValueError,
        f"gae: batch.{field} is missing",
    )
    bad(
        f"vtrace without {field}",
        lambda field=field: update(VTRACE, FULL, VALUE, batch=without(field)),
        ValueError,
        f"vtrace: batch.{field} is missing",
    )
bad(
    "no value to clip around",
    lambda: update(FULL, pp.clipped_value_loss(clip_eps=0.2), batch=without("value").replace(target=BATCH.reward)),
    ValueError,
    "batch.value is missing ... value_loss()",
)
bad("not a batch", lambda: update(GAE, FULL, VALUE, batch={"obs": BATCH.obs}), TypeError, "ppo_parts.Batch ... dict")
bad(
    "no segments",
    lambda: update(GAE, FULL, VALUE, batch=jax.tree.map(lambda x: x[:, 0], BATCH)),
    f.ShapeError,
    "[T, N] ... (6,) ... axis of size 1",
)
for field in ("value", "reward", "terminated", "truncated", "next_value", "mask", "log_prob"):
    bad(
        f"{field} [T, N, 1]",
        lambda field=field: update(GAE, FULL, VALUE, batch=with_column(field)),
        f.ShapeError,
        f"{field} (6, 4, 1) ... Nothing is broadcast",
    )
for field in ("reset", "log_ratio", "advantage", "target"):
    bad(
        f"{field} of other length",
        lambda field=field: update(VTRACE, FULL, VALUE, batch=BATCH.replace(**{field: BATCH.value[1:]})),
        f.ShapeError,
        f"{field} (5, 4)",
    )
bad(
    "obs of other length",
    lambda: update(GAE, FULL, VALUE, batch=BATCH.replace(obs={"image": BATCH.obs[:, 1:]})),
    f.ShapeError,
    "obs ... (6, 4) ... (6, 3, 3)",
)
bad(
    "action of other length",
    lambda: update(GAE, FULL, VALUE, batch=BATCH.replace(action=BATCH.action[1:])),
    f.ShapeError,
    "action ... (5, 4)",
)
bad(
    "carry of other length",
    lambda: update(GAE, SEGMENT, VALUE, batch=BATCH.replace(carry=jnp.zeros((3, 2)))),
    f.ShapeError,
    "carry ... (4,) ... (3, 2)",
)
bad(
    "integer values",
    lambda: update(GAE, FULL, VALUE, batch=BATCH.replace(value=jnp.ones((TIME, SEGMENTS), int))),
    TypeError,
    "value must be floating ... int32 ... astype",
)
bad(
    "integer log_prob",
    lambda: update(GAE, FULL, VALUE, batch=BATCH.replace(log_prob=jnp.ones((TIME, SEGMENTS), int))),
    TypeError,
    "log_prob must be floating ... int32",
)

# --- what evaluate returns -------------------------------------------------------------------------------------------


def returning(result):
    """An update whose `evaluate` returns `result(distribution, value)`."""
    return lambda: update(GAE, FULL, VALUE, evaluate=lambda params, batch: result(*evaluate(params, batch)))


class Unsummed(Softmax):
    """Forgets that one number per element is wanted."""

    def log_prob(self, action):
        return super().log_prob(action)[..., None]


bad(
    "evaluate returns nothing",
    returning(lambda distribution, value: None),
    TypeError,
    "(distribution, value) ... NoneType",
)
bad(
    "evaluate returns a value",
    returning(lambda distribution, value: value),
    TypeError,
    "(distribution, value) ... an array of shape (6, 4)",
)
bad(
    "evaluate returns four",
    returning(lambda distribution, value: (distribution, value, 0, 0)),
    TypeError,
    "(distribution, value) ... 4 items",
)
bad(
    "evaluate returns logits",
    returning(lambda distribution, value: (distribution.logits, value)),
    TypeError,
    "no log_prob",
)
bad("evaluate swaps", returning(lambda distribution, value: (value, distribution)), TypeError, "no log_prob")
bad(
    "value [T, N, 1]",
    returning(lambda distribution, value: (distribution, value[..., None])),
    f.ShapeError,
    "value of shape (6, 4, 1) ... value[..., 0]",
)
bad(
    "log_prob [T, N, 1]",
    returning(lambda distribution, value: (Unsummed(distribution.logits), value)),
    f.ShapeError,
    "log_prob has shape (6, 4, 1) ... distributions.Normal",
)
bad(
    "entropy [T, N, 1]",
    lambda: update(FULL, pp.entropy_bonus(coef=0.1), evaluate=wide_entropy),
    f.ShapeError,
    "'entropy' ... (6, 4, 1)",
)


bad(
    "no entropy and no sample",
    lambda: update(FULL, pp.entropy_bonus(coef=0.1), evaluate=only_log_prob),
    TypeError,
    "SimpleNamespace defines neither entropy() nor sample",
)


def only_log_prob(params, batch):
    distribution, value = evaluate(params, batch)
    return SimpleNamespace(log_prob=distribution.log_prob), value


def wide_entropy(params, batch):
    distribution, value = evaluate(params, batch)
    wide = SimpleNamespace(log_prob=distribution.log_prob, entropy=lambda: distribution.entropy()[..., None])
    return wide, value


# --- the array layer -------------------------------------------------------------------------------------------------

FIVE, COLUMN = jnp.ones(5), jnp.ones((5, 1))
WHOLE = jnp.ones(5, int)
for name, call in {
    "gae": lambda x: f.gae(FIVE, FIVE, x, FIVE, gamma=0.9, gae_lambda=0.9),
    "gae mask": lambda x: f.gae(FIVE, FIVE, FIVE, FIVE, gamma=0.9, gae_lambda=0.9, mask=x),
    "vtrace": lambda x: f.vtrace(x, FIVE, FIVE, FIVE, FIVE, gamma=0.9),
    "vtrace truncated": lambda x: f.vtrace(FIVE, FIVE, FIVE, FIVE, FIVE, x, gamma=0.9),
    "next_values": lambda x: f.next_values(FIVE, jnp.ones(()), FIVE, x),
    "advantage_normalize": lambda x: f.advantage_normalize(FIVE, mask=x),
    "clipped_surrogate": lambda x: f.clipped_surrogate(FIVE, x, clip_eps=0.2),
    "clipped_value_loss": lambda x: f.clipped_value_loss(FIVE, FIVE, x, clip_eps=0.2),
    "value_loss": lambda x: f.value_loss(FIVE, x),
    "segment_priorities": lambda x: f.segment_priorities(jnp.ones((5, 2)), alpha=1.0, mask=x),
    "explained_variance": lambda x: f.explained_variance(FIVE, x),
    "masked_mean": lambda x: f.masked_mean(FIVE, x),
}.items():
    bad(
        f"{name} [N] and [N, 1]",
        lambda call=call: call(COLUMN),
        f.ShapeError,
        f"{name.split()[0]} ... (5, 1) ... Nothing is broadcast",
    )
    bad(f"{name} [N] and [1]", lambda call=call: call(jnp.ones(1)), f.ShapeError, f"{name.split()[0]} ... (1,)")
for name, call in {
    "gae": lambda: f.gae(FIVE, WHOLE, FIVE, FIVE, gamma=0.9, gae_lambda=0.9),
    "vtrace": lambda: f.vtrace(WHOLE, FIVE, FIVE, FIVE, FIVE, gamma=0.9),
    "next_values": lambda: f.next_values(WHOLE, jnp.ones(())),
    "advantage_normalize": lambda: f.advantage_normalize(WHOLE),
    "clipped_surrogate": lambda: f.clipped_surrogate(WHOLE, FIVE, clip_eps=0.2),
    "clipped_value_loss": lambda: f.clipped_value_loss(FIVE, FIVE, WHOLE, clip_eps=0.2),
    "value_loss": lambda: f.value_loss(FIVE, WHOLE),
    "approx_kl": lambda: f.approx_kl(WHOLE),
    "clip_fraction": lambda: f.clip_fraction(WHOLE, clip_eps=0.2),
    "segment_priorities": lambda: f.segment_priorities(WHOLE[:, None], alpha=1.0),
    "importance_weights": lambda: f.importance_weights(WHOLE, WHOLE, beta=1.0),
    "explained_variance": lambda: f.explained_variance(WHOLE, FIVE),
}.items():
    bad(f"{name} of integers", call, TypeError, f"{name} ... must be floating ... int32 ... astype")
bad(
    "last value of another shape",
    lambda: f.next_values(jnp.ones((5, 2)), jnp.ones(())),
    f.ShapeError,
    "last_value ... (2,) ... ()",
)
bad(
    "truncated without final values",
    lambda: f.next_values(FIVE, jnp.ones(()), FIVE),
    ValueError,
    "final_value ... together",
)
bad(
    "indices that are floats", lambda: f.importance_weights(FIVE / 5, FIVE, beta=1.0), TypeError, "integers ... float32"
)
bad(
    "divergence",
    lambda: pp.kl_penalty(coef=1.0, estimator="k4"),
    ValueError,
    "kl_penalty: estimator ... 'analytic', got 'k4'",
)
bad(
    "direction",
    lambda: pp.kl_penalty(coef=1.0, direction="forward"),
    ValueError,
    "'reference_to_current' ... 'forward'",
)
bad("reference", lambda: pp.kl_penalty(coef=1.0, reference=None), TypeError, "key of extras, got None")
bad(
    "a coefficient that adapts and follows a schedule",
    lambda: pp.kl_penalty(coef=lambda step: 1.0, target_kl=0.1),
    TypeError,
    "kl_penalty: coef must be a number or an array, and cannot follow a schedule",
)
bad(
    "analytic divergence without the behavior policy",
    lambda: update(GAE, FULL, VALUE, pp.kl_penalty(coef=1.0, estimator="analytic")),
    ValueError,
    "kl_penalty needs batch.behavior ... keep_distribution=True",
)
bad(
    "no smoothness",
    lambda: pp.regularizers.smoothness_loss(temporal=None, spatial=None),
    ValueError,
    "give temporal, spatial or both",
)
bad(
    "average of the future",
    lambda: pp.regularizers.proximal_average(decay=1.5),
    ValueError,
    "decay must lie in [0, 1], got 1.5",
)
bad("slope of a loss", lambda: pp.policy_loss(f.rollback_surrogate, clip_eps=0.2), TypeError, "policy_loss ... 'slope'")
bad(
    "range of a loss",
    lambda: pp.policy_loss(f.simple_policy_optimization, clip_eps=-0.2),
    ValueError,
    "policy_loss: simple_policy_optimization: clip_eps must lie in (0, inf], got -0.2",
)
bad(
    "type of a critic's loss",
    lambda: pp.critics.critic_loss(f.huber_value_loss, delta="x"),
    pp.errors.UserTypeError,
    "delta ... 'x'",
)
bad(
    "a critic's loss that is reduced",
    lambda: pp.critics.critic_loss(lambda prediction, target, mask=None: jnp.mean(prediction)),
    pp.errors.UserValueError,
    "critic_loss: the loss must have the shape of prediction, got ()",
)
for scale in ("alpha", "beta"):
    bad(
        f"a drift without {scale}",
        lambda scale=scale: f.discovered_policy_optimization(FIVE, FIVE, **{scale: 0.0}),
        ValueError,
        f"discovered_policy_optimization: {scale} must lie in (0, inf] ... 0.0",
    )
bad("functional estimator", lambda: f.approx_kl(FIVE, estimator="k4"), ValueError, "'k3' ... 'k4'")
bad(
    "a segment that is not there",
    lambda: f.importance_weights(FIVE / 5, jnp.array([0, 5]), beta=1.0),
    ValueError,
    "importance_weights: there are segments 0 to 4, but 5 was drawn",
)
bad(
    "vtrace with the arguments of gae",
    lambda: f.vtrace(FIVE, FIVE, FIVE, FIVE > 0, FIVE > 0, gamma=0.9),
    TypeError,
    "vtrace: next_value must be floating, got bool",
)
bad(
    "a list for rewards",
    lambda: f.gae([1.0] * 5, FIVE, FIVE, FIVE, gamma=0.9, gae_lambda=0.9),
    TypeError,
    "gae: reward must be an array, got a list",
)
bad(
    "no rewards",
    lambda: f.gae(None, FIVE, FIVE, FIVE, gamma=0.9, gae_lambda=0.9),
    TypeError,
    "gae: reward must be an array, got None",
)
bad("functional without gamma", lambda: f.gae(FIVE, FIVE, FIVE, FIVE, gae_lambda=0.9), TypeError, "gamma")
bad(
    "functional with a positional gamma", lambda: f.gae(FIVE, FIVE, FIVE, FIVE, FIVE, 0.9, 0.9), TypeError, "positional"
)


@pytest.mark.parametrize(("call", "error", "pattern"), TABLE)
def test_bad_input(call, error, pattern):
    with pytest.raises(error, match=pattern):
        call()


def test_a_shape_error_is_a_value_error():
    assert issubclass(pp.errors.ShapeError, ValueError)
    assert pp.errors.ShapeError is f.ShapeError


def test_logits_without_an_axis_of_actions_do_not_count_actions():
    coin = SimpleNamespace(logits=jnp.zeros(2), sample=lambda seed: jnp.zeros(2, int), log_prob=lambda x: 0.0 * x)
    assert collect(envs.Discrete(1), coin)[1].action.shape == (3, 2)
