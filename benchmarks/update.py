"""What does a chain cost? The updates of the recipes against handwritten functions that do exactly the same work.

    python -m benchmarks update cleanrl pufferlib ippo --json benchmarks/results/update.jsonl#cpu

The rivals are in the style of PureJaxRL, with everything inlined (but without an unrolled scan, which is slower on
CPUs). Network, optax's transformations and random numbers are the same, so both end with the same parameters, which is
asserted before anything is timed. `with_diagnostics` returns every metric that the learner reports (asserted as well);
`handwritten` returns only the loss, so XLA removes the other metrics.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from ppo_parts import training
from ppo_parts.recipes import cleanrl_ppo, ippo, pufferlib_ppo

from . import _timing
from ._by_hand import State, cleanrl_by_hand, ippo_by_hand, pufferlib_by_hand
from ._records import collect, make_parser

SIZES = ((128, 4), (128, 64), (128, 1024))
RECIPES: dict[str, tuple[Any, Callable[..., Any]]] = {
    "cleanrl": (cleanrl_ppo, cleanrl_by_hand), "pufferlib": (pufferlib_ppo, pufferlib_by_hand),
    "ippo": (ippo, ippo_by_hand),
}  # fmt: skip


def make_both(recipe: str, **settings: Any) -> tuple[training.Train, State, Callable[..., Any]]:
    """Make the run of a recipe, and the first state and the update of its rival."""
    module, by_hand = RECIPES[recipe]
    config = module.Config(**settings, microbatch=None)  # because the rival evaluates minibatches whole
    train = module.make_train(config)
    optimizers, update = by_hand(config, train.policy)
    params = train.init(jax.random.key(0)).learner.params
    opt_state = {name: each.init(params[name] if name else params) for name, each in optimizers.items()}
    return train, State(params, opt_state), update


def measure(recipe: str, steps: int, environments: int, rounds: int) -> dict[str, Any]:
    """Compile, check and time the three programs at one size."""
    sizes = {"num_steps": steps, "num_envs": environments, "total_timesteps": 100 * steps * environments}
    train, state, by_hand = make_both(recipe, **sizes)
    key, batch = jax.random.key(1), jax.jit(functools.partial(_timing.make_rollout, train))(jax.random.key(2))

    def loss_alone(*args: Any) -> tuple[State, list[jax.Array]]:
        state, metrics = by_hand(*args)
        return state, [x for name, x in metrics.items() if name.rpartition("/")[2] == "loss"]

    programs = {
        "ours": (train.learner.update, train.learner.init(state.params)),
        "handwritten": (loss_alone, state),
        "with_diagnostics": (by_hand, state),
    }
    thunks, compiling = {}, {}
    for name, (function, start) in programs.items():
        call, compiling[name] = _timing.compile_cold(function, key, start, batch)
        thunks[name] = functools.partial(call, key, start, batch)
    results = {name: thunk() for name, thunk in thunks.items()}
    # Muon amplifies rounding: after 16 steps on 131,072 elements, parameters differ by 1e-3.
    _timing.assert_same({name: state.params for name, (state, _) in results.items()}, 5e-3)
    _timing.assert_same({name: dict(results[name][1]) for name in ("ours", "with_diagnostics")})
    taken = _timing.interleave(thunks, rounds, at_least=0.02, long=1)
    return {
        "recipe": recipe,
        "size": [steps, environments],
        "rounds": len(taken["ours"]),
        "compile_seconds": compiling,
        "run_ms": {name: _timing.summarize(values, 1e3)["median"] for name, values in taken.items()},
        "ours_over": {rival: _timing.compare(taken, "ours", rival) for rival in ("handwritten", "with_diagnostics")},
    }


def main() -> None:
    """Print a row for each recipe and size; write them with `--json`."""
    parser = make_parser(__doc__, sizes=SIZES, rounds=41, json=None)
    parser.add_argument("recipes", nargs="+", choices=RECIPES)
    options = parser.parse_args()
    sized = [(recipe, *each) for recipe in options.recipes for each in options.sizes]
    collect(options.json, (measure(*each, options.rounds) for each in sized))
