"""Distributions against scipy and their own samples, and properties that all of them have.

State-dependent noise (gSDE) equals that of Stable-Baselines3, also in the network; `test_library.py` has the rollout
that holds it. `test_migration_rlax.py` compares the numbers of `Categorical`, with gradients, with rlax.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
import scipy.stats

import ppo_parts as pp
from ppo_parts import distributions, envs, networks
from ppo_parts.distributions import Beta, Categorical, Joint, MultiCategorical, Normal, StateDependentNormal, TanhNormal
from ppo_parts.distributions._distribution import check_distribution
from tests import common

KEY = jax.random.key(0)
LOW, HIGH = jnp.array([-2.0, 0.0]), jnp.array([2.0, 1.0])
WIDTH = np.asarray(HIGH - LOW, np.float64)
BATCH = 3


def squashed(loc, log_std):
    return TanhNormal(Normal(loc, jnp.exp(log_std)), LOW, HIGH)


def made(kind, seed=0, dtype=jnp.float32):
    """Make a batch of `BATCH` different distributions."""
    rng = np.random.default_rng(seed)
    loc, log_std = (jnp.asarray(rng.normal(size=(BATCH, 2)), dtype) for _ in range(2))
    logits = [jnp.asarray(rng.normal(size=(BATCH, n)), dtype) for n in (3, 2)]
    features, std = jnp.asarray(rng.normal(size=(BATCH, 4)), dtype), jnp.asarray(rng.uniform(1, 2, (4, 2)), dtype)
    return {
        "Normal": lambda: Normal(loc, jnp.exp(log_std)),
        "StateDependentNormal": lambda: StateDependentNormal(loc, features, std),
        "TanhNormal": lambda: squashed(loc, log_std - 1),  # without samples at the edges
        "Beta": lambda: Beta(1 + jax.nn.softplus(3 * loc), 1 + jax.nn.softplus(3 * log_std), LOW, HIGH),
        "Categorical": lambda: Categorical(logits[0]),
        "MultiCategorical": lambda: MultiCategorical(logits),
        "Joint": lambda: Joint({"move": Categorical(logits[0]), "rest": (Normal(loc, jnp.exp(log_std)),)}),
    }[kind]()


KINDS = ["Normal", "StateDependentNormal", "TanhNormal", "Beta", "Categorical", "MultiCategorical", "Joint"]
every_kind = pytest.mark.parametrize("kind", KINDS)


# These compile once for each shape; without jit, a method would be many small programs.
log_prob = jax.jit(lambda policy, action: policy.log_prob(action))
divergence = jax.jit(lambda policy, other: policy.kl_divergence(other))
sample = jax.jit(lambda policy, shape=(): policy.sample(seed=KEY, sample_shape=shape), static_argnames="shape")


@jax.jit
def numbers(policy, other, action):
    found = {"log_prob": policy.log_prob(action), "kl_divergence": policy.kl_divergence(other)}
    return found if isinstance(policy, TanhNormal) else {**found, "entropy": policy.entropy()}


@jax.jit
def draws(policy):
    """Return samples with log-probabilities computed in two ways, and the mode."""
    sample = policy.sample(seed=KEY, sample_shape=(4, 5))
    together = policy.sample_and_log_prob(seed=KEY, sample_shape=(4, 5))
    return together, (sample, policy.log_prob(sample)), policy.mode()


@every_kind
def test_distributions_keep_dtype_and_shape(kind):
    """Numbers of bfloat16 are computed in float32 from the same parameters, and rounded once (in a Joint, per part)."""
    narrow, action = (made(kind, dtype=jnp.bfloat16), made(kind, 1, jnp.bfloat16)), made(kind).mode()
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    found = {}
    for dtype, policies in ((jnp.bfloat16, narrow), (jnp.float32, exact)):
        found[dtype] = numbers(*policies, action)
        assert {(x.shape, x.dtype) for x in found[dtype].values()} == {((BATCH,), jnp.dtype(dtype))}
        (actions, log_probs), _, mode = jax.eval_shape(draws, policies[0])
        one, vector, real = ((BATCH,), jnp.int32), ((BATCH, 2), jnp.int32), ((BATCH, 2), dtype)
        leaves = {"Categorical": [one], "MultiCategorical": [vector], "Joint": [one, real]}.get(kind, [real])
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(mode)] == leaves
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(actions)] == [((4, 5, *x), kind) for x, kind in leaves]
        assert (log_probs.shape, log_probs.dtype) == ((4, 5, BATCH), dtype)
    for name, expected in found[jnp.float32].items():
        rounded = found[jnp.bfloat16][name].astype(jnp.float32)
        np.testing.assert_allclose(rounded, expected, rtol=2.0 ** (-7 if kind == "Joint" else -8), err_msg=name)
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(numbers, made(kind), made(kind, 1), action)
    together, apart, _ = draws(narrow[0])  # an action is rounded before its log-probability is taken
    jax.tree.map(np.testing.assert_array_equal, together, apart)
    assert np.isfinite(together[1]).all()


@every_kind
def test_distributions_are_pytrees_of_arrays_with_their_batch_axes(kind):
    policy, other = made(kind), made(kind, 1)
    leaves, structure = jax.tree.flatten(policy)
    assert all(isinstance(leaf, jax.Array) and leaf.shape[0] == BATCH for leaf in leaves)
    assert type(policy) is getattr(distributions, kind)
    action = policy.mode()
    expected = log_prob(policy, action), divergence(policy, other)

    def both(x, y, action):
        return x.log_prob(action), x.kl_divergence(y)

    @jax.jit
    def run(leaves, other, action):
        policy = jax.tree.unflatten(structure, leaves)

        def step(carry, row):  # it is both the carry and what is scanned over
            return carry, (jax.checkpoint(lambda x, a: x.log_prob(a))(*row), carry.mode())

        return jax.vmap(both)(policy, other, action), jax.lax.scan(step, policy, (policy, action))

    mapped, (same, (log_probs, modes)) = run(leaves, other, action)
    common.assert_close(mapped, expected)
    np.testing.assert_allclose(log_probs, expected[0], rtol=1e-6, atol=1e-6)
    common.assert_close(jax.tree.map(lambda x: x[-1], modes), action)
    assert jax.tree.structure(same) == structure


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Beta"])  # Beta is compared with formulas
def test_divergence_and_entropy_are_means_over_samples(kind):
    first, second = made(kind), made(kind, 1)

    @jax.jit
    def of_samples(first, second):
        action, log_prob = first.sample_and_log_prob(seed=KEY, sample_shape=(20_000,))
        return {"kl_divergence": log_prob - second.log_prob(action), "entropy": -log_prob}

    exact = numbers(first, second, first.mode())
    for name, each in of_samples(first, second).items():
        each = np.asarray(each, np.float64)
        near = np.abs(exact.get(name, np.nan) - each.mean(axis=0)) < 5 * each.std(axis=0) / np.sqrt(len(each)) + 1e-5
        assert near.all() or (kind, name) == ("TanhNormal", "entropy")
    assert np.all(exact["kl_divergence"] > 0.01)
    np.testing.assert_allclose(divergence(first, first), 0, atol=1e-6)


def test_modes_of_discrete_and_normal_actions_and_choices_that_are_independent():
    logits = [jnp.array([0.0, 1.0]), jnp.array([0.5, -jnp.inf, 2.0])]
    assert MultiCategorical(logits).mode().tolist() == [1, 2]
    np.testing.assert_allclose(Categorical(logits[1]).probs, scipy.special.softmax(logits[1]), rtol=1e-6)
    assert Normal(jnp.array([1e3, -2.0]), jnp.ones(2)).mode().tolist() == [1e3, -2.0]
    drawn = sample(MultiCategorical([jnp.zeros(2)] * 2), (10_000,))
    assert np.mean(drawn[:, 0] == drawn[:, 1]) == pytest.approx(0.5, abs=0.02)


TINY, HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max
BETA_EXTREMES = [(x, y) for x in (TINY, 1e-6, 1.0, 1e9, HUGE) for y in (TINY, 1e-6, 1.0, 1e9, HUGE)]
EXTREME = {
    "Normal": (Normal, (jnp.array([1e6, -1e6, 0.0]), jnp.array([1e-6, 1e6, 1.0]))),
    "StateDependentNormal":
        (lambda loc, std: StateDependentNormal(loc, jnp.array([0.0, 1e3]), std),
         (jnp.array([1e6, -1e6, 0.0]), jnp.array([[0.0, 1e6, 1.0], [1e-6, 0.0, 1e6]]))),
    "TanhNormal": (lambda *x: TanhNormal(Normal(*x)), (jnp.array([1e4, -1e4, 6.0]), jnp.array([0.05, 20.0, 1e-3]))),
    "Beta": (Beta, tuple(jnp.array(x) for x in zip(*BETA_EXTREMES, strict=True))),
    "Categorical": (Categorical, (jnp.array([1e30, -1e30, 0.0, -jnp.inf, np.finfo(np.float32).min]),)),
    "MultiCategorical": (lambda *logits: MultiCategorical(logits), (jnp.array([1e30, -1e30]), jnp.array([0.0, 1e9]))),
    "Joint": (lambda logits, loc: Joint((Categorical(logits), Normal(loc, 1e-6))),
              (jnp.array([1e30, -1e30]), jnp.array([1e6]))),
}  # fmt: skip


@every_kind
def test_gradients_at_extreme_parameters_are_finite(kind):
    make, params = EXTREME[kind]

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def derivatives(params):
        policy, here = make(*params), make(*jax.lax.stop_gradient(params))
        numbers = [policy.log_prob(policy.sample(seed=KEY)), policy.kl_divergence(here), here.kl_divergence(policy)]
        numbers = jnp.stack(numbers if "Tanh" in kind else [*numbers, policy.entropy()])
        return jnp.sum(numbers), numbers

    for found in jax.tree.leaves(derivatives(params)):
        assert np.isfinite(found).all()


def test_curvature_of_the_divergence_is_the_fisher_information_of_beta():
    information = jax.hessian(lambda alpha: Beta(jnp.array([1.5]), 2.0).kl_divergence(Beta(alpha[None], 2.0)))(1.5)
    np.testing.assert_allclose(information, -np.diff(scipy.special.polygamma(1, [1.5, 3.5]))[0], rtol=1e-5)


ONE, FLOAT8 = jnp.full((3, 2), 0.5), jnp.ones((3, 2), jnp.float8_e4m3fn)
NOT_REAL = [None, "x", [0.5, 0.5], ONE + 1j, np.full((3, 2), "x"), FLOAT8]
GSDE = {"loc": ONE, "features": jnp.ones((3, 4)), "std": jnp.ones((4, 2))}
BOX = {"low": -1, "high": 1}
FLOATING_AND_REAL = {
    "Normal": ({"loc": ONE}, {"scale": 1}), "StateDependentNormal": (GSDE, {}),
    "TanhNormal": ({"base": Normal(ONE, 1)}, {"eps": 0, **BOX}),
    "Beta": ({"alpha": ONE}, {"beta": 1, **BOX}), "Categorical": ({"logits": ONE}, {}),
    "MultiCategorical": ({"logits": ONE}, {}), "mask_logits": ({"logits": ONE}, {"available": np.ones((3, 2), int)}),
}  # fmt: skip


@pytest.mark.parametrize("kind", FLOATING_AND_REAL)
def test_parameters_are_checked_on_entry(kind):
    floating, real = FLOATING_AND_REAL[kind]
    make = functools.partial(getattr(distributions, kind), **({"nvec": (2,)} if kind == "MultiCategorical" else {}))
    make(**floating, **real)
    cases = [(name, x) for name in (*floating, *real) for x in NOT_REAL]
    cases += [(name, x) for name in floating for x in (np.ones((3, 2), int), ONE > 0)]
    for name, x in cases:
        with pytest.raises(pp.errors.UserTypeError, match=f": {name} must") as caught:
            make(**{**floating, **real, name: x})
        assert caught.value.argument == name


@every_kind
def test_arguments_of_methods_are_checked_on_entry(kind):
    policy, good = made(kind), made(kind).mode()
    for x in NOT_REAL:
        with pytest.raises(pp.errors.UserTypeError, match=f"{kind}: value must"):
            policy.log_prob(x)
    for cut in (lambda x: x[:1], lambda x: x[..., None] if x.ndim == 1 else x[..., :1]):
        action, name = jax.tree.map(cut, good), "Categorical" if kind == "Joint" else kind  # of the first part
        remedy = r": drop the trailing axis of size 1" if kind == "Categorical" and action.ndim > 1 else ""
        with pytest.raises(pp.errors.ShapeError, match=f"{name}: .*nothing is broadcast{remedy}"):
            policy.log_prob(action)
    wrong = [(0, (), "seed"), (None, (), "seed"), (KEY, 3, "sample_shape"), (KEY, (1.5,), "sample_shape")]
    for seed, shape, name in wrong:
        with pytest.raises(pp.errors.UserTypeError, match=f"{kind}: {name} must"):
            policy.sample(seed=seed, sample_shape=shape)
    other = next(x for x in ("Normal", "Categorical") if x != kind)
    with pytest.raises(TypeError, match=rf"{kind}.kl_divergence: the other distribution must be a {kind}, .* {other}"):
        policy.kl_divergence(made(other))
    with pytest.raises(pp.errors.ShapeError, match="nothing is broadcast"):
        policy.kl_divergence(jax.tree.map(lambda x: x[:1], policy))
    if "Tanh" in kind:
        with pytest.raises(NotImplementedError, match="no entropy in closed form"):
            policy.entropy()


class Mine:
    log_prob = 3

    def sample(self): ...


class Sampled:
    def log_prob(self, value): ...

    def sample(self, *, seed): ...


WIDE, HALF = jnp.ones((4, 3)), jnp.ones(1, jnp.bfloat16)
GSDE_SHAPES = ((5, 2), (5, 3), (3, 1)), ((5, 2), (4, 3), (3, 2)), ((5, 2), (3,), (3, 2))
SHAPES = r"must have the shape of (loc|alpha), \(3,\) or \(\)"
BOXES = {"low": 1.0, "high": 1.0}, {"low": -jnp.inf, "high": jnp.inf}
needs = functools.partial(check_distribution, "rollout", Mine())
test_distributions_say_what_is_wrong = common.refused(
    (lambda: Normal(jnp.zeros(()), 1.0), "Normal: loc is a single number"),
    (lambda: Beta(jnp.ones(()), 1.0), "Beta: alpha is a single number"),
    *((lambda make=make, size=size: make(WIDE, jnp.ones(size)), SHAPES)
      for make in (Normal, Beta) for size in ((4,), (4, 1), (1, 3))),
    (lambda: Beta(WIDE, WIDE, jnp.zeros(2)), "low must have the shape of alpha"),
    *((lambda box=box: Beta(WIDE, WIDE, **box), "the box must be finite, with low < high") for box in BOXES),
    (lambda: TanhNormal(Normal(WIDE, 1.0), **BOXES[0]), "TanhNormal: the box must be finite"),
    (lambda: Beta(HALF, HALF, 100.0, 101.0), "Beta: bfloat16 cannot resolve the box"),
    (lambda: Beta(WIDE.astype("float16"), 1.0, -1e5, 1e5), "Beta: float16 cannot resolve the box"),
    *((lambda x=x: Normal(WIDE, x), f"Normal: scale must be greater than 0, got {x}") for x in (-1.0, 0.0)),
    (lambda: Beta(WIDE, -WIDE), "Beta: beta must be greater than 0, got -1"),
    (lambda: Beta(0 * WIDE, WIDE), "Beta: alpha must be greater than 0, got 0"),
    (lambda: StateDependentNormal(WIDE, WIDE, -WIDE[:3]), "std must be at least 0, got -1"),
    *((lambda x=x: TanhNormal(Normal(WIDE, 1.0), eps=x), rf"eps must lie in \[0, 0.99.*{x}") for x in (1.0, np.nan)),
    (lambda: TanhNormal(Normal(WIDE, 1.0), eps=0 * WIDE), "eps must be one number, got an array of shape"),
    *((lambda x=x: StateDependentNormal(*map(jnp.zeros, x)), r"loc must be \[..., D\], features") for x in GSDE_SHAPES),
    *((lambda x=x: Categorical(jnp.zeros(x)), "the last axis of logits must be that of the actions")
      for x in ((), (3, 0))),
    (lambda: MultiCategorical(WIDE), "(?s)one array of shape .* give nvec"),
    (lambda: MultiCategorical(WIDE, nvec=(4, -1)), "nvec must contain integers"),
    (lambda: MultiCategorical(WIDE, nvec=(2, 4)), r"sum\(nvec\) = 6 entries for nvec=\(2, 4\), got shape \(4, 3\)"),
    (lambda: MultiCategorical([]), "no arrays"),
    (lambda: MultiCategorical([jnp.zeros((4, 2)), jnp.zeros((5, 2))]), r"axes but the last, got \(4, 2\), \(5, 2\)"),
    (lambda: Joint({}), "parts must be a dict or a tuple of distributions, got {}"),
    *((lambda x=x: Joint({"a": x}), "Joint: a distribution needs log_prob") for x in ("logits", None)),
    (lambda: Joint({"a": {}}), "parts must be a dict or a tuple of distributions"),
    (lambda: needs(("log_prob",)), r"needs log_prob\(value\), but Mine has no log_prob: use one of ppo_parts.distr"),
    (lambda: needs(("mode",)), r"rollout: a distribution needs mode\(\), but Mine has no mode"),
    (lambda: needs(("sample",)), r"sample of Mine must take \(seed=\.\.\.\); this one takes \(\)"),
    (lambda: Joint((Sampled(),)).mode(), r"Joint: a distribution needs mode\(\), but Sampled has no mode"),
    (lambda: Joint((Sampled(),)).kl_divergence(Joint((Sampled(),))), r"needs kl_divergence\(other\), but Sampled has"),
    (lambda: made("Joint").log_prob({"move": 0}), "value must have an entry for each part of .*rest.*, got .*'move'"),
    (lambda: Joint((Normal(ONE, 1.0), Categorical(ONE[:1]))).entropy(), r"same batch axes, .* \(3,\), \(1,\)"),
    (lambda: Joint({"a": Normal(ONE, 1)}).kl_divergence(Joint({"b": Normal(ONE, 1)})), "have the parts .*a.*got .*b"),
    *((lambda kind=kind: made(kind).kl_divergence(jax.tree.map(lambda x: x + 1, made(kind))),
       rf"(?s){kind}.kl_divergence: the two must have the same box, got low=.* and low=")
      for kind in ("Beta", "TanhNormal")),
    (lambda: distributions.mask_logits(jnp.zeros(4), jnp.ones((1, 4))), "mask_logits: logits have shape"),
)  # fmt: skip


def test_tanh_normal_is_the_transformed_gaussian_and_its_edge_begins_at_half_of_eps():
    loc, log_std = jnp.array([0.3, -0.2]), jnp.array([-0.5, 0.1])
    policy = squashed(loc, log_std)
    action = sample(policy, (7,))
    middle = np.asarray(HIGH + LOW, np.float64) / 2
    x = (np.asarray(action, np.float64) - middle) / (WIDTH / 2)
    density = scipy.stats.norm(loc, np.exp(log_std)).logpdf(np.arctanh(x)) - np.log(WIDTH / 2 * (1 - x**2))
    np.testing.assert_allclose(log_prob(policy, action), density.sum(-1), rtol=1e-4)
    np.testing.assert_allclose(policy.mode(), middle + WIDTH / 2 * np.tanh(loc), rtol=1e-6)
    # Samples are at most 1 - eps, or 1, so an action that rounding has moved is still distinguished from the edge.
    policy, far = TanhNormal(Normal(jnp.zeros(1), jnp.ones(1)), eps=0.1), 0.9
    u = np.arctanh(far)
    inside, at_edge = scipy.stats.norm.logpdf(u) - np.log(1 - far**2), scipy.stats.norm.logcdf(-u)
    for x, expected in ((0.9, inside), (0.949, inside), (0.951, at_edge), (1.0, at_edge)):
        for action in (x, -x):
            assert float(log_prob(policy, jnp.array([action]))) == pytest.approx(expected, rel=1e-5)


def test_tanh_normal_has_at_an_edge_all_that_is_beyond_and_is_finite_there():
    """With a mean far outside, most samples are the edge itself; the inside and the edge have total probability 1."""
    policy = TanhNormal(Normal(jnp.array([7.0]), jnp.array([0.5])), -1.0, 3.0)
    at_edge = np.exp(float(log_prob(policy, jnp.array([3.0]))))
    assert np.mean(np.asarray(sample(policy, (20_000,))) == 3.0) == pytest.approx(at_edge, abs=0.01)
    assert 0.2 < at_edge < 0.4
    u = np.linspace(4, np.arctanh(1 - 1e-6), 20_001, dtype=np.float64)[:-1]  # the inside, on a fine enough grid
    action = 1 + 2 * np.tanh(u)
    inside = np.trapezoid(np.exp(np.asarray(log_prob(policy, jnp.asarray(action, jnp.float32)[:, None]))), action)
    assert inside + at_edge == pytest.approx(1.0, abs=0.02)
    measure = jax.jit(jax.value_and_grad(lambda loc, action: squashed(loc, jnp.zeros(2)).log_prob(action)))
    for action in (HIGH, LOW):
        value, gradient = measure(jnp.zeros(2), action)
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()
        assert np.all(gradient[:2] * np.sign(np.asarray(action) - 0.5) > 0)
    for far in (20.0, 1e4):  # ratios remain moderate
        before, after = (squashed(jnp.full(2, x * far), jnp.full(2, -3.0)) for x in (1.0, 1.1))
        drawn = sample(before, (100,))
        assert np.all(drawn == HIGH[None])
        np.testing.assert_allclose(log_prob(after, drawn) - log_prob(before, drawn), 0, atol=1e-6)
    low = jnp.linspace(-20, 20, 300)
    for width in (0.1, 0.6, 2.0):  # these boxes are narrow and far from 0
        for far, edge in ((50.0, low + width), (-50.0, low)):
            policy = TanhNormal(Normal(jnp.full(300, far), jnp.ones(300)), low, low + width)
            np.testing.assert_array_equal(policy.mode(), edge)  # it is not rounded to beyond the edge
            np.testing.assert_allclose(log_prob(policy, policy.mode()), 0, atol=1e-5)


RANGES = {"usual": (0.3, 20.0), "narrow": (1e3, 1e5), "at_the_edges": (1e-3, 0.5)}


def betas(which, seed):
    """Return alpha and beta of 80 two-dimensional distributions, in float64, with values that float32 can represent."""
    low, high = np.log(RANGES[which])
    return np.exp(np.random.default_rng(seed).uniform(low, high, size=(2, 80, 2))).astype(np.float32).astype(np.float64)


def beta_tells(own, other, actions):
    one, second = Beta(*own, LOW, HIGH), Beta(*other, LOW, HIGH)
    return one.log_prob(actions), one.entropy(), one.kl_divergence(second), second.kl_divergence(one)


def formulas_tell(own, other, actions):
    """Compute the same by the formulas as they are written, which lose many digits."""
    betaln, digamma, width = jax.scipy.special.betaln, jax.scipy.special.digamma, HIGH - LOW

    def divergence(a, b, other_a, other_b):
        total = betaln(other_a, other_b) - betaln(a, b) + (a - other_a) * digamma(a) + (b - other_b) * digamma(b)
        return (total + (other_a - a + other_b - b) * digamma(a + b)).sum(-1)

    x, (a, b) = jnp.clip((actions - LOW) / width, 1e-6, 1 - 1e-6), own
    log_prob = ((a - 1) * jnp.log(x) + (b - 1) * jnp.log1p(-x) - betaln(a, b) - jnp.log(width)).sum(-1)
    entropy = betaln(a, b) - (a - 1) * digamma(a) - (b - 1) * digamma(b) + (a + b - 2) * digamma(a + b)
    return log_prob, (entropy + jnp.log(width)).sum(-1), divergence(*own, *other), divergence(*other, *own)


@functools.partial(jax.jit, static_argnums=0)
def with_slopes(tells, own, *given):
    numbers = tells(own, *given)
    return numbers, [jax.grad(lambda x, i=i: tells(x, *given)[i].sum())(own) for i in range(len(numbers))]


@pytest.mark.lenient_ranks
@pytest.mark.parametrize("which", RANGES)
def test_beta_and_its_gradients_are_those_of_formulas_in_float64(which):
    own, other = betas(which, 0), betas(which, 1)
    narrow = [x.astype(np.float32) for x in (own, other)]
    drawn = sample(Beta(*narrow[0], LOW, HIGH), (500,))
    other_ones = LOW + WIDTH * np.random.default_rng(1).uniform(size=(1, 80, 2))
    actions = np.concatenate([drawn[:20], other_ones.astype(np.float32)])
    found, slopes = with_slopes(beta_tells, *narrow, actions)
    with jax.enable_x64(True):
        expected, true = with_slopes(formulas_tell, own, other, actions.astype(np.float64))
    for ours, theirs, atol in zip(found, expected, (2e-4, 1e-5, 1e-5, 1e-5), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=atol)
    for ours, theirs in zip(slopes, true, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    x, (a, b) = (np.asarray(drawn, np.float64) - np.asarray(LOW)) / WIDTH, own
    mean, deviation = a / (a + b), np.sqrt(a * b / (a + b + 1)) / (a + b)
    assert np.all(np.abs(x.mean(0) - mean) < 5 * deviation / np.sqrt(len(x)) + 1e-5)
    if which != "at_the_edges":  # there, a few samples have most of the variance
        np.testing.assert_allclose(x.std(0) / deviation, 1, atol=0.25)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", [lambda x, *box: TanhNormal(Normal(x, 1.0), *box), lambda x, *box: Beta(x, x, *box)])
def test_an_action_outside_of_the_box_by_more_than_rounding_is_nan(kind, dtype):
    measure = jax.jit(lambda low, high, action: kind(jnp.ones(1, dtype), low, high).log_prob(action))
    for low, high in ((-1.0, 1.0), (100.0, 110.0)):
        for edge, outside in ((low, 2 * low - high), (high, 2 * high - low)):
            for stored in (dtype, jnp.bfloat16):  # storing an action may round it to beyond an edge
                assert np.isfinite(measure(low / 3, high / 3, jnp.array([edge / 3], stored)))
            assert np.isnan(measure(low, high, jnp.array([outside], dtype)))


def test_samples_of_beta_have_reparameterized_gradients():
    """Their mean is the derivative of the mean, which is 2 alpha / (alpha + beta) - 1 in the box [-1, 1]."""
    a, b = np.array([0.5, 2.0, 30.0]), np.array([0.8, 5.0, 10.0])

    mean = lambda alpha, beta: Beta(alpha, beta).sample(seed=KEY, sample_shape=(10_000,)).mean(0).sum()  # noqa: E731
    found = jax.jit(jax.grad(mean, argnums=(0, 1)))(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    np.testing.assert_allclose(found, np.array([2 * b, -2 * a]) / (a + b) ** 2, rtol=0.05)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_samples_of_beta_are_in_the_box_and_have_the_density_of_where_they_are(dtype):
    alpha, beta = (jnp.array([1e-4, 1e-4, 1e6, 1.0], dtype), jnp.array([1e-4, 1e6, 1e-4, 1.0], dtype))
    policy = Beta(alpha, beta, -0.1, 0.3)
    action, log_probs = jax.jit(lambda x: x.sample_and_log_prob(seed=KEY, sample_shape=(1_000,)))(policy)
    low, high = jnp.asarray(-0.1, dtype), jnp.asarray(0.3, dtype)
    assert np.all((action >= low) & (action <= high))
    assert np.isfinite(log_probs).all()
    if dtype == jnp.float32:
        assert np.all((action > low) & (action < high))
    assert set(np.asarray(action[:, 0] > 0.1)) == {False, True}


def test_beta_has_a_mode_no_negative_divergence_and_no_density_for_a_negative_alpha():
    alpha, beta = jnp.array([2.0, 30.0, 1.0, 0.5, 3.0, 1.0]), jnp.array([4.0, 11.0, 1.0, 0.5, 0.5, 4.0])
    policy = Beta(alpha, beta, 0.0, 1.0)
    np.testing.assert_allclose(policy.mode(), [1 / 4, 29 / 39, 1 / 2, 1 / 2, 6 / 7, 1 / 5], rtol=1e-6)
    for gradient in jax.tree.leaves(jax.grad(lambda p: p.mode().sum())(policy)):
        assert np.isfinite(gradient).all()
    alpha, beta, other_alpha, other_beta = (x.reshape(-1, 1) for x in jnp.meshgrid(*[jnp.logspace(-6, 9, 12)] * 4))
    assert jnp.min(divergence(Beta(alpha, beta), Beta(other_alpha, other_beta))) >= 0
    density = jax.jit(lambda alpha: Beta(alpha, jnp.ones(1)).log_prob(jnp.zeros(1)))  # known numbers would be refused
    assert np.isnan(density(-jnp.ones(1)))


def test_divergences_of_neighbours_keep_their_digits_and_those_from_another_box_are_infinite():
    """After a gradient step they are 1e-8, too small for float32 near 1; log-gammas of a narrow Beta are about 1000."""
    first, second = np.float32(1.0), np.float32(1.0001)
    r = np.float64(first) / np.float64(second)
    of_normals = Normal(jnp.zeros(1), first).kl_divergence(Normal(jnp.zeros(1), second))
    assert float(of_normals) == pytest.approx(0.5 * (r**2 - 1) - np.log(r), rel=0.01)
    alpha, beta = (np.float32(x) * np.array([1.5, 20, 1e3], np.float32) for x in (1.0, 1.3))
    other_alpha, other_beta = alpha * np.float32(1 + 2e-4), beta * np.float32(1 - 1e-4)
    ours = divergence(Beta(alpha[:, None], beta[:, None]), Beta(other_alpha[:, None], other_beta[:, None]))
    a, b = alpha.astype(np.float64), beta.astype(np.float64)
    da, db, trigamma = other_alpha - a, other_beta - b, functools.partial(scipy.special.polygamma, 1)
    expected = 0.5 * (trigamma(a) * da**2 + trigamma(b) * db**2 - trigamma(a + b) * (da + db) ** 2)
    np.testing.assert_allclose(ours, expected, rtol=0.02, atol=8e-9)
    for kind in ("TanhNormal", "Beta"):
        one = made(kind)
        assert jnp.all(divergence(one, jax.tree.map(lambda x: x + 1, one)) == jnp.inf)


def test_representations_have_the_shapes_of_nested_parameters():
    inner = "Normal(loc=(3, 2), scale=(3, 2))"
    assert repr(TanhNormal(Normal(ONE, 1.0))) == f"TanhNormal(base={inner}, low=(3, 2), high=(3, 2), eps=(3, 2))"
    assert repr(Joint({"a": (Normal(ONE, 1.0),)})) == f"Joint(parts={{'a': ({inner},)}})"


def test_a_joint_does_not_change_with_its_dict_and_names_the_part_without_entropy():
    parts = {"a": {"b": Normal(ONE, 1.0)}}
    policy = Joint(parts)
    parts["a"]["c"] = Normal(ONE, 1.0)
    assert len(policy.leaves) == 1
    with pytest.raises(NotImplementedError, match=r"Sampled has no entropy; .*estimates it"):
        Joint((Sampled(),)).entropy()


def test_masked_logits_take_no_part():
    available, logits = jnp.array([1, 0, 1, 0]), jnp.array([0.5, 9.0, -0.5, 3.0])

    def policy(logits):
        return Categorical(distributions.mask_logits(logits, available))

    np.testing.assert_array_equal(policy(logits).probs * (1 - available), 0)
    np.testing.assert_allclose(policy(logits).entropy(), Categorical(logits[::2]).entropy(), rtol=1e-6)
    gradients = jax.jit(jax.jacrev(lambda x: (policy(x).entropy(), policy(x).log_prob(2))))(logits)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient * (1 - available), 0)
        assert np.abs(gradient).max() > 0
    assert distributions.mask_logits(3, True) == 3
    masked = jax.jit(lambda mask: distributions.mask_logits(logits, mask))
    assert np.isnan(masked(jnp.array([0.0, -jnp.inf, 0.0, 1.0]))).tolist() == [False, True, False, False]
    assert np.isfinite(masked(jnp.array([0, 255, 1, 1], jnp.uint8))).all()  # masked steps may hold anything
    with jax.numpy_dtype_promotion("strict"):
        for dtype in (bool, jnp.int8, jnp.float32):
            np.testing.assert_array_equal(masked(available.astype(dtype)), masked(available))


def test_a_number_that_is_not_an_action_has_no_probability_whatever_its_dtype():
    for action in (0.5, -1, 3):
        assert np.isnan(jax.jit(Categorical(jnp.zeros(3)).log_prob)(action))
        with pytest.raises(ValueError, match=rf"an action must be one of 0, ..., 2, got {action}$"):
            Categorical(jnp.zeros(3)).log_prob(jnp.array(action))
    assert Categorical(jnp.zeros(3)).log_prob(jnp.array(2.0)) == Categorical(jnp.zeros(3)).log_prob(2)
    policy = Categorical(jnp.zeros((4, 513)))  # these are more than int8 can name
    found = log_prob(policy, jnp.array([0, 5, 127, -1], jnp.int8))
    np.testing.assert_allclose(found, [*np.full(3, -np.log(513.0)), np.nan], rtol=1e-6)
    with jax.numpy_dtype_promotion("strict"):
        Categorical(jnp.zeros((4, 3))).log_prob(jnp.zeros(4, jnp.uint8))


@pytest.mark.lenient_ranks  # distrax
def test_microbatch_refuses_a_distribution_that_hides_arrays_and_auto_leaves_it_whole():
    distrax = pytest.importorskip("distrax")
    params = {**common.make_params(), "log_std": jnp.zeros(2)}

    def traced(make, microbatch, shape=(common.TIME, common.SEGMENTS)):
        def policy(params, batch):
            head = batch.obs @ params["policy"]
            return make(head, jnp.broadcast_to(jnp.exp(params["log_std"]), head.shape)), batch.obs @ params["value"]

        batch = common.rollout(masked=False, shape=shape)
        batch = batch.replace(action=jnp.tanh(batch.obs[..., :2]), log_prob=jnp.zeros(shape))
        parts = pp.gae(gamma=0.9, gae_lambda=0.9), pp.full_batch(), pp.clipped_surrogate(clip_eps=0.2), pp.value_loss()
        policy = pp.microbatched(policy, microbatch)
        learner = pp.learner(policy, pp.chain(*parts, pp.entropy_bonus(coef=0.1)), optax.sgd(0.1))
        jax.eval_shape(learner.update, KEY, learner.init(params), batch)

    says = r"MultivariateNormalDiag keeps arrays outside the leaves.*use one of ppo_parts.distributions"
    with pytest.raises(TypeError, match=says):
        traced(distrax.MultivariateNormalDiag, 6)
    traced(distrax.MultivariateNormalDiag, "auto", (128, 128))  # from this size on, "auto" takes pieces
    traced(Normal, 6)


def test_gsde_is_that_of_stable_baselines3(monkeypatch):
    # StateDependentNoiseDistribution(2, learn_features=False, epsilon=1e-6, squash_output=...) of 2.9.2, in float64.
    std = jnp.exp(jnp.array([[-1.0, 0.5], [0.0, -0.5], [0.25, 1.0]]))
    loc, features = jnp.array([[0.1, -0.2], [1.0, 0.0]]), jnp.array([[0.5, -1.0, 0.25], [2.0, 0.0, -0.75]])
    plain = StateDependentNormal(loc, features, std)
    np.testing.assert_allclose(plain.entropy(), [3.1078328762841476, 4.385088732166956], rtol=1e-6)
    inside = np.array([[0.5, 0.75], [-0.9, 0.3]])
    # That class adds 1e-6 to the slope of tanh, 1 - a^2, which is undone here.
    squashed = np.array([-1.538052973435159, -3.7138797325069266]) + np.log1p(1e-6 / (1 - inside**2)).sum(axis=-1)
    theta = jnp.broadcast_to(jnp.array([[0.3, -1.0], [1.2, 0.4], [-0.7, 0.9]]), (2, 3, 2))
    monkeypatch.setattr(jax.random, "normal", lambda *_: theta)
    drawn = [[-1.2695225317446384, -0.6553594878318323], [1.8948410084639296, -5.132282775610112]]
    for policy, action, expected, sample in (
        (plain, [[0.5, 1.0], [-2.0, 0.3]], [-2.6552537054240153, -6.45191712618385], drawn),
        (TanhNormal(plain), inside, squashed, np.tanh(drawn)),
    ):
        np.testing.assert_allclose(policy.log_prob(jnp.array(action, jnp.float32)), expected, rtol=1e-6)
        np.testing.assert_allclose(policy.sample(seed=KEY), sample, rtol=1e-6)


def test_gsde_from_the_network_trains_the_deviation_and_not_the_features():
    policy = networks.actor_critic(envs.make("Pendulum-v1"), (4,), log_std=-1.0, squash=True, gsde=True)
    params, batch = jax.jit(policy.init)(jax.random.key(0)), pp.Batch(obs=jnp.ones((6, 3)))
    distribution = jax.jit(policy.evaluate)(params, batch).distribution
    assert isinstance(distribution, TanhNormal)
    u = distribution.base.sample(seed=jax.random.key(1))
    np.testing.assert_allclose(distribution.sample(seed=jax.random.key(1)), 2 * np.tanh(u), rtol=1e-6)  # in [-2, 2]
    scale = np.sqrt(np.square(np.asarray(distribution.base.features) * np.exp(-1)).sum(axis=-1) + 1e-6)
    np.testing.assert_allclose(distribution.base.scale[:, 0], scale, rtol=1e-5)
    assert params["params"]["log_std"].shape == (4, 1)
    slope = jax.jit(jax.grad(lambda p: jnp.sum(policy(p, batch).distribution.base.entropy())))(params)["params"]
    assert np.all(np.asarray(slope["log_std"]) > 0)
    assert all(not np.any(leaf) for name, layer in slope.items() if name != "log_std" for leaf in layer.values())
