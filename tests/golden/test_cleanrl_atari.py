"""CleanRL's `ppo_atari.py`, number by number: the convolutional network, and its updates by our chain and learner.

As in `test_cleanrl.py`, only rollouts and minibatch indices are taken from the recording. The first parameters are
drawn again; those of later steps are compared by their losses and the norms of their gradients, in float64.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import envs, networks
from tests.golden._recorder import drawn
from tests.golden.test_cleanrl import played
from tests.golden_traces import METRICS, load

BOUND = 1e-5  # torch divides by the gradient's norm + 1e-6, and optax takes Adam's bias correction in float32
LAYERS = {  # our name: the shape of CleanRL's weight, its gain
    "Conv_0": ((32, 4, 8, 8), 2**0.5),
    "Conv_1": ((64, 32, 4, 4), 2**0.5),
    "Conv_2": ((64, 64, 3, 3), 2**0.5),
    "Dense_0": ((512, 64 * 7 * 7), 2**0.5),
    "Dense_1": ((4, 512), 0.01),
    "Dense_2": ((1, 512), 1.0),
}


def first_params() -> dict:
    """The parameters that the recorder drew, in our layout: height, width and channels, then features."""
    params = {}
    for number, (ours, (shape, gain)) in enumerate(LAYERS.items()):
        weight = drawn(shape, gain, number)
        if ours == "Dense_0":  # flattened from [C, H, W] there, and from [H, W, C] here
            weight = weight.reshape(512, 64, 7, 7).transpose(0, 2, 3, 1).reshape(512, -1)
        kernel = weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T
        params[ours] = {"kernel": jnp.asarray(kernel, float), "bias": jnp.zeros(shape[0])}
    return {"params": params}


@pytest.mark.lenient_ranks  # of flax
def test_learner_reproduces_cleanrl_on_frames():
    z = load("cleanrl_pufferlib/cleanrl_f_atari")
    args = json.loads(str(z["meta"]))["args"]
    spaces = {"observation_space": envs.Box((4, 84, 84), 0, 255), "action_space": envs.Discrete(4)}
    policy = networks.nature_cnn(envs.make("CartPole-v1")._replace(**spaces))
    rate = pp.linear_schedule(args["learning_rate"], 0.0, args["num_iterations"])
    with jax.enable_x64(True):
        optimizer = pp.clipped_adam(rate, args["max_grad_norm"])
        for recorded, _, metrics in played(z, args, first_params(), policy, optimizer):
            for theirs, ours in {**METRICS, "grad_norm": "grad_norm"}.items():
                np.testing.assert_allclose(metrics[ours], recorded[f"mb/{theirs}"].mean(), BOUND, 1e-12, err_msg=ours)
