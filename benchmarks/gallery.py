"""Learning curves of variants of the gallery on small tasks: the lines of its tables, and the code of its cards.

    python -m benchmarks gallery two-hot PopArt

Each becomes a record of benchmarks/results/gallery.jsonl, which the site draws beside the variant. Nothing is tuned.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.envs._wrappers import _with_observations

from ._options import parser
from ._records import RESULTS, ROOT, write
from ._runs import keys_of, seeds_of, side_by_side
from .paper_index import GAE, NORMALIZED, ppo

F, POINTS, FEATURES, RATE = pp.functional, 16, 64, 1e-3
CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"
CHOICES, BANDITS, CHUNKS = "a choice with a cost", "bandits with four arms", "CartPole-v1, two actions at once"
SIZES = {CARTPOLE: (50_000, 8, 128), PENDULUM: (200_000, 16, 128), CHOICES: (50_000, 16, 20)}
"""Environment steps of each seed, environments, and steps of a rollout; other tasks have those of CartPole."""


class Variant(NamedTuple):
    """A chain, and what differs from a network with two layers, annealed Adam and the return on CartPole."""

    chain: pp.Part
    policy: pp.Policy | None = None
    env: envs.Env | None = None
    task: str = CARTPOLE
    optimizer: Any = None
    measure: str = "episode_return"
    keep_info: tuple[str, ...] = ()
    without: str | None = "PPO"


@functools.cache
def card(page: str, heading: str) -> Any:
    """What the code at the top of a page of the gallery, and that of a card, defines."""
    top, *cards = re.split(r"^## ", (ROOT / f"docs/gallery/{page}.md").read_text(), flags=re.MULTILINE)
    [own] = [text for text in cards if text.startswith(f"{heading}\n")]
    module = types.ModuleType(page)
    for source in re.findall(r"^```python\n(.*?)^```$", top + own, re.MULTILINE | re.DOTALL):
        exec(source, vars(module))
    return module


def prepared(task: str, features: bool = False) -> envs.Env:
    """A normalized task; perhaps with random features of its observations, because the cards' policies are linear."""
    env = envs.prepare(envs.make(task), normalize=True, gamma=0.99)
    if not features:
        return env
    size = env.observation_space.shape[0]
    keys = jax.random.split(jax.random.key(0))
    weights = jax.random.normal(keys[0], (size, FEATURES - size))
    bias = jax.random.normal(keys[1], FEATURES - size)

    def change(obs: jax.Array) -> jax.Array:
        return jnp.concatenate([obs, jnp.tanh(obs @ weights + bias)], axis=-1)

    return _with_observations(env, change)._replace(observation_space=envs.Box((FEATURES,)))


def policy_of(evaluate: Any, shapes: Any, draws: bool = False) -> pp.Policy:
    """A policy whose first parameters are random in matrices and 0 elsewhere, or as given."""

    def init(key: jax.Array) -> Any:
        leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
        keys = jax.random.split(key, len(leaves))
        return jax.tree.unflatten(
            structure,
            [
                jnp.float32(x) if not isinstance(x, tuple)
                else jax.random.normal(k, x) / x[0] ** 0.5 if len(x) > 1 else jnp.zeros(x)
                for k, x in zip(keys, leaves, strict=True)
            ]
        )  # fmt: skip

    return pp.Policy(init, evaluate, draws=draws)


def linear(task: str = CARTPOLE) -> Variant:
    """Plain PPO with a linear policy, with which those of the cards are compared."""

    def evaluate(params: Any, batch: pp.Batch) -> Any:
        out = batch.obs @ params["policy"]
        std = jnp.broadcast_to(jnp.exp(params["log_std"]), out.shape)
        distribution = pp.distributions.Normal(out, std) if task == PENDULUM else pp.distributions.Categorical(out)
        return distribution, batch.obs @ params["value"]

    shapes = {"policy": (FEATURES, 2 - (task == PENDULUM)), "value": (FEATURES,), "log_std": 0.0}
    return on_features(ppo(), evaluate, shapes, task)


def on_features(
    chain: pp.Part, evaluate: Any, shapes: Any, task: str = CARTPOLE, draws: bool = False, optimizer: Any = None
) -> Variant:
    """A chain with the policy of a card, which is linear in random features."""
    policy, env = policy_of(evaluate, shapes, draws), prepared(task, features=True)
    return Variant(chain, policy, env, task, optimizer, without=f"PPO, linear, {task}")


def recurrent(module: Any, chain: pp.Part) -> Variant:
    """A chain with the policy of a card that has a memory."""
    module.OBS = FEATURES
    policy = pp.Policy(module.init, module.evaluate, module.initial_carry)
    return Variant(chain, policy, prepared(CARTPOLE, features=True), without=f"PPO, linear, {CARTPOLE}")


