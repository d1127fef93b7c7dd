"""`training.population`: each member has its own hyperparameters, and selections replace members."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppo_parts import training
from ppo_parts.commands import doctor
from ppo_parts.commands._shared import select_seed
from ppo_parts.commands.compare import read_curve
from ppo_parts.recipes import cleanrl_ppo
from tests.common import refused
from tests.runs import Crash, acting, altered, assert_same_run, crash, go, raw, rows, tiny

RANGES = {"learning_rate": training.Range(1e-4, 1e-1), "ent_coef": training.Range(0, 0.1)}
MEMBERS, EVERY = 10, 4
CONFIG = tiny(13)


@pytest.fixture(scope="module")
def population():
    return training.population(cleanrl_ppo.make_train, RANGES, members=MEMBERS, every=EVERY)(CONFIG)


@pytest.fixture(scope="module")
def first(population):
    """Return the state of a run before its first update."""
    return population.jitted_init(jax.random.key(1))


def test_a_killed_population_ends_as_one_that_was_not(population, first, tmp_path):
    """Until the first selection, a member is the run of its own hyperparameters; afterwards, rows tell its story."""
    with pytest.raises(TypeError, match="train: key must be one key"):
        population(0)
    whole, result = go(population, tmp_path, "whole", CONFIG, eval_episodes=2)
    with pytest.raises(Crash):
        go(population, tmp_path, "killed", CONFIG, program=acting(6, crash))
    killed, _ = go(population, None, None, CONFIG, resume=tmp_path / "killed")
    assert_same_run(killed, whole)
    assert result["evaluation"]["episodes"] == 2
    assert len(result["last_100_episodes_return"]["per_seed"]) == 1  # members are not independent seeds
    assert read_curve("", [whole], "loss").values.shape[1] == 1
    assert json.loads((whole / "config.json").read_text())["recipe"] is None

    def make_train(config: cleanrl_ppo.Config):
        return population

    found = training.load(whole, make_train)
    best = int(np.argmax(found.state.scores))
    for x, of_best in zip(jax.tree.leaves(found.state.members), jax.tree.leaves(found.state.best[0]), strict=True):
        np.testing.assert_array_equal(raw(x)[best], raw(of_best))
    assert select_seed(found, 0).key.shape == ()
    measured = jax.eval_shape(lambda state: doctor.probe(population, state.acting, found.config), found.state)
    assert measured["probe/log_ratio"].shape == ()

    recorded = {name: np.array([row[f"population/{name}"] for row in rows(whole)]) for name in (*RANGES, "parent")}
    stayed = recorded.pop("parent") == np.arange(MEMBERS)
    number = [MEMBERS - 2 if i in (3, 7) else MEMBERS for i in range(13)]  # not after update 11: too little follows it
    assert stayed.sum(axis=1).tolist() == number
    returns = np.array([row["episode_return"] for row in rows(whole)[:EVERY]], float)
    worst = np.argsort(np.nan_to_num(np.nanmean(returns, axis=0), nan=-np.inf), kind="stable")[:2]
    assert set(np.flatnonzero(~stayed[3])) == set(worst)
    for name, x in recorded.items():
        assert len(np.unique(x[0])) == MEMBERS, name
        np.testing.assert_array_equal(x[1:][stayed[:-1]], x[:-1][stayed[:-1]])

    state, given = jax.tree.map(lambda x: x[2], (first.members, first.hyperparameters))
    alone = cleanrl_ppo.make_train(dataclasses.replace(tiny(), **{name: float(x) for name, x in given.items()}))
    for row in rows(whole)[:EVERY]:
        state, metrics = alone.jitted_step(state)
        np.testing.assert_allclose(metrics["loss"], row["loss"][2], rtol=1e-4)


def test_a_selection_copies_the_best_and_explores(population, first):
    """The two worst of ten continue from the two best, with other hyperparameters in their ranges and other keys."""
    scores = jnp.array([5.0, 3.0, jnp.nan, 8.0, 2.0, 9.0, 4.0, 6.0, 1.0, 7.0])  # no episode of member 2 has ended
    before = first._replace(total=scores, number=jnp.where(jnp.isnan(scores), 0.0, 1.0))
    keys = jax.vmap(jax.random.key)(jnp.arange(100))
    after, parents = jax.jit(jax.vmap(lambda key: population.select(before._replace(key=key))))(keys)
    changed = np.asarray(parents) != np.arange(10)
    assert changed.all(axis=0).tolist() == changed.any(axis=0).tolist() == [i in (2, 8) for i in range(10)]
    assert set(np.unique(parents[changed])) == {3, 5}
    np.testing.assert_array_equal(raw(after.members.key)[0], raw(before.members.key))
    np.testing.assert_array_equal(after.number[0], np.zeros(10))
    np.testing.assert_array_equal(after.score[:, 2], scores[parents[:, 2]])
    for x, old in zip(*(jax.tree.leaves(x.members.learner) for x in (after, before)), strict=True):
        np.testing.assert_array_equal(x[0], old[parents[0]])
    for name, limits in RANGES.items():
        new, old = (np.asarray(x.hyperparameters[name]) for x in (after, before))
        np.testing.assert_array_equal(new[~changed], np.broadcast_to(old, new.shape)[~changed])
        assert all(x in limits for x in new.ravel().tolist())
        ratio = np.round((new[changed] / old[parents[changed]]).astype(float), 4)
        drawn = new[changed][~np.isin(ratio, (0.8, 1.2))]
        assert set(ratio) > {0.8, 1.2}
        assert 25 < len(drawn) < 75  # a quarter of 200
        middle = np.sqrt(limits.low * limits.high) if limits.low else limits.high / 2
        assert 0.25 < np.mean(drawn < middle) < 0.75

    seven = altered(population, members=7, fraction=0.5)  # three replace three
    before_seven = jax.tree.map(lambda x: x[:7] if x.ndim else x, before)
    _, parents = jax.jit(jax.vmap(lambda key: seven.select(before_seven._replace(key=key))))(keys)
    assert (np.asarray(parents) != np.arange(7)).all(axis=0).tolist() == [i in (1, 2, 4) for i in range(7)]
    assert set(np.unique(parents[:, [1, 2, 4]])) == {0, 3, 5}
    np.testing.assert_array_equal(parents[:, 6], np.full(100, 6))  # the middle one stays

    for alike in (jnp.zeros(10), jnp.full(10, -jnp.inf)):  # no member is better
        _, parents = population.select(before._replace(total=alike, number=jnp.ones(10)))
        np.testing.assert_array_equal(parents, np.arange(MEMBERS))

    after, parents = altered(population, fraction=0.0).select(before)
    np.testing.assert_array_equal(parents, np.arange(MEMBERS))
    np.testing.assert_array_equal(after.scores, before.scores)


def searching(ranges=RANGES, env_id="CartPole-v1", **options):
    return lambda: training.population(cleanrl_ppo.make_train, ranges, **options)(tiny(env_id=env_id))


test_what_cannot_be_searched_is_refused = refused(
    (searching(env_id="gym:CartPole-v1"), "cannot share environments on the host"),
    (searching({"lerning_rate": training.Range(0, 1)}), "no field 'lerning_rate'; did you mean 'learning_rate'"),
    (searching({"num_steps": training.Range(1, 2)}), r"floats, got 'num_steps'"),
    (searching({"gamma": training.Range(0.9, 1.1)}), r"gamma must lie in \[0, 1\], got 1.1"),
    (searching({"gamma": training.Range(0.9)}), r"gamma must lie in \[0, 1\], got inf"),
    (searching({"ent_coef": (0, 1)}), r"must be a range, such as training.Range\(1e-4, 0.1\), got \(0, 1\)"),
    (lambda: training.population(cleanrl_ppo.make_train(tiny()), RANGES), "must be the make_train of a recipe, got"),
    (searching({}), "ranges must name a field to search"),
    (searching(every=100), r"every must be at most half of the \d+ updates, so that there is a selection"),
    (searching(members=4, fraction=0.1), "fraction must be at least one of the 4 members, got 0.1"),
    (searching(fraction=0.6), r"fraction must lie in \[0, 0.5\], got 0.6"),
    (searching(factors=(0.0, 2.0)), r"factors must lie in \(0, inf\], got 0"),
    *((searching(factors=x), "factors must be a tuple of numbers, got") for x in ((), 0.5)),
    (searching(metric="episode_returns"), "got 'episode_returns'.* did you mean 'episode_return'"),
)
