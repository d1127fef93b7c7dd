"""Permutations against the statistics of uniformly random orders.

Every statistic is a z-score, which is about standard normal for perfect shuffles. `pytest -m slow` takes 100,000 keys.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppo_parts import functional as f
from ppo_parts.errors import UserValueError
from ppo_parts.functional import _permutation


def orders_of(size, count):
    """Return one order for each of neighboring keys."""
    shuffle = jax.jit(jax.vmap(lambda seed: f.permutation(jax.random.key(seed), size)))
    pieces = np.array_split(np.arange(count + 1, dtype=np.uint32), max(1, count * size // 4_000_000))
    return np.concatenate([np.asarray(shuffle(seeds)) for seeds in pieces])


def chi_square(counts, expected):
    freedom = np.size(counts) - 1
    return (np.sum((counts - expected) ** 2 / expected) - freedom) / math.sqrt(2 * freedom)


def scores(orders):
    """Compare orders `[K + 1, n]` of neighboring keys with uniformly random ones."""
    orders, others = orders[:-1], orders[1:]
    count, n = orders.shape
    width = _permutation._radices(n)[0]
    out = {}
    cells = np.bincount((orders + n * np.arange(n)).ravel(), minlength=n * n)
    freedom = (n - 1) ** 2
    out["positions"] = (np.sum((cells - count / n) ** 2) * (n - 1) / count - freedom) / math.sqrt(2 * freedom)
    bins = min(n // 2, int(math.sqrt(count / 5)))
    sizes = np.bincount(np.arange(n) * bins // n, minlength=bins)
    expected = (np.outer(sizes, sizes) - np.diag(sizes)) * count / (n * (n - 1))
    for one, other in ((0, 1), (0, width), (0, n - 1), (5, 6 + width)):
        first, second = (orders[:, i].astype(int) * bins // n for i in (one, other))
        pairs = np.bincount(first * bins + second, minlength=bins**2).reshape(bins, bins)
        out[f"pair {one} {other}"] = chi_square(pairs, expected)
    for shift in (1, 2, width, width + 1):
        distances = np.bincount(((np.roll(orders, -shift, axis=1) - orders) % n)[:, ::7].ravel(), minlength=n)[1:]
        out[f"distance {shift}"] = chi_square(distances, np.mean(distances))
    poisson = np.array([math.exp(-1) / math.factorial(k) for k in range(6)])
    poisson = count * np.append(poisson, 1 - np.sum(poisson))
    for name, there in {"fixed": np.arange(n), "next": others}.items():
        matches = np.minimum(np.sum(orders == there, axis=1), 6)
        out[f"matches, {name}"] = chi_square(np.bincount(matches, minlength=7), poisson)
    # Count how many elements of a row, a column, ... are in the first of four minibatches; the variance tells the most.
    size = n // 4
    for name, some in {"row": np.arange(width), "column": np.arange(0, n, width), "half": np.arange(n // 2)}.items():
        share = len(some) / n
        variance = size * share * (1 - share) * (n - size) / (n - 1)
        drawn = np.isin(orders[:, :size], some).sum(1)
        out[f"{name} in a minibatch, mean"] = (np.mean(drawn) - size * share) / math.sqrt(variance / count)
        out[f"{name} in a minibatch, variance"] = (np.var(drawn) / variance - 1) / math.sqrt(2 / count)
    return out


FEW = {160: 5000, 139: 5000}  # 139 is a prime and needs cycle walking
SLOW = dict.fromkeys((129, 131, 200, 256), 100_000) | dict.fromkeys((512, 1000), 40_000)
EACH = [*FEW.items(), *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW.items())]


@pytest.mark.parametrize(("size", "count"), EACH)
def test_large_permutations_have_the_statistics_of_random_orders(size, count):
    assert {name: z for name, z in scores(orders_of(size, count)).items() if not abs(z) < 4.5} == {}


@pytest.mark.parametrize(("size", "count"), [(4, 24_000), (6, 72_000)])
def test_all_orders_of_few_elements_are_equally_likely(size, count):
    orders = np.asarray(jax.vmap(lambda key: f.permutation(key, size))(jax.random.split(jax.random.key(0), count)))
    counts = np.unique(orders @ 8 ** np.arange(size), return_counts=True)[1]
    assert counts.shape == (math.factorial(size),)
    assert abs(chi_square(counts, count / math.factorial(size))) < 4


@pytest.mark.parametrize("size", [1, 5, 127, 128, 131, 4097, 70_000])
def test_a_permutation_has_every_integer_once(size):
    order = f.permutation(jax.random.key(0), size)
    assert order.dtype == jnp.int32
    np.testing.assert_array_equal(np.sort(order), np.arange(size))
    some = jnp.array([[size - 1, 0], [size // 2, size // 3]])
    np.testing.assert_array_equal(f.permutation(jax.random.key(0), size, some), order[some])


def test_permutations_are_transformed_like_anything_else():
    size = 131  # a prime, which needs a loop
    keys = jax.random.split(jax.random.key(1), 4)
    each = np.stack([f.permutation(key, size) for key in keys])
    assert len(np.unique(each, axis=0)) == 4
    np.testing.assert_array_equal(jax.vmap(lambda key: f.permutation(key, size))(keys), each)
    np.testing.assert_array_equal(jax.lax.scan(lambda _, key: (None, f.permutation(key, size)), None, keys)[1], each)
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:1]), "i"), jax.sharding.PartitionSpec("i")
    sharded = jax.shard_map(lambda keys: f.permutation(keys[0], size)[None], mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(sharded(keys[:1]), each[:1])
    np.testing.assert_array_equal(f.permutation(keys[0], size, jnp.int8([0, 127])), each[0][[0, 127]])


def test_sizes_and_indices_of_permutations_are_checked():
    for size, kind in ((0, ValueError), (2.5, TypeError), (2**31, ValueError), (True, TypeError)):
        with pytest.raises(kind, match="permutation: size must be an integer in \\[1, 2147483647\\]"):
            f.permutation(jax.random.key(0), size)
    for size, indices in itertools.product((10, 1000), (-1, [0, 5000])):
        with pytest.raises(UserValueError, match=rf"permutation: indices must lie in \[0, {size}\), got"):
            f.permutation(jax.random.key(0), size, jnp.array(indices))
    with pytest.raises(TypeError, match="indices must contain integers, got float32"):
        f.permutation(jax.random.key(0), 5, jnp.ones(3))
    assert jax.eval_shape(lambda key: f.permutation(key, 2**31 - 1, jnp.arange(3)), jax.random.key(0)).shape == (3,)
    few = f.permutation(jax.random.key(0), 2**31 - 1, jnp.arange(100_000))
    assert len(np.unique(few)) == 100_000
    assert 0 <= np.min(few) < np.max(few) < 2**31 - 1