def train_of(variant: Variant) -> training.Train:
    """The run of a variant."""
    steps, num_envs, num_steps = SIZES.get(variant.task, SIZES[CARTPOLE])
    config = training.Config(env_id=variant.task, total_timesteps=steps, num_envs=num_envs, num_steps=num_steps)
    env = variant.env or prepared(variant.task)
    policy = variant.policy or networks.actor_critic(env)
    optimizer = variant.optimizer or pp.clipped_adam(pp.linear_schedule(RATE, 0.0, config.num_updates), 0.5)
    return training.Train.of(config, env, policy, variant.chain, optimizer, keep_info=variant.keep_info)


def like(variant: Variant) -> pp.Batch:
    """The shapes of a rollout, for a replay of it."""
    train = train_of(variant)
    return jax.eval_shape(train.collect, train.shapes[0])[1]


def on_pendulum(chain: pp.Part) -> Variant:
    """A chain for continuous actions."""
    return Variant(chain, task=PENDULUM, without=f"PPO, {PENDULUM}")


def classifying(name: str) -> Variant:
    """Critics that classify."""
    module = card("values", "Critics that classify")
    shapes = {"quantiles": (FEATURES, 41), "logits": (FEATURES, 41), "policy": (FEATURES, 2)}

    def evaluate(params: Any, batch: pp.Batch) -> pp.Output:
        out = module.evaluate(params, batch)
        return out._replace(value=jnp.mean(out.aux["quantiles"], axis=-1)) if name == "quantile" else out

    return on_features(ppo(critic=module.critics[name]), evaluate, shapes)


def popart() -> Variant:
    """Normalized targets."""
    module = card("values", "PopArt")
    critic = {"w": (FEATURES,), "b": 0.0, "mean": 0.0, "scale": 1.0}
    return on_features(module.pipeline, module.evaluate, {"policy": (FEATURES, 2), "critic": critic})


def phasic() -> Variant:
    """A phase that distills values every 16 updates."""
    module = card("values", "Phasic policy gradient")
    policy = {"body": (FEATURES, 64), "logits": (64, 2), "value": (64,)}
    shapes = {"policy": policy, "value": (FEATURES,)}
    seen = like(linear())
    chain = module.phasic(seen.replace(target=seen.value), num_rollouts=16)
    adam = pp.clipped_adam(RATE, 0.5)
    return on_features(chain, module.evaluate, shapes, optimizer=dict.fromkeys(("policy", "value", "auxiliary"), adam))


def decoupled() -> Variant:
    """Features that predict advantages."""
    module = card("values", "Decoupled advantages")
    policy = {"body": (FEATURES, 64), "logits": (64, 2), "advantage": (64, 2)}
    optimizer = dict.fromkeys(("policy", "value"), pp.clipped_adam(RATE, 0.5))
    return on_features(module.daac, module.evaluate, {"policy": policy, "value": (FEATURES,)}, optimizer=optimizer)


def pqn() -> Variant:
    """Q-learning."""
    module = card("values", "Q-learning")
    return on_features(module.pqn, module.epsilon_greedy, {"hidden": (FEATURES, 64), "q": (64, 2)})


def reppo() -> Variant:
    """Pathwise gradients."""
    module = card("values", "Pathwise gradients")
    shapes: dict[str, Any] = {"policy": (FEATURES, 1), "hidden": (FEATURES + 1, 64), "q": (64,)}
    shapes |= {f"log_{name}": x for name, x in {"std": 0.0, "alpha": -2.0, "beta": 0.0}.items()}
    return on_features(module.reppo, module.evaluate, shapes, PENDULUM, draws=True)


def flow() -> Variant:
    """A flow as the policy."""
    module = card("losses", "Flow policies")
    shapes = {"obs": (FEATURES, 64), "action": (1, 64), "tau": (64,), "velocity": (64, 1), "value": (FEATURES,)}
    return on_features(module.fpo, module.evaluate, shapes, PENDULUM, draws=True)


def dormant() -> Variant:
    """Units that are reset."""
    module = card("updates", "Dormant units")
    shapes = {"hidden": (FEATURES, 64), "policy": (64, 2), "value": (64,)}
    return on_features(module.plastic, module.tanh_policy, shapes, optimizer=optax.adam(RATE))


def constrained(limit: float) -> Variant:
    """Where an expensive action has a limit."""
    module = card("values", "Constraints")
    policy = policy_of(module.evaluate, {"policy": (1, 2), "value": (1, 2)})
    keep: Any = {"keep_info": ("cost",), "without": "no limit"}
    return Variant(module.constrained(limit), policy, module.env, CHOICES, measure="cost", **keep)


