"""The losses, weights and advantages of the catalogue, with a table of references in NumPy. Those of
groups are in test_token_parity.py.

The examples of the docstrings are worked by hand. Everything is computed in float64, except where a check is about
float32.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import huber, log_softmax, ndtr

from ppo_parts import functional as f
from ppo_parts.functional import _value_losses
from tests.reference import gae as slow_gae

T, N = 5, 4
SUPPORT = np.array([-4.0, -1.0, 0.0, 1.5, 4.0])


# --- samples ----------------------------------------------------------------------------------------------------------

Arrays = Mapping[str, np.ndarray]
RNG = np.random.default_rng(2)
GRID = [-200.0, -80, -2, -0.3, -0.05, 0.03, 0.25, 1.5, 80, 200]  # some overflow float32; none is at a kink
LOG_RATIO, ADVANTAGE = np.meshgrid(GRID, [-2.0, -0.3, 0, 1.5])
PAIRS, RATIOS = {"log_ratio": LOG_RATIO, "advantage": ADVANTAGE}, {"log_ratio": LOG_RATIO}
ERRORS = np.meshgrid([-1e4, -2.1, -0.3, 0.02, 0.7, 3.2, 1e4], [-5.0, -0.1, 0.0, 2.6])  # both sides of every bound
VALUES = {"value": ERRORS[0], "target": ERRORS[1]}
THREE_VALUES = {name: RNG.normal(0, x, (20, 3)) for name, x in {"value": 1, "old_value": 1, "target": 2}.items()}
QUANTILES = {"quantiles": RNG.normal(size=(5, 4, 3)), "target": RNG.normal(size=(5, 4))}
QUANTILES["quantiles"][0] *= 1e4
LOGITS = {"logits": RNG.normal(size=(6, 4, len(SUPPORT))), "target": RNG.normal(size=(6, 4))}
LOGITS["logits"][0] *= 1e4
LOGITS["target"][:, 0] = [-9.0, -4.0, -1.0, 0.0, 1.5, 30.0]  # beyond the support, and at its atoms
OF_TOKENS = {"log_ratio": RNG.normal(0, 0.4, (T, N))}
TOKENS = OF_TOKENS | {"advantage": np.broadcast_to([1.5, -0.7, 0.0, 0.4], (T, N)).copy()}
WITH_LOG_PROB = OF_TOKENS | {"advantage": RNG.normal(size=(T, N)), "log_prob": -np.exp(RNG.normal(size=(T, N)))}
OUTCOMES = {"score": RNG.normal(size=N), "log_prob": RNG.normal(size=(T, N)), "reference_log_prob": np.zeros((T, N))}
STEPS = {name: 1.0 * (RNG.random((6, 4)) < 0.2) for name in ("terminated", "truncated")}
STEPS["reward"] = RNG.normal(size=(6, 4))


def means(name, shift=0.0):
    return {"mean": LOG_RATIO, name: LOG_RATIO[::-1] + shift}


# --- checks of an entry -----------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A function of the catalogue, `f(**inputs, **hyperparameters, mask=None)`."""

    function: Callable[..., Any]
    reference: Callable[..., np.ndarray]  # the same function in NumPy and float64, without a mask
    hyperparameters: Mapping[str, Any] = {}
    samples: Arrays = PAIRS
    wrt: tuple[str, ...] | None = None  # inputs with gradients (None: the first); others must not have any
    elementwise: bool = True  # each output depends only on the inputs at its place
    note: str = ""  # distinguishes several entries of one function

    @property
    def differentiable(self) -> tuple[str, ...]:
        return tuple(self.samples)[:1] if self.wrt is None else self.wrt

    @property
    def id(self) -> str:
        function = getattr(self.function, "func", self.function)
        return function.__name__ + (f"-{self.note}" if self.note else "")


