"""A table entry for one function of the catalogue, and what is checked of every entry.

`tests/functional/test_catalogue.py` lists the entries and calls the checks on them. Everything is computed in
float64 except where a check is about float32.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Arrays = Mapping[str, np.ndarray]


def log_ratios_and_advantages() -> Arrays:
    """Every pair of these log-ratios, some of which overflow float32, and advantages; no kink is among them."""
    log_ratio, advantage = np.meshgrid([-200.0, -80, -2, -0.3, -0.05, 0.03, 0.25, 1.5, 80, 200], [-2.0, -0.3, 0, 1.5])
    return {"log_ratio": log_ratio, "advantage": advantage}


class Law(NamedTuple):
    """What an entry becomes with some hyperparameters: `other(**inputs)` on moderate inputs.

    Attributes:
        other: an existing function of the same inputs.
        hyperparameters: those of the entry that differ.
        gradient: whether the gradients are equal, too.
        where: which of the samples to compare; None: those between -3 and 3.
        rtol: how closely.
    """

    other: Callable[..., Any]
    hyperparameters: Mapping[str, Any] = {}
    gradient: bool = True
    where: Callable[..., np.ndarray] | None = None
    rtol: float = 1e-6


class Entry(NamedTuple):
    """A function of the catalogue.

    Attributes:
        function: `f(**inputs, **hyperparameters, mask=None)`.
        reference: the same in NumPy, in float64, without mask.
        hyperparameters: of all checks.
        differentiable: the inputs that have gradients; all others must have none.
        samples: inputs for the comparison with the reference.
        laws: what it becomes at its limits.
        elementwise: each output depends only on the inputs at its place.
        note: distinguishes several entries of one function.
    """

    function: Callable[..., Any]
    reference: Callable[..., np.ndarray]
    hyperparameters: Mapping[str, Any] = {}
    differentiable: tuple[str, ...] = ("log_ratio",)
    samples: Callable[[], Arrays] = log_ratios_and_advantages
    laws: tuple[Law, ...] = ()
    elementwise: bool = True
    note: str = ""

    @property
    def id(self) -> str:
        function = getattr(self.function, "func", self.function)
        return function.__name__ + (f"-{self.note}" if self.note else "")


def check_reference(entry: Entry) -> None:
    """Values equal the reference and gradients its finite differences."""
    samples = entry.samples()
    expected, slopes = _expected(entry, samples)
    with jax.enable_x64(True):
        actual, gradient = _value_and_gradient(entry, samples)
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)
        _close_to_differences(gradient, slopes, expected, entry)
    if entry.elementwise:
        _check_float32(entry, samples, expected, slopes)


def check_laws(entry: Entry) -> None:
    samples = entry.samples()
    with jax.enable_x64(True):
        for law in entry.laws:
            where = law.where or (lambda **x: np.all([np.abs(a) < 3 for a in x.values()], axis=0))
            chosen = where(**samples) if entry.elementwise else np.ones((), bool)
            assert chosen.any()
            same = entry._replace(hyperparameters={**entry.hyperparameters, **law.hyperparameters})
            ours = _value_and_gradient(same, samples)
            theirs = _value_and_gradient(same._replace(function=law.other, hyperparameters={}), samples)
            for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                keep = np.broadcast_to(chosen.reshape(chosen.shape + (1,) * (np.ndim(x) - chosen.ndim)), np.shape(x))
                np.testing.assert_allclose(np.asarray(x)[keep], np.asarray(y)[keep], rtol=law.rtol, atol=1e-9)
                if not law.gradient:
                    break


def _value_and_gradient(entry: Entry, samples: Arrays, dtype: Any = np.float64) -> Any:
    """Output, and the gradient of its sum (weighted, unless elementwise) with respect to every input."""
    given = {name: jnp.asarray(x, dtype) for name, x in samples.items()}

    def total(given: Any) -> Any:
        output = entry.function(**given, **entry.hyperparameters)
        return jnp.sum(output * jnp.asarray(_weights(entry, output.shape), dtype)), output

    gradient, output = jax.grad(total, has_aux=True)(given)
    return np.asarray(output), {name: np.asarray(x) for name, x in gradient.items()}


def _weights(entry: Entry, shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape) if entry.elementwise else np.random.default_rng(1).normal(size=shape)


def _expected(entry: Entry, samples: Arrays, h: float = 1e-6) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The reference's values and the central differences of their (weighted) sum."""

    def output(changed: Arrays) -> np.ndarray:
        return entry.reference(**changed, **entry.hyperparameters)

    values, slopes = output(samples), {}
    weights = _weights(entry, values.shape)
    for name, x in samples.items():
        slopes[name] = np.zeros_like(x)
        if name not in entry.differentiable:
            continue
        # Where places are independent, one number for each index along further axes is changed at a time.
        inner = x.shape[values.ndim :] if entry.elementwise else x.shape
        for index in np.ndindex(*inner):
            place = (..., *index)
            step = np.zeros_like(x)
            step[place] = h
            change = (output({**samples, name: x + step}) - output({**samples, name: x - step})) / (2 * h)
            slopes[name][place] = change if entry.elementwise else np.sum(weights * change)
    return values, slopes


def _close_to_differences(gradient: Any, slopes: Any, values: np.ndarray, entry: Entry) -> None:
    for name, slope in slopes.items():
        if name not in entry.differentiable:
            np.testing.assert_array_equal(gradient[name], 0, err_msg=name)
            continue
        scale = np.abs(values) if entry.elementwise else np.max(np.abs(values))  # a difference has rounding errors
        scale = scale.reshape(scale.shape + (1,) * (slope.ndim - np.ndim(scale)))
        wrong = np.abs(gradient[name] - slope) > 1e-5 * np.abs(slope) + 1e-8 * scale + 1e-8
        assert not wrong.any(), f"{entry.id}: {name} {gradient[name][wrong]} instead of {slope[wrong]}"


def _check_float32(entry: Entry, samples: Arrays, expected: np.ndarray, slopes: Any) -> None:
    """Nothing is NaN, and what float32 can hold is finite and right."""
    actual, gradient = _value_and_gradient(entry, samples, np.float32)
    checked = {"value": (actual, expected)} | {name: (gradient[name], slopes[name]) for name in entry.differentiable}
    for name, (ours, true) in checked.items():
        held = np.abs(true) < np.finfo(np.float32).max
        assert not np.isnan(ours).any(), f"{entry.id}: {name} is NaN"
        assert np.all(np.isfinite(ours[held])), f"{entry.id}: {name} is not finite"
        np.testing.assert_allclose(ours[held], true[held], rtol=1e-3, atol=1e-5, err_msg=f"{entry.id}: {name}")
