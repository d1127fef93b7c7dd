"""The policy losses, divergences and regularizers of the catalogue: one table; `catalogue.py` has the checks."""

import functools

import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import functional as f

from .catalogue import Entry, Law, check_all_learn, check_golden, check_laws, check_reference

RATIOS = {"log_ratio": np.log([1.0, 2.0, 2.0, 0.25, 0.25]), "advantage": [3.0, 1.0, -1.0, 1.0, -1.0]}
LOG2 = np.log(2)


def clipped(eps):
    return functools.partial(f.clipped_surrogate, clip_eps=eps)


def small(limit):
    return lambda log_ratio, advantage: np.abs(log_ratio) < limit


def ratio(log_ratio):
    return np.exp(np.asarray(log_ratio, np.float64))


# --- references, as the papers write them ---------------------------------------------------------------------------


def spo(log_ratio, advantage, *, clip_eps):
    r = ratio(log_ratio)
    return -r * advantage + np.abs(advantage) / (2 * clip_eps) * (r - 1) ** 2


def dpo(log_ratio, advantage, *, alpha=2.0, beta=0.6):
    r = ratio(log_ratio)
    up, down = (r - 1) * advantage, log_ratio * advantage
    risen = -advantage - alpha * np.tanh(up / alpha)  # -rA + (r - 1) A, which would cancel
    drift = np.where(advantage < 0, np.maximum(down - beta * np.tanh(down / beta), 0), 0)
    return np.where((advantage >= 0) & (up > alpha * np.tanh(up / alpha)), risen, -r * advantage + drift)


def rollback(log_ratio, advantage, *, clip_eps, slope, clip_eps_high=None):
    r, low, high = ratio(log_ratio), 1 - clip_eps, 1 + (clip_eps_high or clip_eps)
    back = np.where(r < low, (1 + slope) * low - slope * r, np.where(r > high, (1 + slope) * high - slope * r, r))
    return -np.minimum(r * advantage, back * advantage)


def smooth(log_ratio, advantage, *, clip_eps):
    r, low, high = ratio(log_ratio), 1 - clip_eps, 1 + clip_eps
    with np.errstate(over="ignore"):
        soft = 1 / (1 + np.exp(4 * (0.5 - (r - low) / (high - low)))) * (high - low) + low
    return np.maximum(-r * advantage, -soft * advantage)


def mirror(log_ratio, advantage, *, coef):
    r = ratio(log_ratio)
    return -r * advantage + coef * (r * log_ratio - r + 1)


ENTRIES = (
    Entry(
        f.importance_weighted_surrogate,
        RATIOS,
        [-3, -2, 2, -0.25, 0.25],
        lambda log_ratio, advantage: -ratio(log_ratio) * advantage,
        laws=(Law(clipped(1e9)),),
        parts=lambda name: [pp.policy_loss(f.importance_weighted_surrogate, name=name)],
    ),
    Entry(
        f.simple_policy_optimization,
        RATIOS,
        # eps .5: -rA + (r - 1)^2 |A|: -2 + 1, 2 + 1, -.25 + .5625, .25 + .5625
        [-3, -1, 3, 0.3125, 0.8125],
        spo,
        {"clip_eps": 0.5},
        laws=(Law(f.importance_weighted_surrogate, {"clip_eps": 1e12}),),
        parts=lambda name: [pp.policy_loss(f.simple_policy_optimization, clip_eps=0.5, name=name)],
    ),
    Entry(
        f.discovered_policy_optimization,
        RATIOS,
        # r 2, A 1: -1 - 2 tanh(1/2); r 1/4, A -1: 1/4 + 2 log 2 - .6 tanh(2 log 2 / .6); elsewhere there is no drift
        [-3, -1 - 2 * np.tanh(0.5), 2, -0.25, 0.25 + 2 * LOG2 - 0.6 * np.tanh(2 * LOG2 / 0.6)],
        dpo,
        laws=(Law(f.importance_weighted_surrogate, {"alpha": 1e6, "beta": 1e6}),),
        parts=lambda name: [pp.policy_loss(f.discovered_policy_optimization, alpha=2.0, beta=0.6, name=name)],
    ),
    Entry(
        f.rollback_surrogate,
        RATIOS,
        # eps .5, alpha .5: F(2) = 1.5 * 1.5 - 1 = 1.25; F(.25) = 1.5 * .5 - .125 = .625
        [-3, -1.25, 2, -0.25, 0.625],
        rollback,
        {"clip_eps": 0.5, "slope": 0.5},
        laws=(Law(clipped(0.5), {"slope": 1e-12}), Law(f.importance_weighted_surrogate, {"clip_eps": 1e9})),
        parts=lambda name: [pp.policy_loss(f.rollback_surrogate, clip_eps=0.2, slope=0.3, name=name)],
    ),
    Entry(
        f.rollback_surrogate,
        RATIOS,
        [-3, -(1.5 * 1.75 - 1), 2, -0.25, 0.625],
        rollback,
        {"clip_eps": 0.5, "clip_eps_high": 0.75, "slope": 0.5},
        note="higher",
    ),
    Entry(
        f.smooth_clipped_surrogate,
        RATIOS,
        # eps .5: s(r) = .5 + sigmoid(4 (r - 1))
        [-3, -0.5 - 1 / (1 + np.exp(-4)), 2, -0.25, 0.5 + 1 / (1 + np.exp(3))],
        smooth,
        {"clip_eps": 0.5},
        laws=(
            Law(f.importance_weighted_surrogate, {"clip_eps": 1e6}),
            Law(clipped(0.01), {"clip_eps": 0.01}, where=lambda log_ratio, advantage: np.abs(log_ratio) > 0.2),
        ),
        parts=lambda name: [pp.policy_loss(f.smooth_clipped_surrogate, clip_eps=0.2, name=name)],
    ),
    Entry(
        f.mirror_descent_surrogate,
        RATIOS,
        # beta 2: -rA + 2 (r log r - r + 1): 2 (2 log 2 - 1) for r 2, 2 (-.5 log 2 + .75) for r 1/4
        [-3, -4 + 4 * LOG2, 4 * LOG2, 1.25 - LOG2, 1.75 - LOG2],
        mirror,
        {"coef": 2.0},
        laws=(Law(f.importance_weighted_surrogate, {"coef": 1e-12}),),
        parts=lambda name: [pp.policy_loss(f.mirror_descent_surrogate, coef=0.5, name=name)],
    ),
    Entry(
        f.self_imitation_loss,
        {"log_prob": [-2.0, -2.0, -1.0], "advantage": [3.0, -3.0, 0.0]},
        [6.0, 0, 0],
        lambda log_prob, advantage: -log_prob * np.maximum(advantage, 0),
        differentiable=("log_prob",),
        samples=lambda: {"log_prob": np.array([-80.0, -2, 0, 3]), "advantage": np.array([1.0, -2, 0.5, 1e6])},
    ),
)
every_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)


@every_entry
def test_golden(entry):
    check_golden(entry)


@every_entry
def test_equals_reference_with_gradient_and_mask(entry):
    check_reference(entry)


@every_entry
def test_reduces_to(entry):
    check_laws(entry)


def test_a_chain_of_all_learns():
    check_all_learn(ENTRIES)
