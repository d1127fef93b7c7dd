"""Learning curves of the gallery's variants on small tasks: the lines of its tables, and the code of its cards.

    python -m benchmarks gallery two-hot PopArt --json mine.jsonl

Each variant is a record of benchmarks/results/gallery.jsonl; the site draws it beside the variant. Nothing is tuned.
"""

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.envs._wrappers import with_observations
from ppo_parts.recipes import trpo

from ._cards import evaluate_line, load_card
from ._records import claim, make_parser, write
from ._seeds import make_keys, select_seeds, vectorize

GAE, NORMALIZED = pp.gae(gamma=0.99, gae_lambda=0.95), pp.advantage_normalize(ddof=1)
PARTS = {  # the parts of CleanRL's `ppo.py`
    "estimate": GAE,
    "sampler": pp.shuffled_minibatches(num_minibatches=4, num_epochs=4),
    "normalize": NORMALIZED,
    "surrogate": pp.clipped_surrogate(clip_eps=0.2),
    "diagnostics": pp.policy_diagnostics(),
    "critic": pp.clipped_value_loss(clip_eps=0.2, coef=0.5),
    "entropy": pp.entropy_bonus(coef=0.01),
}
POINTS, FEATURES, UNITS, RATE = 16, 64, 64, 1e-3
CARTPOLE, PENDULUM, CHOICES = "CartPole-v1", "Pendulum-v1", "a choice with a cost"
SIZES = {CARTPOLE: (50_000, 8, 128), PENDULUM: (200_000, 16, 128), CHOICES: (50_000, 16, 20)}
"""Environment steps per seed, number of environments, and steps per rollout; other tasks have those of CartPole."""
UPDATES = 50_000 // (8 * 128)  # in a run on CartPole
ADAM, LINEAR = pp.clipped_adam(RATE, 0.5), "PPO, linear, "


class Variant(NamedTuple):
    """A chain, and what differs from two-layer networks, annealed Adam and the return on CartPole."""

    chain: pp.Part
    policy: pp.Policy | None = None
    env: envs.Env | None = None
    task: str = CARTPOLE
    optimizer: Any = None
    measure: str = "episode_return"
    keep_info: tuple[str, ...] = ()
    without: str | None = "PPO"


def ppo(*extra: pp.Part, **replaced: pp.Part) -> pp.Part:
    """Make the chain of `PARTS`, with some of them replaced and more parts at its end."""
    return pp.chain(*(PARTS | replaced).values(), *extra)


def add_features(env: envs.Env) -> envs.Env:
    """Add random features to an environment's observations, because the policies of the cards are linear."""
    env, keys = envs.prepare(env, normalize=True, gamma=0.99), jax.random.split(jax.random.key(0))
    sizes = (env.observation_space.shape[0], FEATURES - env.observation_space.shape[0])
    weights, bias = jax.random.normal(keys[0], sizes), jax.random.normal(keys[1], sizes[1:])

    def change(obs: jax.Array) -> jax.Array:
        return jnp.concatenate([obs, jnp.tanh(obs @ weights + bias)], axis=-1)

    return with_observations(env, change)._replace(observation_space=envs.Box((FEATURES,)))


def make_policy(evaluate: Any, shapes: Any, draws: bool = False) -> pp.Policy:
    """Make a policy whose first parameters are random matrices, zero vectors, and the given numbers."""
    leaf = {"is_leaf": lambda x: type(x) is tuple}
    start = jax.tree.map(lambda x: jnp.zeros(x) if isinstance(x, tuple) else jnp.float32(x), shapes, **leaf)

    def init(key: jax.Array) -> Any:
        random = optax.tree_utils.tree_random_like(key, start)
        return jax.tree.map(lambda x, y: y / len(x) ** 0.5 if x.ndim > 1 else x, start, random)

    return pp.Policy(init, evaluate, draws=draws)


def on_features(
    module: Any, chain: str | pp.Part, shapes: Any, evaluate: str = "evaluate", task: str = CARTPOLE,
    draws: bool = False, optimizer: Any = None,
) -> Variant:  # fmt: skip
    """Make a variant of a card's chain with its policy, whose parameters have these shapes."""
    policy = make_policy(getattr(module, evaluate), shapes, draws)
    chain = getattr(module, chain) if isinstance(chain, str) else chain
    return Variant(chain, policy, add_features(envs.make(task)), task, optimizer, without=LINEAR + task)