def objectives(weight: float) -> Variant:
    """Where the square of an effort is a cost, with a weight."""
    module = card("values", "Several objectives")

    def measured(batch: pp.Batch) -> pp.Batch:
        reward, cost = jnp.moveaxis(batch.reward, -1, 0)
        return batch.add_metrics(weighted=jnp.mean(reward - 2 * cost))

    first, *rest = module.weighted((1.0, -weight)).parts
    policy = policy_of(module.evaluate, {"policy": (1, 1), "value": (1, 2)})
    chain = pp.chain(first, pp.stateless(measured, name="measured", place="before_sampler"), *rest)
    keep: Any = {"keep_info": ("cost",), "without": "no weight"}
    return Variant(chain, policy, module.env, CHOICES, measure="weighted", **keep)


def rule(obs: jax.Array) -> jax.Array:
    """Where the teacher of a card pushes the cart."""
    return obs @ jnp.array([0.0, 0.5, 10.0, 2.0])


def cloning() -> Variant:
    """PPO with demonstrations of the rule."""
    obs = jax.random.uniform(jax.random.key(0), (1024, 4), minval=-0.3, maxval=0.3)
    data = obs, (rule(obs) > 0).astype(jnp.int32)
    given = pp.stateless(
        lambda batch: batch.replace(shared={"demonstrations": data}), name="given",
        provides=("shared.demonstrations",), place="before_sampler",
    )  # fmt: skip
    return Variant(pp.chain(given, card("imitation", "Cloning and self-imitation").cloning), env=envs.make(CARTPOLE))


def distillation() -> Variant:
    """A student that does not see how fast the cart moves."""
    module, env = card("imitation", "Distillation"), envs.make(CARTPOLE)

    def change(obs: jax.Array) -> envs.Observation:
        return envs.Observation(obs.at[..., 1].set(0), privileged=obs)

    seen = _with_observations(env, change)
    return Variant(module.pipeline, policy_of(module.student, (4, 2)), seen)


def imitating() -> Variant:
    """A phase that replays good steps."""
    module, adam = card("imitation", "Cloning and self-imitation"), pp.clipped_adam(RATE, 0.5)
    seen = like(Variant(ppo()))
    chain = module.imitating(seen.add_extras(returns=seen.value))
    return Variant(chain, optimizer={"ppo": adam, "imitation": adam})


def options() -> Variant:
    """Policies that stay in charge."""
    module = card("networks", "Options")
    return Variant(module.optioned, module.options, module.env)


def chunks() -> Variant:
    """CartPole with two actions at once."""
    import gymnax

    module, (inner, params) = card("networks", "Action chunks"), gymnax.make(CARTPOLE)

    def step(key: jax.Array, state: Any, action: jax.Array) -> envs.Step:
        obs, state, reward, done, *_ = inner.step_env(key, state, action, params)
        return envs.Step(state, obs, reward, done)

    def reset(key: jax.Array) -> tuple[Any, jax.Array]:
        obs, state = inner.reset_env(key, params)
        return state, obs

    env = envs.auto_reset(reset, module.in_chunks(step, 0.99), envs.Box((4,)), envs.MultiDiscrete((2, 2)))
    return Variant(ppo(estimate=module.chunked_gae), env=env, task=CHUNKS, keep_info=("discount",))


