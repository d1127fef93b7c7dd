"""One update of PPO in NumPy with linear networks, into which one fault at a time can be planted."""

import numpy as np
from scipy.special import log_softmax

from tests import reference

TIME, ENVS, EPOCHS, MINIBATCHES = 16, 4, 2, 2
GAMMA, LAMBDA, CLIP, VALUE_COEF, ENTROPY_COEF, RATE, MAX_NORM = 0.99, 0.95, 0.2, 0.5, 0.01, 0.1, 0.5

CHAIN = f"""pp.chain(
    pp.gae(gamma={GAMMA}, gae_lambda={LAMBDA}),
    pp.shuffled_minibatches({MINIBATCHES}, {EPOCHS}),
    pp.advantage_normalize(ddof=1),
    pp.clipped_surrogate(clip_eps={CLIP}),
    pp.value_loss(coef={VALUE_COEF}),
    pp.entropy_bonus(coef={ENTROPY_COEF}),
)"""
OPTIMIZER = f"pp.clipped_adam({RATE}, max_grad_norm={MAX_NORM}, eps=1e-5)"

FAULTS = {  # by the stage where they show
    "policy": ("stale log-probabilities", "values of other parameters"),
    "advantage": ("gamma 0.95", "done one step late", "time limits ignored", "trace through time limits",
                  "target is the advantage"),
    "loss": ("standardized over the rollout", "not standardized", "value clipped", "clip of the log-ratio",
             "ratio inverted", "rows by environment", "loss summed", "ascent",
             "entropy penalized"),
    "gradient": ("gradients not zeroed", "gradient through the clip", "value gradient halved"),
    "optimizer": ("no bias correction", "gradient not clipped", "rate decays per step", "weight decay",
                  "elements clipped", "moments reset in each epoch"),
}  # fmt: skip


def estimates(z, fault):
    gamma = 0.95 if fault == "gamma 0.95" else GAMMA
    reward, value, following = z["reward"], z["value"], z["next_value"].copy()
    terminated, truncated = z["terminated"].copy(), z["truncated"].copy()
    if fault == "done one step late":
        terminated = np.concatenate([0 * terminated[:1], terminated[:-1]])
    if fault == "time limits ignored":
        following[:-1] = np.where(truncated[:-1], value[1:], following[:-1])
    if fault in ("time limits ignored", "trace through time limits"):
        truncated = 0 * truncated
    ends = terminated, truncated
    advantage, target = reference.gae(reward, value, following, *ends, gamma=gamma, gae_lambda=LAMBDA)
    return advantage, advantage if fault == "target is the advantage" else target


def loss_and_gradient(params, rows, advantage, fault):
    """Return a minibatch's loss, its terms, and the gradient derived by hand."""
    size, action, old = len(rows["obs"]), rows["action"], rows["log_prob"]
    logits = log_softmax(rows["obs"] @ params["policy"], axis=-1)
    probability, onehot = np.exp(logits), np.eye(2)[action]
    log_prob, value = logits[np.arange(size), action], rows["obs"] @ params["value"]
    log_ratio = old - log_prob if fault == "ratio inverted" else log_prob - old
    ratio = np.exp(log_ratio)
    clipped = np.clip(ratio, 1 - CLIP, 1 + CLIP)
    if fault == "clip of the log-ratio":
        clipped = np.exp(np.clip(log_ratio, -0.05, 0.05))
    surrogate = np.maximum(-advantage * ratio, -advantage * clipped)
    sign = -1 if fault == "ascent" else 1
    through = sign * (surrogate == -advantage * ratio) | (fault == "gradient through the clip")
    error, slope = 0.5 * (value - rows["target"]) ** 2, value - rows["target"]
    if fault == "value clipped":
        near = rows["value"] + np.clip(value - rows["value"], -0.1, 0.1)
        other = 0.5 * (near - rows["target"]) ** 2
        slope = np.where(other > error, np.where(near == value, near - rows["target"], 0), slope)
        error = np.maximum(error, other)
    entropy = -(probability * logits).sum(axis=-1)
    bonus = -ENTROPY_COEF if fault == "entropy penalized" else ENTROPY_COEF
    mean = (lambda x: x.sum()) if fault == "loss summed" else (lambda x: x.mean())
    numbers = {"policy_loss": sign * mean(surrogate), "value_loss": mean(error), "entropy": mean(entropy)}
    numbers["loss"] = numbers["policy_loss"] + VALUE_COEF * numbers["value_loss"] - bonus * numbers["entropy"]
    of_entropy = -probability * (logits + entropy[:, None])
    of_logits = (through * -advantage * ratio)[:, None] * (onehot - probability) - bonus * of_entropy
    value_coef = VALUE_COEF * (0.5 if fault == "value gradient halved" else 1)
    return numbers, {"policy": rows["obs"].T @ of_logits / size, "value": value_coef * rows["obs"].T @ slope / size}