def make_linear(task: str = CARTPOLE) -> Variant:
    """Make plain PPO with a linear policy."""

    def evaluate(params: Any, batch: pp.Batch) -> Any:
        out, value = batch.obs @ params["policy"], batch.obs @ params["value"]
        if task == CARTPOLE:
            return pp.distributions.Categorical(out), value
        return pp.distributions.Normal(out, jnp.broadcast_to(jnp.exp(params["log_std"]), out.shape)), value

    shapes = {"policy": (FEATURES, 2 if task == CARTPOLE else 1), "value": (FEATURES,), "log_std": 0.0}
    return on_features(types.SimpleNamespace(evaluate=evaluate), ppo(), shapes, task=task)._replace(without=None)


def make_recurrent(heading: str, chain: str) -> Variant:
    """Make a card's variant whose policy has a memory."""
    module = load_card("networks", heading)
    module.OBS = FEATURES
    policy = pp.Policy(module.init, module.evaluate, module.initial_carry)
    return Variant(getattr(module, chain), policy, add_features(envs.make(CARTPOLE)), without=LINEAR + CARTPOLE)


def make_train(variant: Variant) -> training.Train:
    """Make the run of a variant."""
    steps, num_envs, num_steps = SIZES.get(variant.task, SIZES[CARTPOLE])
    config = training.Config(env_id=variant.task, total_timesteps=steps, num_envs=num_envs, num_steps=num_steps)
    env = variant.env or envs.prepare(envs.make(variant.task), normalize=True, gamma=0.99)
    policy = variant.policy or networks.actor_critic(env)
    optimizer = variant.optimizer or pp.clipped_adam(pp.linear_schedule(RATE, 0.0, config.num_updates), 0.5)
    return training.Train.of(config, env, policy, variant.chain, optimizer, keep_info=variant.keep_info)


def trace_rollout(variant: Variant) -> pp.Batch:
    """Return the shapes of a rollout, which a replay of it needs."""
    train = make_train(variant)
    return jax.eval_shape(train.collect, train.shapes[0])[1]


def replacing(place: str, *names: str) -> dict[str, Callable[[], Variant]]:
    """Replace one of `PARTS` in PPO by the line of each of these rows."""
    return {name: lambda name=name: Variant(ppo(**{place: evaluate_line(name)})) for name in names}


def on_pendulum(chain: pp.Part) -> Variant:
    """Make a variant for continuous actions."""
    return Variant(chain, task=PENDULUM, without=f"PPO, {PENDULUM}")


def make_classifying(name: str) -> Variant:
    """Make a variant with a critic that classifies."""
    module = load_card("values", "Critics that classify")

    def evaluate(params: Any, batch: pp.Batch) -> pp.Output:
        out = module.evaluate(params, batch)
        return out._replace(value=jnp.mean(out.aux["quantiles"], axis=-1)) if name == "quantile" else out

    shapes = {"quantiles": (FEATURES, 41), "logits": (FEATURES, 41), "policy": (FEATURES, 2)}
    return on_features(types.SimpleNamespace(evaluate=evaluate), ppo(critic=module.critics[name]), shapes)


def make_phasic() -> Variant:
    """Make a variant with a phase that distills values every 16 updates."""
    module, seen = load_card("values", "Phasic policy gradient"), trace_rollout(make_linear())
    shapes = {"policy": {"body": (FEATURES, UNITS), "logits": (UNITS, 2), "value": (UNITS,)}, "value": (FEATURES,)}
    chain = module.phasic(seen.replace(target=seen.value), num_rollouts=16)
    return on_features(module, chain, shapes, optimizer=dict.fromkeys(("policy", "value", "auxiliary"), ADAM))


def make_constrained(limit: float) -> Variant:
    """Make a variant with an expensive action and a limit."""
    module = load_card("values", "Constraints")
    policy = make_policy(module.evaluate, {"policy": (1, 2), "value": (1, 2)})
    return Variant(module.constrained(limit), policy, module.env, CHOICES, None, "cost", ("cost",), "no limit")


def make_objectives(weight: float) -> Variant:
    """Make a variant with an effort whose square is a cost, with a weight."""
    module = load_card("values", "Several objectives")

    def measured(batch: pp.Batch) -> pp.Batch:
        earned, cost = jnp.mean(batch.reward[..., 0]), jnp.mean(batch.reward[..., 1])
        return batch.add_metrics(weighted=earned - 2 * cost, earned=earned, cost=cost)

    first, *rest = module.weighted((1.0, -weight)).parts
    chain = pp.chain(first, pp.stateless(measured, name="measured", place="before_sampler"), *rest)
    policy = pp.Policy(lambda key: module.params, module.evaluate)
    return Variant(chain, policy, module.env, CHOICES, None, "weighted", ("cost",), "no weight")


