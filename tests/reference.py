"""Float64 NumPy references from the papers' equations, with sums instead of recursions, and without jax."""

import numpy as np


def vtrace(
    log_ratio, reward, value, next_value, terminated, truncated=None, mask=None, *,
    gamma, gae_lambda=1.0, rho_clip=1.0, c_clip=1.0, pg_rho_clip=None, pg_lambda=1.0,
):  # fmt: skip
    """Return error, target and policy advantage (arXiv:1802.01561, eq. 1).

    The first four hyperparameters may differ from step to step.
    """
    steps, mask = len(value), np.ones(np.shape(value)) if mask is None else mask
    given = (reward, value, next_value, terminated, 0.0 if truncated is None else truncated, mask, gamma, gae_lambda)
    given = (np.broadcast_to(np.asarray(x, np.float64), np.shape(value)) for x in given)
    reward, value, next_value, terminated, truncated, mask, gamma, gae_lambda = given
    ratio = np.exp(np.asarray(log_ratio, np.float64))
    rho, c = np.minimum(ratio, rho_clip), np.minimum(ratio, c_clip)
    # Whether the step after each one belongs to the same trajectory, unless that one terminated.
    follows = (truncated == 0) & (np.append(mask[1:], mask[:1], axis=0) > 0)

    def bootstrapped(following):
        return np.where(terminated > 0, reward, reward + gamma * following)

    delta, error = rho * (bootstrapped(next_value) - value), np.zeros(np.shape(value))
    for t in range(steps):
        weight = mask[t]
        for k in range(t, steps):
            error[t] += weight * delta[k]
            weight = weight * np.where((terminated[k] == 0) & follows[k], gamma[k] * gae_lambda[k] * c[k], 0)
    target = error + mask * value
    follows[-1:] = False
    later = pg_lambda * np.append(target[1:], target[:1], axis=0) + (1 - pg_lambda) * next_value
    weight = np.minimum(ratio, rho_clip if pg_rho_clip is None else pg_rho_clip)
    return error, target, mask * weight * (bootstrapped(np.where(follows, later, next_value)) - value)


def gae(reward, *steps, **settings):
    """Return advantage and target (arXiv:1506.02438, eq. 16), which are V-trace's under the policy that acted."""
    return vtrace(np.zeros(np.shape(reward)), reward, *steps, **settings)[:2]


def _with_mask(advantage, mask):
    return np.asarray(advantage, np.float64), np.asarray(np.ones(np.shape(advantage)) if mask is None else mask)


def advantage_normalize(advantage, mask=None, *, axis=None, ddof=0, eps=1e-8):
    advantage, counts = _with_mask(advantage, mask)
    number = np.maximum(np.sum(counts, axis=axis, keepdims=True), 1)
    mean = np.sum(counts * advantage, axis=axis, keepdims=True) / number
    centred = counts * (advantage - mean)
    variance = np.sum(centred**2, axis=axis, keepdims=True) / np.maximum(number - ddof, 1)
    return centred / (np.sqrt(variance) + eps)


def segment_priorities(advantage, mask=None, *, alpha, eps=1e-6):
    """Return the probability of each column: PufferLib's priority, over the columns with a step that counts."""
    advantage, counts = _with_mask(advantage, mask)
    total = np.sum(np.abs(counts * advantage), axis=0)
    priority = np.where(counts.any(axis=0), np.where(np.isfinite(total), total, 0) ** alpha + eps, 0)
    return priority / (priority.sum() or 1)


def importance_weights(probabilities, indices, *, beta):
    """Compute arXiv:1511.05952, section 3.4; segments that cannot be drawn have weight 0 and do not count in N."""
    probabilities = np.asarray(probabilities, np.float64)
    drawable = probabilities > 0
    weight = drawable * np.where(drawable, drawable.sum() * probabilities, 1) ** -beta
    return weight[np.asarray(indices)]