def check_reference(entry: Entry) -> None:
    """Check that values equal the reference, and gradients equal its central differences."""
    samples = entry.samples
    expected, slopes = values_and_differences(entry, samples)
    with jax.enable_x64(True):
        actual, gradients = values_and_gradients(entry, samples, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)
    for name, gradient in gradients.items():
        slope, scale = slopes.get(name, 0 * gradient), np.abs(expected)  # differences have rounding errors
        scale = scale.reshape(scale.shape + (1,) * (slope.ndim - scale.ndim)) if entry.elementwise else scale.max()
        wrong = np.abs(gradient - slope) > (name in slopes) * (1e-5 * np.abs(slope) + 1e-8 * scale + 1e-8)
        assert not wrong.any(), f"{entry.id}: {name} {gradient[wrong]} instead of {slope[wrong]}"
    if entry.elementwise:  # in float32 nothing is NaN, and what float32 can hold is finite and right
        actual, gradients = values_and_gradients(entry, samples, np.float32)
        for name, true in {"value": expected, **slopes}.items():
            ours, held = {"value": actual, **gradients}[name], np.abs(true) < np.finfo(np.float32).max
            assert not np.isnan(ours).any(), f"{entry.id}: {name} is NaN"
            np.testing.assert_allclose(ours[held], true[held], rtol=1e-3, atol=1e-5, err_msg=f"{entry.id}: {name}")


def weights(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape)


def values_and_gradients(entry: Entry, samples: Arrays, dtype: Any) -> Any:
    """Return the output, and the gradient of its weighted sum with respect to every input."""
    given = {name: jnp.asarray(x, dtype) for name, x in samples.items()}

    def total(given: Any) -> Any:
        output = entry.function(**given, **entry.hyperparameters)
        return jnp.sum(output * jnp.asarray(weights(output.shape), dtype)), output

    gradient, output = jax.jit(jax.grad(total, has_aux=True))(given)
    return np.asarray(output), {name: np.asarray(x) for name, x in gradient.items()}


def values_and_differences(entry: Entry, samples: Arrays, h: float = 1e-6) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the reference's values, and the central differences of their weighted sum, one place at a time."""
    values = entry.reference(**samples, **entry.hyperparameters)
    slopes = {name: np.zeros_like(samples[name]) for name in entry.differentiable}
    for name, slope in slopes.items():
        for place in np.ndindex(slope.shape):
            step = np.zeros_like(slope)
            step[place] = h
            up, down = ({**samples, name: samples[name] + x} | entry.hyperparameters for x in (step, -step))
            slope[place] = np.sum(weights(values.shape) * (entry.reference(**up) - entry.reference(**down))) / (2 * h)
    return values, slopes


# --- references, as the papers write them -----------------------------------------------------------------------------


def surrogate(log_ratio, advantage, *, clip_eps, clip_eps_high=None, dual_clip=None):
    r, high = np.exp(log_ratio), 1 + (clip_eps_high or clip_eps)
    loss = -np.minimum(r * advantage, np.clip(r, 1 - clip_eps, high) * advantage)
    floor = np.inf if dual_clip is None else dual_clip * np.where(advantage < 0, -advantage, 1)
    return np.where(advantage < 0, np.minimum(loss, floor), loss)


def outside(log_ratio, *, clip_eps, clip_eps_high=None):
    r = np.exp(log_ratio)
    return 1.0 * ((r < 1 - clip_eps) | (r > 1 + (clip_eps_high or clip_eps)))


def spo(log_ratio, advantage, *, clip_eps):
    r = np.exp(log_ratio)
    return -r * advantage + np.abs(advantage) / (2 * clip_eps) * (r - 1) ** 2


def dpo(log_ratio, advantage, *, alpha=2.0, beta=0.6):
    r = np.exp(log_ratio)
    up, down = (r - 1) * advantage, log_ratio * advantage
    risen = -advantage - alpha * np.tanh(up / alpha)  # -rA + (r - 1) A, which would cancel
    drift = np.where(advantage < 0, np.maximum(down - beta * np.tanh(down / beta), 0), 0)
    return np.where((advantage >= 0) & (up > alpha * np.tanh(up / alpha)), risen, -r * advantage + drift)