def make_cloning() -> Variant:
    """Make PPO with demonstrations of the rule by which a card's teacher pushes the cart."""
    obs = jax.random.uniform(jax.random.key(0), (1024, 4), minval=-0.3, maxval=0.3)
    data = {"demonstrations": (obs, (obs @ jnp.array([0.0, 0.5, 10.0, 2.0]) > 0).astype(jnp.int32))}
    given = pp.stateless(
        lambda batch: batch.replace(shared=data), name="given", provides=("shared.demonstrations",),
        place="before_sampler",
    )  # fmt: skip
    chain = load_card("imitation", "Cloning and self-imitation").cloning
    return Variant(pp.chain(given, chain), env=envs.make(CARTPOLE))


def make_distillation() -> Variant:
    """Make a student that does not see how fast the cart moves."""
    module = load_card("imitation", "Distillation")
    seen = with_observations(envs.make(CARTPOLE), lambda obs: envs.Observation(obs.at[..., 1].set(0), privileged=obs))
    return Variant(module.pipeline, make_policy(module.student, (4, 2)), seen, optimizer=optax.adam(30 * RATE))


def make_imitating() -> Variant:
    """Make a variant with a phase that replays good steps."""
    seen = trace_rollout(Variant(ppo()))
    chain = load_card("imitation", "Cloning and self-imitation").imitating(seen.add_extras(returns=seen.value))
    return Variant(chain, optimizer=dict.fromkeys(("ppo", "imitation"), ADAM))


def make_options() -> Variant:
    """Make a variant with two policies, one of which is in charge."""
    module = load_card("networks", "Options")
    module.OBS = FEATURES
    return Variant(module.optioned, module.options, add_features(module.env), without=LINEAR + CARTPOLE)


def make_chunks() -> Variant:
    """Make a variant that takes two actions at once in CartPole."""
    module, (inner, params) = load_card("networks", "Action chunks"), gymnax.make(CARTPOLE)

    def step(key: jax.Array, state: Any, action: jax.Array) -> envs.Step:
        obs, state, reward, terminated, *_ = inner.step_env(key, state, action, params)
        return envs.Step(state, obs, reward, terminated)

    env = envs.auto_reset(
        lambda key: inner.reset_env(key, params)[::-1], module.in_chunks(step, 0.99), envs.Box((4,)),
        envs.MultiDiscrete((2, 2)), time_limit=250,
    )  # fmt: skip
    chain, task = ppo(estimate=module.chunked_gae), "CartPole-v1, two actions at once"
    return Variant(chain, env=env, task=task, keep_info=("discount",))