def trials(**memory: Any) -> Variant:
    """Ten pulls of a bandit with four arms, one of which pays."""

    def reset(key: jax.Array, task: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(()), jnp.zeros(1)

    def step(key: jax.Array, task: jax.Array, state: jax.Array, action: jax.Array) -> envs.Step:
        return envs.Step(state, jnp.zeros(1), jnp.where(action == task, 1.0, 0.0), terminated=True)

    begin, play = card("networks", "Memory across episodes").trials(
        lambda key: jax.random.randint(key, (), 0, 4), reset, step, episodes=10, num_actions=4
    )
    env = envs.auto_reset(begin, play, envs.Box((7,)), envs.Discrete(4))
    policy = networks.actor_critic(env, (64,), shared=True, **memory)
    return Variant(ppo(sampler=pp.segment_minibatches(4, num_epochs=4)), policy, env, BANDITS, without="no memory")


@functools.cache
def line(name: str) -> Any:
    """What the line of a row of the gallery's tables makes."""
    text = (ROOT / "docs/gallery/README.md").read_text()
    [row] = re.findall(rf"^\| \[?{re.escape(name)}\b.*", text, re.MULTILINE)
    [code] = [cell.strip("`") for cell in row.split(" | ") if cell.startswith(("`pp.", "`optax."))]
    symmetry = {"mirrored": lambda x: x * jnp.array([1.0, -1.0, -1.0]) if x.shape[-1] == 3 else -x}  # of Pendulum-v1
    return eval(code, {"pp": pp, "optax": optax, "F": F} | symmetry)


VARIANTS: dict[str, Callable[[], Variant]] = {
    "PPO": lambda: Variant(ppo(), without=None),
    "PPO, Pendulum-v1": lambda: Variant(ppo(), task=PENDULUM, without=None),
    f"PPO, linear, {CARTPOLE}": linear,
    f"PPO, linear, {PENDULUM}": lambda: linear(PENDULUM),
    "λ = 1": lambda: Variant(ppo(estimate=pp.gae(gamma=0.99, gae_lambda=1.0))),
    "Adam alone": lambda: Variant(ppo(), optimizer=optax.adam(RATE)),
    "no limit": lambda: constrained(1.0), "no weight": lambda: objectives(0.0), "no memory": trials,
    **{
        name: functools.partial(lambda name, place: Variant(ppo(**{place: line(name)})), name, place)
        for place, names in {
            "surrogate": ("clip-higher", "unclipped"),
            "critic": ("squared error",),
            "estimate": ("V-trace, policy gradient",),
        }.items()
        for name in names
    },
    "REINFORCE": lambda: Variant(ppo(surrogate=line("REINFORCE"), sampler=pp.full_batch())),
    "RPO": lambda: on_pendulum(ppo(normalize=pp.chain(NORMALIZED, line("RPO")))),
    "CAPS": lambda: on_pendulum(ppo(line("CAPS"))),
    "mirror loss": lambda: on_pendulum(ppo(line("mirror loss"))),
    "mirrored rollouts": lambda: on_pendulum(ppo(estimate=pp.chain(GAE, line("mirrored rollouts")))),
    **{
        name: functools.partial(lambda name: Variant(ppo(), optimizer=line(name)), name)
        for name in ("weight decay", "Muon", "a flat minimum", "several minibatches", "non-finite gradients")
    },
    "TRGPPO": lambda: Variant(card("losses", "A clip for each element").trgppo),
    "REPPO": reppo, "FPO": flow, "action chunks": chunks,
    "GePPO": lambda: Variant(card("updates", "Earlier rollouts").geppo(like(Variant(ppo())))),
    "burn-in": lambda: recurrent(m := card("networks", "Time chunks with burn-in"), m.pipeline),
    "quantiles": lambda: classifying("quantile"), "two-hot": lambda: classifying("two-hot"),
    "HL-Gauss": lambda: on_features(
        (m := card("values", "HL-Gauss")).pipeline, m.evaluate, {"value": (FEATURES, 51), "policy": (FEATURES, 2)}
    ),
    "PopArt": popart, "PPG": phasic, "DAAC": decoupled, "PQN": pqn,
    "several objectives": lambda: objectives(2.0), "costs": lambda: constrained(0.3),
    "self-imitation": imitating, "cloning": cloning, "distillation": distillation, "options": options,
    "RL²": lambda: trials(memory="gru"),
    "LRU": lambda: recurrent(m := card("networks", "Linear recurrent units"), m.lru),
    "DrAC": lambda: Variant(card("regularizers", "DrAC").pipeline), "dormant units": dormant,
}  # fmt: skip


def curve_of(variant: Variant, seeds: range) -> np.ndarray:
    """The measure in equal parts of a training, `[POINTS, seeds]`."""
    train = train_of(variant)

    def run(key: jax.Array) -> jax.Array:
        metrics = train(key).metrics
        number = metrics["episodes"] if variant.measure == "episode_return" else jnp.ones(train.num_updates)
        total = jnp.where(number > 0, metrics[variant.measure] * number, 0)
        parts = [jnp.array_split(x, POINTS) for x in (total, number)]
        return jnp.stack([jnp.sum(x) / jnp.sum(n) for x, n in zip(*parts, strict=True)])

    return side_by_side(run)(keys_of(seeds)).T


def main() -> None:
    """Command line."""
    options = parser(__doc__, seeds=10, first_seed=1)
    options.add_argument("names", nargs="*", metavar="variant", help=f"of {', '.join(VARIANTS)}; none: all of them")
    given = options.parse_args()
    if unknown := set(given.names) - set(VARIANTS):
        options.error(f"no such variant: {', '.join(sorted(unknown))}")
    for name in given.names or VARIANTS:
        variant = VARIANTS[name]()
        curve = curve_of(variant, seeds := seeds_of(given))
        found = {"task": variant.task, "measure": variant.measure, "without": variant.without, "seeds": list(seeds)}
        print(f"{name:30} {curve[0].mean():10.4g} {curve[-1].mean():10.4g}", flush=True)
        write(f"{RESULTS}/gallery.jsonl#{name}", found | {"curve": [[float(f"{x:.4g}") for x in row] for row in curve]})