def rollback(log_ratio, advantage, *, clip_eps, slope, clip_eps_high=None):
    r, low, high = np.exp(log_ratio), 1 - clip_eps, 1 + (clip_eps_high or clip_eps)
    back = np.where(r < low, (1 + slope) * low - slope * r, np.where(r > high, (1 + slope) * high - slope * r, r))
    return -np.minimum(r * advantage, back * advantage)


def mirror_descent(log_ratio, advantage, *, coef):
    r = np.exp(log_ratio)
    return -r * advantage + coef * (r * log_ratio - r + 1)


def truncated(log_ratio, *, high, low):
    return np.clip(np.exp(log_ratio), low, high)


def masked(log_ratio, *, high, low, mode):
    r = np.exp(log_ratio)
    return np.where((r >= low) & (r <= high), r, 0)


def clipped_error(value, old_value, target, *, clip_eps):
    near = np.clip(value, old_value - clip_eps, old_value + clip_eps)
    return np.maximum((value - target) ** 2, (near - target) ** 2) / 2


def quantile(quantiles, target, kappa):
    error = target[..., None] - quantiles
    tau = (np.arange(quantiles.shape[-1]) + 0.5) / quantiles.shape[-1]
    size = huber(kappa, error) / kappa if kappa else np.abs(error)
    return np.mean(np.where(error < 0, 1 - tau, tau) * size, axis=-1)


def two_hot(target):
    """Weight the atoms by hats, each of which falls to 0 at the neighboring atoms."""
    return np.stack([np.interp(target, SUPPORT, hat) for hat in np.eye(len(SUPPORT))], axis=-1)


def gaussian(target, sigma):
    edges = np.array([-5.5, -2.5, -0.5, 0.75, 2.75, 5.25])
    y = np.clip(target, edges[0], edges[-1])[..., None]
    below = ndtr((edges - y) / sigma)
    return np.diff(below, axis=-1) / (below[..., -1:] - below[..., :1])


def cross_entropy(logits, target, support, sigma=None):
    target = two_hot(target) if sigma is None else gaussian(target, sigma)
    return -np.sum(target * log_softmax(logits, axis=-1), axis=-1)


def sapo(log_ratio, advantage, *, tau=1.0, tau_negative=1.05):
    tau = np.where(advantage > 0, tau, tau_negative)
    with np.errstate(over="ignore"):
        return -advantage * 4 / tau / (1 + np.exp(-tau * (np.exp(log_ratio) - 1)))


def gspo(log_ratio, advantage, *, clip_eps):
    return surrogate(np.mean(log_ratio, axis=0, keepdims=True), advantage, clip_eps=clip_eps)


def gmpo(log_ratio, advantage, *, clip_eps):
    sign = np.sign(advantage)
    narrow = sign * np.minimum(sign * log_ratio, sign * np.clip(log_ratio, -clip_eps, clip_eps))
    return np.broadcast_to(-np.mean(advantage, axis=0) * np.exp(np.mean(narrow, axis=0)), log_ratio.shape)


def covariance(advantage, log_prob):
    return (advantage - np.mean(advantage)) * (log_prob - np.mean(log_prob))


def kl_cov(log_ratio, advantage, log_prob, *, fraction, coef):
    cov = covariance(advantage, log_prob)
    chosen = cov >= np.sort(cov.ravel())[-max(1, int(fraction * cov.size))]
    return -np.exp(log_ratio) * advantage + coef * chosen * np.abs(log_ratio)


def clip_cov(log_ratio, advantage, log_prob, *, key, clip_eps, fraction, cov_low, cov_high):
    """Compute Clip-Cov with a fraction so large that nothing is left to chance."""
    assert fraction == 1
    cov, ratio = covariance(advantage, log_prob), np.exp(log_ratio)
    unclipped = -ratio * advantage >= -np.clip(ratio, 1 - clip_eps, 1 + clip_eps) * advantage
    drop = (cov > cov_low) & (cov < cov_high) & unclipped
    return np.where(drop, 0, surrogate(log_ratio, advantage, clip_eps=clip_eps))


