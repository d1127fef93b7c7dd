"""Slow float64 NumPy, one element at a time, written from the papers' equations; no jax here."""

import itertools

import numpy as np


def _columns(*arrays):
    """Each array as float64 `[T, everything else]`; None stays None."""
    return [None if x is None else np.asarray(x, np.float64).reshape(len(x), -1) for x in arrays]


def _cut(t, n, truncated, mask, steps):
    """Whether the step after t is of another trajectory though t did not terminate."""
    if truncated is not None and truncated[t, n]:
        return True
    return mask is not None and t + 1 < steps and not mask[t + 1, n]


def vtrace(
    log_ratio, reward, value, next_value, terminated, truncated=None, mask=None, *,
    gamma, gae_lambda=1.0, rho_clip=1.0, c_clip=1.0, pg_rho_clip=None, pg_lambda=1.0,
):  # fmt: skip
    """Error, target and policy advantage (arXiv:1802.01561, eq. 1, as the sum it is and not as a recursion).

    The first four hyperparameters may differ from step to step.
    """
    shape = np.shape(value)
    gamma, gae_lambda, rho_clip, c_clip = (
        np.broadcast_to(x, shape).reshape(len(value), -1) for x in (gamma, gae_lambda, rho_clip, c_clip)
    )
    flat = _columns(log_ratio, reward, value, next_value, terminated, truncated, mask)
    log_ratio, reward, value, next_value, terminated, truncated, mask = flat
    steps, columns = value.shape
    error, target, policy = np.zeros((3, steps, columns))
    ratio = np.exp(log_ratio)
    rho, c = np.minimum(ratio, rho_clip), np.minimum(ratio, c_clip)

    def bootstrapped(t, n, following):
        return reward[t, n] if terminated[t, n] else reward[t, n] + gamma[t, n] * following

    counted = [(t, n) for t, n in np.ndindex(steps, columns) if mask is None or mask[t, n]]
    for t, n in counted:
        weight = 1.0
        for k in range(t, steps):
            error[t, n] += weight * rho[k, n] * (bootstrapped(k, n, next_value[k, n]) - value[k, n])
            if terminated[k, n] or _cut(k, n, truncated, mask, steps):
                break
            weight *= gamma[k, n] * gae_lambda[k, n] * c[k, n]
        target[t, n] = error[t, n] + value[t, n]
    for t, n in counted:
        last = t + 1 == steps or _cut(t, n, truncated, mask, steps)
        following = next_value[t, n]
        if not last:
            following = pg_lambda * target[t + 1, n] + (1 - pg_lambda) * following
        weight = min(ratio[t, n], rho_clip[t, n] if pg_rho_clip is None else pg_rho_clip)
        policy[t, n] = weight * (bootstrapped(t, n, following) - value[t, n])
    return tuple(x.reshape(shape) for x in (error, target, policy))


def gae(reward, *steps, **settings):
    """Advantage and target (arXiv:1506.02438, eq. 16): those of V-trace under the policy that acted."""
    return vtrace(np.zeros(np.shape(reward)), reward, *steps, **settings)[:2]


def advantage_normalize(advantage, mask=None, *, axis=None, ddof=0, eps=1e-8):
    """Group by group: a group is what shares the indices that `axis` leaves."""
    advantage = np.asarray(advantage, np.float64)
    counts = np.ones(advantage.shape, bool) if mask is None else np.asarray(mask, bool)
    axes = range(advantage.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    kept = [a for a in range(advantage.ndim) if a not in {x % advantage.ndim for x in axes}]
    out = np.zeros_like(advantage)
    for place in itertools.product(*(range(advantage.shape[a]) for a in kept)):
        group = tuple(place[kept.index(a)] if a in kept else slice(None) for a in range(advantage.ndim))
        values = advantage[group][counts[group]]
        if len(values) == 0:
            continue
        mean = sum(values) / len(values)
        variance = sum((v - mean) ** 2 for v in values) / max(1, len(values) - ddof)
        out[group] = np.where(counts[group], (advantage[group] - mean) / (variance**0.5 + eps), 0)
    return out


def segment_priorities(advantage, mask=None, *, alpha, eps=1e-6):
    """Probability of each column: PufferLib's priority, over the columns that have a step that counts."""
    advantage = np.asarray(advantage, np.float64)
    counts = np.ones(advantage.shape, bool) if mask is None else np.asarray(mask, bool)
    priority = np.zeros(advantage.shape[1])
    for n in range(advantage.shape[1]):
        if counts[:, n].any():
            total = sum(abs(a) for a, keep in zip(advantage[:, n], counts[:, n], strict=True) if keep)
            priority[n] = (total if np.isfinite(total) else 0.0) ** alpha + eps
    return priority / (priority.sum() or 1)


def importance_weights(probabilities, indices, *, beta):
    """arXiv:1511.05952, section 3.4; segments that cannot be drawn have weight 0 and do not count in N."""
    probabilities = np.asarray(probabilities, np.float64)
    drawable = probabilities > 0
    weight = [(drawable.sum() * p) ** -beta if p > 0 else 0.0 for p in probabilities]
    return np.array([weight[i] for i in indices])