def make_trials(**memory: Any) -> Variant:
    """Make trials of ten pulls of a bandit with four arms, one of which pays."""

    def reset(key: jax.Array, task: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(()), jnp.zeros(1)

    def step(key: jax.Array, task: jax.Array, state: jax.Array, action: jax.Array) -> envs.Step:
        return envs.Step(state, jnp.zeros(1), jnp.where(action == task, 1.0, 0.0), terminated=True)

    begin, play = load_card("networks", "Memory across episodes").trials(
        lambda key: jax.random.randint(key, (), 0, 4), reset, step, episodes=10, num_actions=4
    )
    env = envs.auto_reset(begin, play, envs.Box((7,)), envs.Discrete(4))
    policy = networks.actor_critic(env, (64,), shared=True, **memory)
    chain = ppo(sampler=pp.segment_minibatches(4, num_epochs=4))
    return Variant(chain, policy, env, "bandits with four arms", without="no memory")


def make_remembering(memory: networks.Cell | None) -> Variant:
    """Make a variant that plays a card game, where the answer is the suit of the fourth card from the end."""
    env = envs.make(task := "popgym:RepeatPreviousEasy")
    policy = networks.actor_critic(env, (32,), shared=True, memory=memory)
    chain = ppo(sampler=pp.segment_minibatches(2, num_epochs=4))
    return Variant(chain, policy, env, task, without="no LRU" if memory else None)


def make_trpo() -> Variant:
    """Make the recipe `trpo`, with the minibatches and the learning rate of the others for its critic."""
    optimizers = {"actor": evaluate_line("natural gradients (TRPO)"), "critic": ADAM}
    return Variant(trpo.make_chain(trpo.Config(num_minibatches=4, update_epochs=4)), optimizer=optimizers)


HEAD, BODY = (FEATURES, 2), (FEATURES, UNITS)
VARIANTS: dict[str, Callable[[], Variant]] = {
    "PPO": lambda: Variant(ppo(), without=None),
    f"PPO, {PENDULUM}": lambda: Variant(ppo(), task=PENDULUM, without=None),
    LINEAR + CARTPOLE: make_linear, LINEAR + PENDULUM: lambda: make_linear(PENDULUM),
    "λ = 1": lambda: Variant(ppo(estimate=pp.gae(gamma=0.99, gae_lambda=1.0))),
    "Adam alone": lambda: Variant(ppo(), optimizer=optax.adam(RATE)),
    "no limit": lambda: make_constrained(1.0), "no weight": lambda: make_objectives(0.0), "no memory": make_trials,
    **replacing("surrogate", "clip-higher", "unclipped", "dual clip", "SPO", "DPO (discovered)", "rollback (PPO-RB)",
                "soft clip (P3O)", "MDPO, on-policy"),
    **replacing("critic", "squared error", "Huber"), **replacing("entropy", "adaptive entropy bonus"),
    **replacing("estimate", "V-trace, policy gradient"),
    "REINFORCE": lambda: Variant(ppo(surrogate=evaluate_line("REINFORCE"), sampler=pp.full_batch())),
    "annealed clip": lambda: Variant(
        ppo(surrogate=pp.clipped_surrogate(clip_eps=pp.linear_schedule(0.2, 0.0, UPDATES)))),
    "KL penalty": lambda: Variant(ppo(evaluate_line("KL penalty"), surrogate=evaluate_line("unclipped"))),
    "PPO-EWMA": lambda: Variant(ppo(surrogate=pp.chain(evaluate_line("PPO-EWMA"), PARTS["surrogate"]))),
    "two lambdas": lambda: Variant(ppo(estimate=pp.chain(GAE, evaluate_line("two lambdas")))),
    "priorities": lambda: Variant(ppo(
        sampler=pp.prioritized_sampler(4, num_epochs=4, alpha=0.6, beta=0.4),
        normalize=pp.chain(NORMALIZED, pp.advantage_weight()))),
    "ESPO": lambda: Variant(
        ppo(evaluate_line("ESPO"), surrogate=load_card("updates", "Your own early stop").surrogate())),
    "Adam with equal decays": lambda: Variant(ppo(), optimizer=optax.chain(
        optax.clip_by_global_norm(0.5), evaluate_line("Adam with equal decays"),
        pp.optim.scale_by_update_schedule(pp.linear_schedule(RATE, 0.0, UPDATES)))),
    "RPO": lambda: on_pendulum(ppo(normalize=pp.chain(NORMALIZED, evaluate_line("RPO")))),
    "CAPS": lambda: on_pendulum(ppo(evaluate_line("CAPS"))),
    "mirror loss": lambda: on_pendulum(ppo(evaluate_line("mirror loss"))),
    "mirrored rollouts": lambda: on_pendulum(ppo(estimate=pp.chain(GAE, evaluate_line("mirrored rollouts")))),
    **{name: lambda name=name: Variant(ppo(), optimizer=evaluate_line(name)) for name in (
        "weight decay", "Muon", "a flat minimum", "several minibatches", "non-finite gradients")},
    "TRGPPO": lambda: Variant(load_card("losses", "A clip for each element").trgppo), "TRPO": make_trpo,
    "REPPO": lambda: on_features(
        load_card("values", "Pathwise gradients"), "reppo",
        {"policy": (FEATURES, 1), "hidden": (FEATURES + 1, UNITS), "q": (UNITS,), "log_std": 0, "log_alpha": -2,
         "log_beta": 0}, task=PENDULUM, draws=True),
    "FPO": lambda: on_features(
        load_card("losses", "Flow policies"), "fpo",
        {"obs": BODY, "action": (1, UNITS), "tau": (UNITS,), "velocity": (UNITS, 1), "value": (FEATURES,)},
        task=PENDULUM, draws=True),
    "action chunks": make_chunks,
    "GePPO": lambda: Variant(load_card("updates", "Earlier rollouts").geppo(trace_rollout(Variant(ppo())))),
    "burn-in": lambda: make_recurrent("Time chunks with burn-in", "pipeline"),
    "quantiles": lambda: make_classifying("quantile"), "two-hot": lambda: make_classifying("two-hot"),
    "HL-Gauss": lambda: on_features(
        load_card("values", "HL-Gauss"), "pipeline", {"value": (FEATURES, 51), "policy": HEAD}),
    "PopArt": lambda: on_features(
        load_card("values", "PopArt"), "pipeline",
        {"policy": HEAD, "critic": {"w": (FEATURES,), "b": 0, "mean": 0, "scale": 1}}),
    "PPG": make_phasic,
    "DAAC": lambda: on_features(
        load_card("values", "Decoupled advantages"), "daac",
        {"policy": {"body": BODY, "logits": (UNITS, 2), "advantage": (UNITS, 2)}, "value": (FEATURES,)},
        optimizer=dict.fromkeys(("policy", "value"), ADAM)),
    "PQN": lambda: on_features(
        load_card("values", "Q-learning"), "pqn", {"hidden": BODY, "q": (UNITS, 2)}, "epsilon_greedy"),
    "several objectives": lambda: make_objectives(2.0), "costs": lambda: make_constrained(0.3),
    "self-imitation": make_imitating, "cloning": make_cloning, "distillation": make_distillation,
    "options": make_options, "RL²": lambda: make_trials(memory="gru"),
    "LRU": lambda: make_remembering("lru"), "no LRU": lambda: make_remembering(None),
    "DrAC": lambda: Variant(load_card("regularizers", "DrAC").pipeline),
    "dormant units": lambda: on_features(
        load_card("updates", "Dormant units"), "plastic", {"hidden": BODY, "policy": (UNITS, 2), "value": (UNITS,)},
        "tanh_policy", optimizer=optax.adam(RATE)),
}  # fmt: skip


def measure_curve(variant: Variant, seeds: range) -> np.ndarray:
    """Return the variant's measure, averaged over each of `POINTS` equal parts of the training, `[POINTS, seeds]`."""
    train = make_train(variant)

    def run(key: jax.Array) -> jax.Array:
        metrics = train(key).metrics
        number = metrics["episodes"] if variant.measure == "episode_return" else jnp.ones(train.num_updates)
        total = jnp.where(number > 0, metrics[variant.measure] * number, 0)
        parts = (jnp.array_split(x, POINTS) for x in (total, number))
        return jnp.stack([jnp.sum(x) / jnp.sum(n) for x, n in zip(*parts, strict=True)])

    return vectorize(run)(make_keys(seeds)).T


def measure_front(seeds: range) -> dict[str, list[Any]]:
    """Return the mean reward and cost, `[2, seeds]`, that policies reach with each weight of the cost."""

    def reached(train: training.Train, key: jax.Array) -> jax.Array:
        metrics = train(key).metrics
        return jnp.stack([metrics[name][-1] for name in ("earned", "cost")])

    trains = {weight: make_train(make_objectives(weight)) for weight in (0.5, 0.7, 1.0, 2.0, 4.0)}
    runs = {weight: vectorize(functools.partial(reached, train)) for weight, train in trains.items()}
    return {f"{weight:g}": run(make_keys(seeds)).T.tolist() for weight, run in runs.items()}


def main() -> None:
    """Run the benchmark from the command line."""
    parser = make_parser(__doc__, seeds=10, first_seed=1, json="benchmarks/results/gallery.jsonl")
    parser.add_argument("names", nargs="*", metavar="variant", help=f"of {', '.join(map(repr, VARIANTS))}; none: all")
    options = parser.parse_args()
    if unknown := set(options.names) - set(VARIANTS):
        parser.error(f"no such variant: {', '.join(sorted(unknown))}")
    names = options.names or VARIANTS
    for name, address in zip(names, claim(options, *names), strict=True):
        variant = VARIANTS[name]()
        curve = measure_curve(variant, seeds := select_seeds(options))
        found = {"task": variant.task, "measure": variant.measure, "without": variant.without, "seeds": list(seeds)}
        found |= {"front": measure_front(seeds)} if name == "several objectives" else {}
        print(f"{name:30} {curve[0].mean():10.4g} {curve[-1].mean():10.4g}", flush=True)
        write(address, found | {"curve": [[float(f"{x:.4g}") for x in row] for row in curve]})
