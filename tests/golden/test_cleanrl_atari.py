"""CleanRL's `ppo_atari.py`, number by number: the convolutional network, and its updates by our chain and learner.

As in `test_cleanrl.py`, only rollouts and minibatch indices are taken from the recording. The first parameters
are drawn again, and those of later steps are compared as sums (`golden/_sketch.py`), in float64.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import envs, networks
from tests.golden import _sketch
from tests.golden.test_cleanrl import played
from tests.golden_traces import METRICS, Arrays, load

BOUND = 1e-5  # torch divides by the gradient's norm + 1e-6, and optax takes Adam's bias correction in float32
LAYERS = {  # ours: CleanRL's name, the shape of its weight, its gain
    "Conv_0": ("network.0", (32, 4, 8, 8), 2**0.5),
    "Conv_1": ("network.2", (64, 32, 4, 4), 2**0.5),
    "Conv_2": ("network.4", (64, 64, 3, 3), 2**0.5),
    "Dense_0": ("network.7", (512, 64 * 7 * 7), 2**0.5),
    "Dense_1": ("actor", (4, 512), 0.01),
    "Dense_2": ("critic", (1, 512), 1.0),
}


def first_params() -> dict:
    """The parameters that the recorder drew, in our layout: height, width and channels, then features."""
    params = {}
    for number, (ours, (_, shape, gain)) in enumerate(LAYERS.items()):
        weight = _sketch.drawn(shape, gain, number)
        if ours == "Dense_0":  # flattened from [C, H, W] there, and from [H, W, C] here
            weight = weight.reshape(512, 64, 7, 7).transpose(0, 2, 3, 1).reshape(512, -1)
        kernel = weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T
        params[ours] = {"kernel": jnp.asarray(kernel, float), "bias": jnp.zeros(shape[0])}
    return {"params": params}


def sums(params: dict) -> Arrays:
    """The recorded sums of parameters, by CleanRL's names."""
    found = {}
    for ours, (name, _, _) in LAYERS.items():
        kernel = np.asarray(params["params"][ours]["kernel"])
        weight = kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T
        if ours == "Dense_0":
            weight = weight.reshape(512, 7, 7, 64).transpose(0, 3, 1, 2)
        found[f"{name}.weight"] = _sketch.sketch(weight)
        found[f"{name}.bias"] = _sketch.sketch(np.asarray(params["params"][ours]["bias"]))
    return found


@pytest.mark.lenient_ranks  # of flax
def test_learner_reproduces_cleanrl_on_frames():
    z = load("cleanrl_pufferlib/cleanrl_f_atari")
    args = json.loads(str(z["meta"]))["args"]
    spaces = {"observation_space": envs.Box((4, 84, 84), 0, 255), "action_space": envs.Discrete(4)}
    policy = networks.nature_cnn(envs.make("CartPole-v1")._replace(**spaces))
    rate = pp.linear_schedule(args["learning_rate"], 0.0, args["num_iterations"])
    with jax.enable_x64(True):
        params = first_params()
        start = sums(params)
        for name, first in start.items():
            np.testing.assert_array_equal(first, z[f"it0/params_start/{name}"], name)
        optimizer = pp.clipped_adam(rate, args["max_grad_norm"])
        for i, (recorded, state, metrics) in enumerate(played(z, args, params, policy, optimizer)):
            for theirs, ours in {**METRICS, "grad_norm": "grad_norm"}.items():
                np.testing.assert_allclose(metrics[ours], recorded[f"mb/{theirs}"].mean(), BOUND, 1e-12, err_msg=ours)
            for name, ours in sums(state.params).items():
                theirs = recorded[f"mb/param_after/{name}"][-1]
                traveled = np.abs(theirs - start[name]).max()
                np.testing.assert_allclose(ours, theirs, 0, BOUND * traveled, err_msg=f"{name}, iteration {i}")