def divergence(log_ratio, *, estimator):
    return {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": np.exp(log_ratio) - 1 - log_ratio}[estimator]


def of_sequence(log_ratio, *, reduction):
    return np.broadcast_to(getattr(np, reduction)(log_ratio, axis=0), log_ratio.shape)


def out_of_bounds(mean, *, bound):
    return np.sum(np.maximum(np.abs(mean) - bound, 0) ** 2, axis=-1)


def outcome(score, log_prob, reference_log_prob, *, kl_coef):
    reward = -kl_coef * (log_prob - reference_log_prob)
    reward[-1] += score
    return reward


def returns(reward, terminated, truncated, gamma):
    return slow_gae(reward, 0 * reward, 0 * reward, terminated, truncated, gamma=gamma, gae_lambda=1)[0]


across = functools.partial(Entry, elementwise=False)  # for functions that compare tokens or sequences
RANGE = {"key": jax.random.key(0), "fraction": 1.0, "clip_eps": 0.2, "cov_low": 0.5, "cov_high": 5.0}

CRITICS = (
    Entry(f.value_loss, lambda value, target: (value - target) ** 2 / 2, {}, VALUES),
    Entry(f.clipped_value_loss, clipped_error, {"clip_eps": 0.5}, THREE_VALUES),
    Entry(f.clipped_value_loss, clipped_error, {"clip_eps": np.inf}, THREE_VALUES, note="unbounded"),
    Entry(f.huber_value_loss, lambda value, target, delta: huber(delta, value - target), {"delta": 1.0}, VALUES),
    Entry(f.quantile_value_loss, quantile, {"kappa": 1.0}, QUANTILES),
    Entry(f.quantile_value_loss, quantile, {"kappa": 0.0}, QUANTILES, note="pinball"),
    Entry(f.categorical_value_loss, cross_entropy, {"support": SUPPORT}, LOGITS, note="two-hot"),
    Entry(f.categorical_value_loss, cross_entropy, {"support": SUPPORT, "sigma": 0.75}, LOGITS, note="HL-Gauss"),
)
OF_SEQUENCES = (
    across(f.gspo, gspo, {"clip_eps": 0.5}, TOKENS),
    across(f.gmpo, gmpo, {"clip_eps": 0.4}, TOKENS),
    across(f.kl_cov, kl_cov, {"fraction": 0.5, "coef": 10.0}, WITH_LOG_PROB),
    across(f.clip_cov, clip_cov, RANGE, WITH_LOG_PROB),
)
ENTRIES = (
    Entry(f.clipped_surrogate, surrogate, {"clip_eps": 0.5}),
    Entry(f.clipped_surrogate, surrogate, {"clip_eps": 0.5, "clip_eps_high": 0.75}, note="higher"),
    Entry(f.clipped_surrogate, surrogate, {"clip_eps": 0.5, "dual_clip": 1.25}, note="dual"),
    Entry(f.clipped_surrogate, surrogate, {"clip_eps": np.inf, "dual_clip": np.inf}, note="unbounded"),
    Entry(f.importance_weighted_surrogate, lambda log_ratio, advantage: -np.exp(log_ratio) * advantage),
    Entry(f.simple_policy_optimization, spo, {"clip_eps": 0.3}),
    Entry(f.discovered_policy_optimization, dpo),
    Entry(f.rollback_surrogate, rollback, {"clip_eps": 0.5, "slope": 0.5}),
    Entry(f.rollback_surrogate, rollback, {"clip_eps": 0.5, "clip_eps_high": 0.75, "slope": 0.5}, note="higher"),
    Entry(f.mirror_descent_surrogate, mirror_descent, {"coef": 2.0}),
    Entry(f.sapo, sapo, {"tau": 1.0, "tau_negative": 2.0}),
    Entry(f.clip_fraction, outside, {"clip_eps": 0.2}, RATIOS, wrt=(), note="wide"),
    Entry(f.clip_fraction, outside, {"clip_eps": 0.04}, RATIOS, wrt=(), note="narrow"),
    Entry(f.clip_fraction, outside, {"clip_eps": 0.2, "clip_eps_high": 4.0}, RATIOS, wrt=(), note="higher"),
    *(Entry(f.approx_kl, divergence, {"estimator": name}, RATIOS, note=name) for name in ("k1", "k2", "k3")),
    Entry(f.importance_sampling_weight, truncated, {"high": 2.0, "low": 0.5}, RATIOS, wrt=(), note="truncate"),
    Entry(f.importance_sampling_weight, masked, {"high": 2.0, "low": 0.5, "mode": "mask"}, RATIOS, wrt=(), note="mask"),
    Entry(f.bounds_loss, out_of_bounds, {"bound": 1.0}, {"mean": LOG_RATIO}),
    Entry(f.mirror_loss, lambda mean, mirrored: np.mean((mean - mirrored) ** 2, axis=-1), {}, means("mirrored")),
    Entry(f.smoothness_loss, lambda mean, other: np.linalg.norm(mean - other, axis=-1), {}, means("other", 0.1),
          wrt=("mean", "other")),
    *CRITICS,
    *OF_SEQUENCES,
    across(f.sequence_log_ratio, of_sequence, {"reduction": "mean"}, OF_TOKENS),
    across(f.sequence_log_ratio, of_sequence, {"reduction": "sum"}, OF_TOKENS, note="sum"),
    across(f.outcome_reward, outcome, {"kl_coef": 0.5}, OUTCOMES, wrt=()),
    across(f.reward_to_go, returns, {"gamma": 0.9}, STEPS, wrt=()),
)  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_a_function_equals_its_reference_with_its_gradients(entry):
    check_reference(entry)


@pytest.mark.parametrize("entry", OF_SEQUENCES, ids=lambda entry: entry.id)
def test_extreme_log_ratios_of_sequences(entry):
    """Every ratio is about e^200 or e^-200; float32 cannot hold the former."""
    for offset in (-200.0, 200.0):
        samples = entry.samples | {"log_ratio": entry.samples["log_ratio"] + offset}
        check_reference(entry._replace(samples=samples))
        given = {name: jnp.asarray(x, jnp.float32) for name, x in samples.items()}
        total = lambda x, g=given: entry.function(**g | {"log_ratio": x}, **entry.hyperparameters).sum()  # noqa: E731
        slopes = jax.jit(jax.grad(total))(given["log_ratio"])
        assert not np.isnan(slopes).any()
        assert offset > 0 or np.isfinite(slopes).all()


@pytest.mark.parametrize("entry", CRITICS, ids=lambda entry: entry.id)
def test_gradients_of_critics_are_finite_up_to_float_range(entry):
    prediction, squares = entry.differentiable[0], entry.function in (f.value_loss, f.clipped_value_loss)
    given = {name: jnp.asarray(x, jnp.float32) for name, x in entry.samples.items()}

    @jax.jit
    @jax.value_and_grad
    def total(x):
        losses = entry.function(**given | {prediction: x}, **entry.hyperparameters)
        return jnp.sum(losses if squares else losses / 1e3)

    for size in (1e30, -1e38 if squares else -3e38):
        loss, gradient = total(jnp.sign(given[prediction]) * size)
        assert np.isfinite(loss) or squares or abs(size) > 1e38
        assert np.isfinite(gradient).all()


EXTREME = np.array([-1e38, -200, -1, 0, 1, 90, 1e38], np.float32)


def test_weighted_log_probabilities_and_k3_plus():
    """The value is -wA and the slope -wA for every finite log-ratio; `test_arguments.py` masks them."""
    advantage = np.array([2, -1, 3, -2, 1, 1, 0], np.float32)
    with np.errstate(over="ignore"):
        ratio = np.exp(EXTREME)
    for loss, weight in (
        (f.policy_gradient_loss, np.ones(7)),
        (functools.partial(f.cispo, clip_eps=0.2, clip_eps_high=3.0), np.clip(ratio, 0.8, 4.0)),
        (functools.partial(f.cispo, clip_eps=1.0), np.clip(ratio, 0.0, 2.0)),
    ):
        value, pull = jax.vjp(lambda x, loss=loss: loss(x, jnp.asarray(advantage)), jnp.asarray(EXTREME))
        for found in (value, *pull(jnp.ones(7))):
            np.testing.assert_allclose(found, -weight * advantage, rtol=1e-6, atol=1e-30)
    log_ratio = jnp.array([-80.0, -1, 0.5, 80, 200])  # k3 overflows at the last one
    value, back = jax.vjp(lambda x: f.approx_kl(x, estimator="k3+"), log_ratio)
    np.testing.assert_array_equal(value, f.approx_kl(log_ratio, estimator="k3"))
    np.testing.assert_array_equal(back(jnp.ones(5))[0], log_ratio)
    assert f.approx_kl(jnp.array(-jnp.inf), estimator="k3+") == jnp.inf


def test_losses_of_sequences_are_finite_where_their_docstrings_say():
    """This holds for all log-ratios with a positive advantage, and with a negative one unless the ratio overflows."""
    rows = ((1.0, EXTREME), (-1.0, np.minimum(EXTREME, 1)), (0.0, EXTREME))
    x = jnp.concatenate([jnp.asarray(logs)[None] for _, logs in rows], axis=0).T.reshape(1, -1)
    advantage = jnp.tile(jnp.array([gain for gain, _ in rows]), len(EXTREME))[None]

    @jax.jit
    def losses_and_gradients(x):
        losses = [functools.partial(f.gspo, clip_eps=0.2, level=level) for level in ("sequence", "token")]
        return [jax.value_and_grad(lambda x, loss=loss: loss(x, advantage).sum())(x) for loss in (*losses, f.gmpo)]

    assert all(np.isfinite(x).all() for x in jax.tree.leaves(losses_and_gradients(x)))


def test_clip_cov_draws_as_many_as_it_says():
    rng, shape = np.random.default_rng(0), (50, 20)
    advantage, log_prob = rng.normal(size=shape), rng.normal(size=shape)
    given = {"clip_eps": 0.2, "cov_low": 0.0, "cov_high": 1e9}

    @jax.jit
    def dropped(seed, fraction):
        loss = f.clip_cov(jnp.zeros(shape), advantage, log_prob, key=jax.random.key(seed), fraction=fraction, **given)
        return loss == 0

    assert int(dropped(0, 0.05).sum()) == 50
    assert int(dropped(0, 0.0).sum()) == 1
    assert np.all(covariance(advantage, log_prob)[np.asarray(dropped(0, 0.05))] > 0)
    assert np.any(dropped(0, 0.05) != dropped(1, 0.05))


def test_heads_are_rescaled_and_target_distributions_have_the_mean_of_the_target():
    target = jnp.asarray(LOGITS["target"], jnp.float32)
    inside = jnp.clip(target, -4, 4)
    probs = _value_losses.two_hot(target, jnp.asarray(SUPPORT, jnp.float32))
    np.testing.assert_allclose(f.categorical_value(jnp.log(probs), SUPPORT), inside, atol=1e-5)
    fine = jnp.linspace(-8, 8, 161)
    smooth = _value_losses.hl_gauss(inside, fine, 0.3)
    np.testing.assert_allclose(f.categorical_value(jnp.log(smooth), fine), inside, atol=1e-4)
    rng = np.random.default_rng(0)
    kernel, bias, x = rng.normal(size=(4, 1)), rng.normal(size=1), rng.normal(size=(5, 4))
    with jax.enable_x64(True):
        w, b = map(np.asarray, f.rescale_head(jnp.asarray(kernel), jnp.asarray(bias), (3.0, 2.0), (-1.0, 7.0)))
    np.testing.assert_allclose(7 * (x @ w + b) - 1, 2 * (x @ kernel + bias) + 3, rtol=1e-12)
