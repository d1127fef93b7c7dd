"""Record one update of brax's PPO: `compute_ppo_loss`, its gradient and optimizer, for each minibatch of each epoch.

brax's own loop over minibatches is a closure within `train`, which cannot be called on data; the loop here has its
order of keys, permutations and steps. Before the update the parameters are disturbed, so that the divergence of the
first minibatch is not a rounding error.
"""

import functools
from typing import Any

import _recorder as recorder
import jax
import jax.numpy as jnp
import numpy as np
import optax
from brax.training import types
from brax.training.agents.ppo import losses, networks
from brax.training.agents.ppo import optimizer as ppo_optimizer

OPTIONS = {
    "gamma": ("discounting", 0.95), "gae_lambda": ("gae_lambda", 0.9), "clip_eps": ("clipping_epsilon", 0.1),
    "value_clip_eps": ("clipping_epsilon_value", 0.1), "value_coef": ("vf_coefficient", 0.8),
    "entropy_coef": ("entropy_cost", 0.02), "reward_scale": ("reward_scaling", 2.0),
    "learning_rate": ("learning_rate", 5e-3), "target_kl": ("desired_kl", 0.004),
    "max_grad_norm": ("max_grad_norm", 0.3),
}  # fmt: skip
OPTIMIZING = ("learning_rate", "desired_kl", "max_grad_norm")


def flat(params: losses.PPONetworkParams) -> np.ndarray:
    """Weights in torch's layout `[out, in]`."""
    layers = [net["params"][f"hidden_{i}"] for net in (params.policy, params.value) for i in (0, 1)]
    return np.concatenate([np.ravel(x) for layer in layers for x in (layer["kernel"].T, layer["bias"])])


def update(seed: int, **settings: Any) -> recorder.Arrays:
    jax.config.update("jax_enable_x64", True)
    optimizing = {name: settings.pop(name) for name in OPTIMIZING if name in settings}
    data, keys = recorder.rollout(seed), iter(jax.random.split(jax.random.PRNGKey(seed), 20))
    hidden = (recorder.HIDDEN,)
    made = {"policy_hidden_layer_sizes": hidden, "value_hidden_layer_sizes": hidden, "activation": jnp.tanh}
    nets = networks.make_ppo_networks(recorder.OBS, recorder.ACTIONS, **made)
    behavior = losses.PPONetworkParams(nets.policy_network.init(next(keys)), nets.value_network.init(next(keys)))
    behavior = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), behavior)
    params = jax.tree.map(lambda x: x + 0.02 * jax.random.normal(next(keys), x.shape), behavior)

    policy = networks.make_inference_fn(nets, compute_value=True)((None, behavior.policy, behavior.value))
    action, extras = policy(jnp.asarray(data["obs"]), next(keys))
    ended = data["terminated"] + data["truncated"]
    transition = types.Transition(
        observation=data["obs"], action=action, reward=data["reward"], discount=1 - ended,
        next_observation=data["next_obs"],
        extras={"policy_extras": extras, "state_extras": {"truncation": data["truncated"]}},
    )  # fmt: skip
    segments = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), transition)

    loss = jax.jit(
        jax.value_and_grad(functools.partial(losses.compute_ppo_loss, ppo_network=nets, **settings), has_aux=True)
    )

    def estimates(params: losses.PPONetworkParams, minibatch: types.Transition) -> Any:
        data = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), minibatch)
        truncation = data.extras["state_extras"]["truncation"]
        return losses.compute_gae(
            truncation=truncation, termination=(1 - data.discount) * (1 - truncation),
            rewards=data.reward * settings.get("reward_scaling", 1.0),
            values=nets.value_network.apply(None, params.value, data.observation),
            bootstrap_value=nets.value_network.apply(None, params.value, data.next_observation[-1]),
            lambda_=settings.get("gae_lambda", 0.95), discount=settings.get("discounting", 0.9),
        )  # fmt: skip

    adaptive = "desired_kl" in optimizing
    adam = optax.inject_hyperparams(optax.adam) if adaptive else optax.adam
    optimizer = adam(learning_rate=optimizing.get("learning_rate", 1e-4))
    if "max_grad_norm" in optimizing:
        optimizer = optax.chain(optax.clip_by_global_norm(optimizing["max_grad_norm"]), optimizer)
    state = optimizer.init(params)
    recorded: dict[str, list[Any]] = {"losses": [], "params": [flat(params)], "keys": [], "indices": []}
    key = next(keys)
    for _ in range(recorder.EPOCHS):
        key, key_perm, key_grad = jax.random.split(key, 3)
        rows = np.reshape(jax.random.permutation(key_perm, jnp.arange(recorder.ENVS)), (recorder.MINIBATCHES, -1))
        recorded["indices"].append(rows)
        for row in rows:
            key_grad, key_loss = jax.random.split(key_grad)
            minibatch = jax.tree.map(lambda x, row=row: x[row], segments)
            target, advantage = estimates(params, minibatch)
            (total, metrics), gradient = loss(params, None, minibatch, key_loss)
            if adaptive:
                state, _ = ppo_optimizer.adaptive_kl_learning_rate(state, metrics["kl_mean"], optimizing["desired_kl"])
            updates, state = optimizer.update(gradient, state)
            params = optax.apply_updates(params, updates)
            recorded["losses"].append(total - metrics["entropy_loss"])
            recorded["params"].append(flat(params))
            recorded["keys"].append(np.asarray(key_loss))
    arrays = {name: np.stack(x) for name, x in recorded.items()} | data
    arrays["keys"] = arrays["keys"].reshape(recorder.EPOCHS, recorder.MINIBATCHES, -1)
    arrays |= {"action": np.asarray(action), "value": np.asarray(extras["value"]), "behavior": flat(behavior)}
    arrays["log_prob"] = np.asarray(extras["log_prob"])
    arrays["segments"] = arrays.pop("indices")
    return arrays | {"target": np.asarray(target), "advantage": np.asarray(advantage)}  # of the last minibatch


if __name__ == "__main__":
    recorder.record_library("brax", "brax", update, OPTIONS)
