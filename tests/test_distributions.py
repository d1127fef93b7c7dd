"""The distributions that distrax leaves to the user."""

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppo_parts import distributions

pytestmark = pytest.mark.lenient_ranks  # bounds [D] against actions [..., D], as in distrax
LOW, HIGH = jnp.array([-2.0, 0.0]), jnp.array([2.0, 1.0])


def squashed(loc, log_std):
    return distributions.TanhNormal(loc, jnp.exp(log_std), LOW, HIGH)


def test_tanh_normal_is_the_transformed_gaussian():
    loc, log_std = jnp.array([0.3, -0.2]), jnp.array([-0.5, 0.1])
    policy = squashed(loc, log_std)
    action = policy.sample(seed=jax.random.key(0), sample_shape=(7,))
    half, middle = (HIGH - LOW) / 2, (HIGH + LOW) / 2
    box = distrax.Chain([distrax.ScalarAffine(middle, half), distrax.Tanh()])
    reference = distrax.Transformed(distrax.MultivariateNormalDiag(loc, jnp.exp(log_std)), distrax.Block(box, ndims=1))
    assert policy.log_prob(action).shape == (7,)
    np.testing.assert_allclose(policy.log_prob(action), reference.log_prob(action), rtol=1e-4)
    np.testing.assert_allclose(policy.mode(), middle + half * np.tanh(loc), rtol=1e-6)


def test_tanh_normal_integrates_to_one():
    policy = distributions.TanhNormal(jnp.array([0.4]), jnp.array([0.6]), -1.0, 3.0)
    grid = np.linspace(-1, 3, 20_001, dtype=np.float32)[1:-1, None]
    assert float(jnp.sum(jnp.exp(policy.log_prob(grid))) * 4 / 20_000) == pytest.approx(1.0, abs=1e-3)


def test_tanh_normal_has_the_probability_of_all_that_is_beyond_at_an_edge():
    """A mean far outside: most samples are the edge itself, and inside and edge together have probability 1."""
    policy = distributions.TanhNormal(jnp.array([7.0]), jnp.array([0.5]), -1.0, 3.0)
    sample = policy.sample(seed=jax.random.key(0), sample_shape=(20_000,))
    at_edge = np.exp(float(policy.log_prob(jnp.array([3.0]))))
    assert np.mean(np.asarray(sample) == 3.0) == pytest.approx(at_edge, abs=0.01)
    assert 0.2 < at_edge < 0.4
    u = np.linspace(4, np.arctanh(1 - 1e-6), 20_001, dtype=np.float64)[:-1]  # inside, on a grid fine enough up there
    action = 1 + 2 * np.tanh(u)
    inside = np.trapezoid(np.exp(np.asarray(policy.log_prob(jnp.asarray(action, jnp.float32)[:, None]))), action)
    assert inside + at_edge == pytest.approx(1.0, abs=0.02)


def test_tanh_normal_is_finite_at_the_edge_and_its_gradient_too():
    for action in (HIGH, LOW, HIGH + 1e-3):
        value, gradient = jax.value_and_grad(lambda loc, a=action: squashed(loc, jnp.zeros(2)).log_prob(a))(
            jnp.zeros(2)
        )
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()
        assert np.all(gradient[:2] * np.sign(np.asarray(action) - 0.5) > 0)


@pytest.mark.parametrize("far", [20.0, 1e4])
def test_tanh_normal_with_its_mean_far_outside_has_ratios_that_are_moderate(far):
    before, after = squashed(jnp.full(2, far), jnp.full(2, -3.0)), squashed(jnp.full(2, 1.1 * far), jnp.full(2, -3.2))
    sample = before.sample(seed=jax.random.key(0), sample_shape=(100,))
    assert np.all(sample == HIGH)
    np.testing.assert_allclose(after.log_prob(sample) - before.log_prob(sample), 0, atol=1e-6)


def test_tanh_normal_knows_the_edges_of_narrow_boxes_far_from_0():
    low = jnp.linspace(-20, 20, 300)
    for width in (0.1, 0.6, 2.0):
        policy = distributions.TanhNormal(jnp.full(300, 50.0), jnp.ones(300), low, low + width)
        np.testing.assert_allclose(policy.log_prob(policy.mode()), 0, atol=1e-5)


def test_tanh_normal_says_what_is_wrong():
    with pytest.raises(ValueError, match="low < high"):
        distributions.TanhNormal(jnp.zeros(1), jnp.ones(1), 1.0, 1.0)
    with pytest.raises(ValueError, match="finite"):
        distributions.TanhNormal(jnp.zeros(1), jnp.ones(1), -jnp.inf, jnp.inf)
    with pytest.raises(ValueError, match="nothing is broadcast"):
        distributions.TanhNormal(jnp.zeros((3, 1)), jnp.ones((3, 1))).log_prob(jnp.zeros(3))
    half = distributions.TanhNormal(jnp.zeros(1, jnp.bfloat16), jnp.ones(1, jnp.bfloat16))
    assert np.isfinite(half.log_prob(half.sample(seed=jax.random.key(0))))