def adam(params, gradient, moments, step, fault):
    norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
    scale = 1.0 if fault == "gradient not clipped" else min(1.0, MAX_NORM / norm)
    b1, b2, eps = 0.9, 0.999, 1e-5
    rate = RATE * (1 - step / 10) if fault == "rate decays per step" else RATE
    after, kept = {}, {}
    for name, g in gradient.items():
        m, v = moments[name]
        g = np.clip(g, -0.5, 0.5) if fault == "elements clipped" else scale * g
        kept[name] = m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        count = step + 1 if fault != "moments reset in each epoch" else step % MINIBATCHES + 1
        corrections = (1.0, 1.0) if fault == "no bias correction" else (1 - b1**count, 1 - b2**count)
        decay = 0.01 * params[name] if fault == "weight decay" else 0
        after[name] = params[name] - rate * (m / corrections[0] / (np.sqrt(v / corrections[1]) + eps) + decay)
    return after, kept


def record_update(fault=None):
    """Return the record of one update with a fault."""
    rng = np.random.default_rng(0)
    params = {"policy": rng.normal(size=(3, 2)), "value": rng.normal(size=3)}
    acted = {name: 1.1 * x for name, x in params.items()}
    obs = rng.normal(size=(TIME + 1, ENVS, 3))
    kind = rng.choice(3, size=(TIME, ENVS), p=(0.7, 0.15, 0.15))
    z = {"obs": obs[:-1], "next_obs": np.where((kind == 2)[..., None], rng.normal(size=(TIME, ENVS, 3)), obs[1:])}
    z |= {"terminated": (kind == 1).astype(float), "truncated": (kind == 2).astype(float)}
    z["action"], z["reward"] = rng.integers(2, size=(TIME, ENVS)), 2 * rng.normal(size=(TIME, ENVS))
    of_policy = acted if fault == "stale log-probabilities" else params
    log_probs = log_softmax(z["obs"] @ of_policy["policy"], axis=-1)
    z["log_prob"] = np.take_along_axis(log_probs, z["action"][..., None], axis=-1)[..., 0]
    of_value = acted if fault == "values of other parameters" else params
    z["value"], z["next_value"] = z["obs"] @ of_value["value"], z["next_obs"] @ of_value["value"]
    z["advantage"], z["target"] = estimates(z, fault)
    flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in z.items()}
    record = z | {"params": params}
    if fault == "rows by environment":
        flat = {name: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]) for name, x in z.items()}
    advantage = flat["advantage"]
    steps, moments = [], {name: (0 * x, 0 * x) for name, x in params.items()}
    indices = np.stack([rng.permutation(TIME * ENVS).reshape(MINIBATCHES, -1) for _ in range(EPOCHS)])
    before = {name: 0 * x for name, x in params.items()}
    for step, rows in enumerate(indices.reshape(-1, indices.shape[-1])):
        used, of = advantage[rows], advantage if fault == "standardized over the rollout" else advantage[rows]
        if fault != "not standardized":
            used = (used - of.mean()) / (of.std(ddof=1) + 1e-8)
        numbers, gradient = loss_and_gradient(params, {name: x[rows] for name, x in flat.items()}, used, fault)
        if fault == "gradients not zeroed":
            gradient = before = {name: before[name] + g for name, g in gradient.items()}
        if fault == "moments reset in each epoch" and step % MINIBATCHES == 0:
            moments = {name: (0 * x, 0 * x) for name, x in params.items()}
        params, moments = adam(params, gradient, moments, step, fault)
        steps.append(numbers | {f"gradient/{name}": g for name, g in gradient.items()})
        steps[-1] |= {f"params_after/{name}": x for name, x in params.items()}
    record["indices"] = indices
    return record | {name: np.stack([step[name] for step in steps]) for name in steps[0]}
