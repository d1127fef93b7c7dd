"""Random permutations, by sorting if there are few elements, and otherwise by a keyed bijection of the indices."""

from __future__ import annotations

import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from ._arguments import Indices, Key, array_function, check_below, whole
from ._common import Array, Range

SORTED = 128  # the largest size that is sorted
ROUNDS = 10  # test_permutation.py detects up to 8 rounds at 128 elements, and up to 6 at 256


def _check_indices(where: str, values: dict[str, Any]) -> None:
    if values["indices"] is not None:
        check_below(where, "indices", values["indices"], values["size"])


@array_function(raw=True, also=_check_indices)
def permutation(key: Key, size: Annotated[int, whole(Range(1, 2**31 - 1))], indices: Indices | None = None) -> Array:
    r"""Permute the integers below `size` randomly, much faster than `jax.random.permutation`.

    Up to 128 elements are sorted by random words; all orders are equally likely, except for rare ties. Larger sets are
    numbered in mixed radix, :math:`x = l + w r` with :math:`l < w, r < h` and :math:`w h \ge n`, and mapped by ten
    rounds of a Feistel network, alternately of these two forms, in which f is a hash keyed by two random words:

    .. math:: l \leftarrow (l + f_i(r)) \bmod w, \qquad r \leftarrow (r + f_i(l)) \bmod h

    A result of at least n is mapped again until it is below n (cycle walking). So any part of the order can be computed
    on its own, without a sort. The rounds use 640 bits, drawn with `key`, so not all n! orders can occur.

    Args:
        key: key of `jax.random`.
        size: n, at least 1 and below 2^31.
        indices: integers in [0, n) of any shape, the positions of the order to return; None means the whole order.

    Returns:
        An int32 array of shape `[size]`, or of the shape of `indices`.

    Example:
        >>> sorted(permutation(jax.random.key(0), 4).tolist())
        [0, 1, 2, 3]
        >>> order = permutation(jax.random.key(0), 1000)
        >>> jnp.array_equal(permutation(jax.random.key(0), 1000, jnp.arange(250, 500)), order[250:500]).item()
        True

    Reference: Black and Rogaway 2002, Ciphers with Arbitrary Finite Domains (generalized Feistel, cycle walking);
    Mitchell et al. 2021, arXiv:2106.06161. Sorting by random keys: Knuth, The Art of Computer Programming 2, 3.4.2.
    """
    if size > SORTED:
        return feistel(key, jnp.arange(size) if indices is None else indices, size)
    order = _sorted(key, size)
    return order if indices is None else order[indices]


def _sorted(key: Array, size: int) -> Array:
    """Sort 32-bit words whose low bits are the position and whose other bits are random.

    With a probability of at most 2^-25, two given elements draw the same random bits, and then keep their order.
    """
    bits = max(1, (size - 1).bit_length())
    position, low = jnp.arange(size, dtype=jnp.uint32), np.uint32(2**bits - 1)
    words = jax.random.bits(key, (size,), jnp.uint32)
    return (jnp.sort(words & ~low | position) & low).astype(jnp.int32)


def feistel(key: Array, indices: Array, size: int) -> Array:
    """Return the images of `indices` under a keyed bijection of the integers below `size`."""
    width, height = _radices(size)
    words = jax.random.bits(key, (ROUNDS, 2), jnp.uint32)

    def once(x: Array) -> Array:
        left, right = x % np.uint32(width), x // np.uint32(width)
        for i in range(ROUNDS):
            if i % 2:
                right = _added(right, _hashed(left, *words[i]), height)
            else:
                left = _added(left, _hashed(right, *words[i]), width)
        return left + np.uint32(width) * right

    x = once(indices.astype(jnp.uint32))
    if width * height > size:
        x = jax.lax.while_loop(lambda x: jnp.any(x >= size), lambda x: jnp.where(x < size, x, once(x)), x)
    return x.astype(jnp.int32)


def _radices(size: int) -> tuple[int, int]:
    """Return w and h, below 2^16 and of similar size, with the smallest product that is at least `size`."""
    root = math.isqrt(size - 1) + 1
    width = min(range(root, max(root + 1, min(2 * root, 2**16))), key=lambda w: (-size % w, w))
    return width, -(-size // width)


def _hashed(x: Array, factor: Array, offset: Array) -> Array:
    """Return 16 bits of a hash whose keys are random words."""
    x = x * (factor | np.uint32(1)) + offset
    return (x ^ x >> 15) * np.uint32(0x85EBCA6B) >> 16  # a multiplier of MurmurHash3


def _added(x: Array, bits: Array, radix: int) -> Array:
    """Return (x + y) mod radix, where y is computed from 16 bits and nearly uniform below radix."""
    x = x + (bits * np.uint32(radix) >> 16)
    return jnp.where(x < radix, x, x - np.uint32(radix))