def test_tanh_normal_has_no_closed_form_entropy():
    with pytest.raises(NotImplementedError):
        squashed(jnp.zeros(2), jnp.zeros(2)).entropy()


def test_multi_categorical_is_a_product():
    logits = [jnp.array([[0.0, 1.0]] * 5), jnp.array([[0.5, -1.0, 2.0]] * 5)]
    policy = distributions.MultiCategorical(logits)
    action = policy.sample(seed=jax.random.key(1))
    assert action.shape == (5, 2)
    parts = [distrax.Categorical(part) for part in logits]
    np.testing.assert_allclose(
        policy.log_prob(action), sum(p.log_prob(action[:, i]) for i, p in enumerate(parts)), rtol=1e-6
    )
    np.testing.assert_allclose(policy.entropy(), sum(p.entropy() for p in parts), rtol=1e-6)
    np.testing.assert_array_equal(policy.mode(), [[1, 2]] * 5)


def test_masked_logits_take_no_part():
    available = jnp.array([1, 0, 1, 0])
    logits = jnp.array([0.5, 9.0, -0.5, 3.0])

    def policy(logits):
        return distrax.Categorical(distributions.mask_logits(logits, available))

    np.testing.assert_array_equal(policy(logits).probs * (1 - available), 0)
    rest = distrax.Categorical(logits[::2])
    np.testing.assert_allclose(policy(logits).entropy(), rest.entropy(), rtol=1e-6)
    for f in (lambda x: policy(x).entropy(), lambda x: policy(x).log_prob(2)):
        gradient = jax.grad(f)(logits)
        np.testing.assert_array_equal(gradient * (1 - available), 0)
        assert np.abs(gradient).max() > 0
    with pytest.raises(ValueError, match="mask_logits"):
        distributions.mask_logits(logits, available[None])


def test_categorical_is_that_of_distrax_with_its_gradients():
    logits = jnp.array([[0.3, -1.0, 2.0], [0.0, 0.0, -jnp.inf]])
    action, key = jnp.array([2, 0]), jax.random.key(0)

    def measured(kind, logits):
        policy = kind(logits)
        return policy.log_prob(action) @ jnp.array([1.0, 3.0]) + policy.entropy() @ jnp.array([2.0, 5.0])

    ours, theirs = distributions.Categorical(logits), distrax.Categorical(logits)
    np.testing.assert_allclose(ours.log_prob(action), theirs.log_prob(action), rtol=1e-6)
    np.testing.assert_allclose(ours.entropy(), theirs.entropy(), rtol=1e-6)
    np.testing.assert_allclose(ours.probs, theirs.probs, rtol=1e-6)
    np.testing.assert_array_equal(ours.mode(), theirs.mode())
    gradient = jax.grad(lambda x: measured(distributions.Categorical, x))(logits)
    np.testing.assert_allclose(gradient[0], jax.grad(lambda x: measured(distrax.Categorical, x))(logits)[0], rtol=1e-5)
    assert np.isfinite(gradient).all()  # where an action is impossible, too
    sample = ours.sample(seed=key, sample_shape=(20_000,))
    assert sample.shape == (20_000, 2)
    np.testing.assert_allclose(np.mean(sample == 2, axis=0), ours.probs[:, 2], atol=0.015)


@pytest.mark.parametrize("action", [-1, 3])
def test_an_action_that_is_none_has_no_probability(action):
    assert np.isnan(distributions.Categorical(jnp.zeros(3)).log_prob(action))


def test_actions_have_the_shape_of_their_logits():
    with pytest.raises(ValueError, match=r"actions have shape \(4, 1\), their logits \(4, 3\)"):
        distributions.Categorical(jnp.zeros((4, 3))).log_prob(jnp.zeros((4, 1), int))


@pytest.mark.parametrize("kind", ["Categorical", "MultiCategorical", "TanhNormal"])
def test_distributions_are_pytrees(kind):
    made = {
        "Categorical": lambda: distributions.Categorical(jnp.arange(3.0)),
        "MultiCategorical": lambda: distributions.MultiCategorical([jnp.arange(3.0), jnp.zeros(2)]),
        "TanhNormal": lambda: squashed(jnp.zeros(2), jnp.zeros(2)),
    }[kind]
    policy = jax.jit(made)()
    assert type(policy) is getattr(distributions, kind)
    np.testing.assert_allclose(policy.log_prob(made().mode()), made().log_prob(made().mode()), rtol=1e-6)
