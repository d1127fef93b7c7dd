"""Self-play in Kuhn poker: how exploitable is the policy after mirror descent, and after clipped updates?

Each of two players antes 1 and gets one of three cards; the one with the higher card wins the pot. Each may pass or
bet 1 more, and answers a bet by folding (a pass) or calling (a bet). The exploitability of a policy is what the best
responses against it earn, averaged over the two seats; it is 0 in an equilibrium, and it is computed exactly here.

Reference: Kuhn 1950, A Simplified Two-Person Poker; Sokota et al. 2023, arXiv:2206.05825.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ppo_parts as pp
from ppo_parts import envs, networks, training

from ._cards import load_card
from ._records import claim, make_parser, write, write_part
from ._seeds import make_keys, select_seeds, train_in_stages

Array = jax.Array
CARDS, NODES, END = 3, 4, 4
NEXT = ((1, 2), (END, 3), (END, END), (END, END))
"""The node after passing and after betting: play begins at 0; 1 follows a pass, 2 a bet, and 3 a pass and a bet."""
FIRST = (True, False, False, True, True)
"""Whether it is the first player's turn at a node."""
EARNED = (((0, 0), (0, 0)), ((-1, 1), (0, 0)), ((1, 1), (-2, 2)), ((-1, -1), (-2, 2)))
"""What an action at a node earns the first player with the lower and the higher card; 0 where play goes on."""
CONFIG = training.Config(env_id="kuhn_poker", total_timesteps=4_194_304, num_envs=256, num_steps=16)
EVALUATIONS = 40


def encode(card: Array, node: Array) -> Array:
    """Return the observation of the player to move, `[..., 7]`."""
    return jnp.concatenate([jax.nn.one_hot(card, CARDS), jax.nn.one_hot(node, NODES)], axis=-1)


def observe(state: tuple[Array, Array]) -> Array:
    """Return what the player to move sees."""
    cards, node = state
    return encode(cards[jnp.where(jnp.asarray(FIRST)[node], 0, 1)], node)


def reset(key: Array) -> Any:
    """Deal the cards."""
    state = jax.random.permutation(key, CARDS)[:2], jnp.int32(0)
    return state, observe(state)


def step(key: Array, state: tuple[Array, Array], action: Array) -> envs.Step:
    """Pass or bet."""
    cards, node = state
    after, seats = jnp.asarray(NEXT)[node, action], jnp.where(jnp.asarray(FIRST), 1.0, -1.0)
    reward = jnp.asarray(EARNED, jnp.float32)[node, action, (cards[0] > cards[1]).astype(int)]
    info = {"seat": seats[node], "next_seat": seats[after]}
    state = cards, after
    return envs.Step(state, observe(state), reward, after == END, info=info)


def make_train(arm: str) -> training.Train:
    """Make the run of an arm: the chain of docs/gallery/self_play.md, or PPO's surrogate instead of mirror descent."""
    card = load_card("self_play", "Poker")
    card.updates = CONFIG.num_updates
    estimator, sampler, *mirror, value, entropy = card.pipeline.parts
    surrogates = {"mirror": mirror, "clipped": [pp.clipped_surrogate(clip_eps=0.2)]}
    chain = pp.chain(estimator, sampler, *surrogates[arm], pp.policy_diagnostics(), value, entropy)
    env = envs.auto_reset(reset, step, envs.Box((CARDS + NODES,)), envs.Discrete(2), zero_sum=True)
    policy = networks.actor_critic(env, (32, 32), "tanh")
    return training.Train.of(CONFIG, env, policy, chain, pp.clipped_adam(card.annealed(5e-3, 1e-3), 0.5))


def play_deal(cards: tuple[int, int], first: np.ndarray, second: np.ndarray, node: int = 0) -> float:
    """Return the first player's mean payoff with these cards; `first` and `second` are probabilities of a bet."""
    bet = first[cards[0], node] if FIRST[node] else second[cards[1], node]
    total = 0.0
    for action, probability in enumerate((1 - bet, bet)):
        after, earned = NEXT[node][action], float(EARNED[node][action][cards[0] > cards[1]])
        total += probability * (earned if after == END else play_deal(cards, first, second, after))
    return total


def compute_return(first: np.ndarray, second: np.ndarray) -> float:
    """Return the first player's mean payoff with these probabilities of a bet, `[3, 4]`, against the second."""
    return float(np.mean([play_deal(deal, first, second) for deal in itertools.permutations(range(CARDS), 2)]))


def exploit(table: np.ndarray) -> float:
    """Return the payoff of a best response to these probabilities of a bet, averaged over the two seats."""
    best = []
    for seat, nodes in ((1, (0, 3)), (-1, (1, 2))):
        returns = []
        for choices in itertools.product((0.0, 1.0), repeat=CARDS * len(nodes)):
            response = np.zeros((CARDS, NODES))
            response[:, nodes] = np.reshape(choices, (CARDS, -1))
            returns.append(seat * compute_return(*((response, table) if seat == 1 else (table, response))))
        best.append(max(returns))
    return float(np.mean(best))


def measure(arm: str, seeds: range) -> dict[str, Any]:
    """Train the seeds of an arm in one program."""
    train, rows = make_train(arm), []
    every = pp.Batch(obs=encode(*jnp.meshgrid(jnp.arange(CARDS), jnp.arange(NODES), indexing="ij")))

    @jax.jit
    @jax.vmap
    def compute_bets(state: Any) -> Array:  # the probability of a bet with each card at each node, `[3, 4]`
        return jnp.exp(train.policy(state.learner.params, every).distribution.log_prob(jnp.ones((CARDS, NODES), int)))

    for stage in train_in_stages(train, make_keys(seeds), EVALUATIONS):
        found = [exploit(table) for table in np.asarray(compute_bets(stage.state))]
        rows.append({"env_steps": stage.env_steps, "exploitability": found})
        print(f"{arm} {stage.env_steps:>9,}: {np.mean(found):.4f}", flush=True)
    settings = {"arm": arm, "config": dataclasses.asdict(CONFIG), "seeds": list(seeds)}
    return settings | {"exploitability": training.summary(found), "curve": rows}


def main() -> None:
    """Run the benchmark from the command line."""
    options = make_parser(__doc__, seeds=10, first_seed=1, json="benchmarks/results/kuhn.jsonl").parse_args()
    [address] = claim(options, "kuhn")
    arms: list[dict[str, Any]] = []
    for arm in ("mirror", "clipped"):
        arms.append(measure(arm, select_seeds(options)))
        write_part(address, {"arms": arms})
    write(address, {"arms": arms})
