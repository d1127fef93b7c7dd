"""Every environment obeys one set of laws: each adapter on a stand-in of its package, and the real packages.

tests/envs/test_envs.py plays those of gymnax, and tests/envs/test_agents.py plays a stand-in of JaxMARL's.
"""

import dataclasses
import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gymnasium import spaces

import ppo_parts as pp
from ppo_parts import envs, testing
from ppo_parts.envs._laws import LAWS, list_notes, play, random_action
from ppo_parts.envs._wrappers import with_observations
from ppo_parts.testing._laws import state_is_stable
from tests import env_fakes
from tests.common import compiled, refused
from tests.env_fakes import LIMIT
from tests.envs.common import altered, bit_game

pytestmark = pytest.mark.lenient_ranks  # the packages'
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def fakes(request, monkeypatch):
    if request.node.get_closest_marker("envs") is None:
        env_fakes.install(monkeypatch)


FAKES = {
    "brax:walk": {"time_limit": LIMIT}, "playground:Walk": {}, "craftax:Craftax-Symbolic-v1": {"reset_ratio": 2},
    "jumanji:Walk-v0": {}, "pgx:nim": {}, "xminigrid:Walk-v0": {},
}  # fmt: skip


@pytest.mark.parametrize("env_id", FAKES)
def test_each_adapter_follows_the_laws(env_id):
    """Both ends occur where the stand-in has both; Nim ends only by terminations."""
    seen = envs.check_laws(envs.make(env_id, **FAKES[env_id]), num_steps=60)
    assert seen.terminated > 0
    assert (seen.truncated > 0) == (env_id != "pgx:nim")
    assert seen.notes == ()


REAL = {
    "brax:inverted_pendulum": ({"backend": "spring", "time_limit": 12}, 40),
    "playground:CheetahRun": ({"time_limit": 8}, 20), "craftax:Craftax-Symbolic-v1": ({"max_timesteps": 40}, 100),
    "craftax:Craftax-Classic-Symbolic-v1": ({"max_timesteps": 40}, 100), "jumanji:Snake-v1": ({"time_limit": 30}, 100),
    "jumanji:Tetris-v0": ({}, 100), "pgx:connect_four": ({}, 100), "pgx:tic_tac_toe": ({}, 100),
    "xminigrid:MiniGrid-DoorKey-8x8": ({"max_steps": 30}, 100), "gym:HalfCheetah-v5": ({"max_episode_steps": 12}, 40),
    "envpool:HalfCheetah-v4": ({"max_episode_steps": 12}, 40), "ale:pong": ({"max_num_frames_per_episode": 120}, 60),
    "jaxmarl:MPE_simple_spread_v3": ({"max_steps": 12}, 40),
}  # fmt: skip


@pytest.mark.envs
@pytest.mark.parametrize("env_id", REAL)
def test_the_real_packages_follow_the_laws(env_id):
    """Run this with `-m envs` where the packages are installed."""
    settings, steps = REAL[env_id]
    try:
        env = envs.make(env_id, **settings)
    except pp.errors.MissingPackage as error:
        pytest.skip(str(error))
    assert envs.check_laws(env, num_steps=steps).episodes > 0


def two_places(**broken):
    """Make two places, with an obs of (place, time) and a time limit of 4; `broken` changes fields of transitions."""

    def reset(key):
        x = jnp.stack([jax.random.randint(key, (), 0, 100), 0])
        return x, x.astype(jnp.float32)

    def step(key, x, action):
        x = x + jnp.stack([action.astype(int), 1])
        return envs.Step(x, x.astype(jnp.float32), action, terminated=False)

    env = altered(envs.auto_reset(reset, step, envs.Box((2,)), envs.Discrete(2), time_limit=4), **broken)
    made = env._replace(evaluation=lambda state: made)
    return made


def masked(available):
    see = lambda obs: envs.Observation(obs, available(jnp.repeat(obs[:, :1], 2, axis=1)))  # noqa: E731
    return with_observations(two_places(), see)


@pytest.fixture(scope="module")
def followed():
    """Return what the laws get from an environment that obeys them; one program plays it."""
    return play(two_places(), random_action(two_places()), 4, 24, 0)


def out(**changed):
    """Change fields of the transitions."""

    def change(played):
        fields = {name: np.asarray(of(played.out)) for name, of in changed.items()}
        return played._replace(out=played.out._replace(**fields))

    return change


def seated(seat=lambda seat: seat, next_seat=lambda seat: seat):
    """Let the players move in turn; `seat` and `next_seat` change what is said about them."""

    def info(played):
        moved = 2.0 * (played.out.episode_length % 2) - 1
        out = played.out._replace(info={"seat": seat(moved), "next_seat": next_seat(-moved)})
        return played._replace(env=played.env._replace(zero_sum=True), out=out)

    return info


def whole(low, high, dtype):
    space = SimpleNamespace(shape=(2,), low=low, high=high, dtype=np.dtype(int))
    return shown(space, lambda x, time: np.stack([x, time], -1).astype(dtype))


def shown(space, see, **changed):
    """Change the space and the observations, which are a number and the time in the episode (0 to 4, at its end)."""

    def change(played):
        seen = played.first, played.out.obs, played.out.final_obs
        first, obs, final = (see(x[..., 0], x[..., 1].astype(int)) for x in seen)
        env = played.env._replace(observation_space=space, **changed)
        return played._replace(env=env, first=first, out=played.out._replace(obs=obs, final_obs=final))

    return change


def image(low, high):
    """Show images of half the time in the episode, from 0 to 2."""
    shape = (36, 36, 1)
    return shown(envs.Box(shape, low, high), lambda x, time: np.tile(time[..., None, None, None], shape) / 2)


def never_final(played):
    """Make the final observations those of the next episode; the first entry of each observation is always 0."""
    played = shown(envs.Dict({"a": envs.Box(()), "b": envs.Box(())}), lambda x, time: {"a": 0 * x, "b": x})(played)
    return played._replace(out=played.out._replace(final_obs=played.out.obs))


def tree_of(options):
    """Observe a space with a box and integers."""
    space = envs.Dict({"a": envs.Box(()), "b": envs.Tuple((envs.Discrete(options),))})
    return shown(space, lambda x, time: envs.Observation({"a": x, "b": (time,)}))


def available(first, following, space=None):
    space = space or envs.Discrete(2)

    def change(played):
        number = sum(envs.count_options(space))
        obs = envs.Observation(played.out.obs, np.broadcast_to(following, (*played.out.reward.shape, number)))
        shown = envs.Observation(played.first, np.broadcast_to(first, (4, number)))
        env = played.env._replace(action_space=space)
        return played._replace(env=env, first=shown, out=played.out._replace(obs=obs, final_obs=obs))

    return change


def unscaled(by):
    return lambda played: played._replace(evaluated=(None, played.out._replace(reward=by * played.out.reward)))


UNLAWFUL = {
    "reproducible": [
        (lambda p: p._replace(again=(p.first, out(reward=lambda out: out.reward + 1)(p).out)), r"^step returns differ"),
        (lambda p: p._replace(again=(p.first + 1, p.out)), r"^reset returns different results .* same key: draw all")],
    "separate": [
        (lambda p: p._replace(other=p.first[:1] + np.ones((9, 1))), r"same first obs.*jax\.random\.split"),
        (lambda p: p._replace(first=(np.ones(4), p.first), other=(np.ones(4), 0 * p.first)), "same first obs")],
    "finite": [
        (out(reward=lambda out: out.reward / 0 + np.inf), r"^reward contains NaN or an infinity"),
        (out(final_obs=lambda out: (out.final_obs / 0).astype(jnp.bfloat16)), r"^final_obs contains NaN or an inf")],
    "spaces": [
        (whole(0, 200, float), r"observations are float64, but those of the observation space, .* are integers: "),
        (whole(0, 3, int), r"obs contains \d+ in step 0 .* outside of the observation space"),
        (shown(envs.Discrete(99), lambda x, time: x), r"are float32, but .* space, Discrete\(n=99\), are integers"),
        (shown(envs.Discrete(3), lambda x, time: time), r"^obs contains 3 in step 2 .* Discrete\(n=3\): "),
        (shown(envs.Discrete(4), lambda x, time: time), r"^final_obs contains 4 in step 3 .* outside of .*, Discrete"),
        (shown(envs.Discrete(9), lambda x, time: time - 1), "^the first obs contains -1 in step 0 of environment 0"),
        (shown(envs.MultiDiscrete((9, 3)), lambda x, time: np.stack([time, -time], -1)), "^obs contains -1 in step 0"),
        (shown(envs.Box(()), lambda x, time: envs.Observation(x, privileged=time), privileged_space=envs.Discrete(4)),
         r"^final_obs contains 4 in step 3 .* Discrete\(n=4\)"),
        (image(0, 1), r"^obs contains 1.5 in step 2 .* outside of the observation space, Box\(shape=\(36, 36, 1\)"),
        (tree_of(3), r"contains 3 in step 2 .* Discrete\(n=3\)")],
    "masks": [
        (available(False, True), r"^obs\.available leaves no action in step 0"),
        (available(True, False), r"^obs\.available leaves no action in step 1"),
        (available(True, [1, 1, 0, 0], envs.MultiDiscrete((2, 2))), "in step 1 .* of each choice, at least")],
    "flags": [
        (out(ended=lambda out: out.truncated, truncated=lambda out: out.truncated & False), "ended is True in step")
    ],
    "final_observation": [
        (out(final_obs=lambda out: out.obs), r"final_obs equals obs .* reset"), (never_final, r"final_obs equals obs"),
        (out(final_obs=lambda out: out.final_obs + 1), r"differs from obs in step 0 of environment 0")],
    "episode_length": [(out(episode_length=lambda out: out.episode_length - 1), r"episode_length is 0 in step 0")],
    "episode_return": [(unscaled(0), r"episode_return is 1 in step \d of .* add up to 0.*\(state\) must not scale")],
    "seats": [
        (seated(seat=lambda x: (1 - x) / 2), r"info\['seat'\] is 0 in step 0 .* -1"),
        (seated(next_seat=lambda x: 2 * x), r"info\['next_seat'\] is -2 in step 0"),
        (seated(next_seat=lambda x: -x), r"'next_seat'\] in step 0 .* not the info\['seat'\]")],
}  # fmt: skip


LAWFUL = {
    "spaces": [whole(0, 200, int), image(0, 2), shown(envs.Discrete(5), lambda x, time: time), tree_of(5)],
    "masks": [available(True, [0, 1, 1, 0], envs.MultiDiscrete((2, 2)))],
    "seats": [seated()],
}


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize("law", LAWS, ids=[law.__name__ for law in LAWS])
def test_each_law_names_what_breaks_it_with_the_remedy(followed, law):
    assert list(law(followed)) == []
    for change in LAWFUL.get(law.__name__, ()):
        assert list(law(change(followed))) == []
    for change, says in UNLAWFUL[law.__name__]:
        broken = next(law(change(followed)), "nothing is wrong")
        assert re.search(says, broken), broken


def impure():
    """Add a number to the reward, inside a function that the step calls, that changes when the step is traced."""
    numbers = itertools.count()

    def changed(out):
        number = np.full(4, next(numbers), np.float32)
        return jax.jit(lambda x: x + jnp.asarray(number))(out.reward)

    return two_places(reward=changed)


def leaking():
    """Add to an observation an array that the reset stored outside of the state."""
    kept = []

    def reset(key):
        kept.append(jax.random.uniform(key))
        return jnp.zeros(()), jnp.zeros(1)

    return resetting(lambda key, x, action: envs.Step(x, x[None], x + kept[0], x > 3), reset)


def resetting(step, reset=lambda key: (jnp.zeros(()), jnp.zeros(1)), **settings):
    """Make automatic resets of an environment that shows its state, a number."""
    return envs.auto_reset(reset, step, envs.Box((1,)), envs.Discrete(2), **settings)


def stepping(**changed):
    """Make automatic resets of a step with changed fields."""

    def step(key, x, action):
        out = envs.Step(x, x[None], reward=x, terminated=x > 3)
        return out._replace(**{name: change(x) for name, change in changed.items()})

    return resetting(step)


def like(**changed):
    return two_places()._replace(**changed)


def field(name, value, says):
    return lambda: two_places(**{name: lambda out: value}), says


TRACED = r"^check: step uses the value of an array, which .* traces it \(.*test_env_laws\.py:\d+, .*"
step = lambda key, x, action: envs.Step(x, x[None], x, x > 3)  # noqa: E731
still = lambda key, x, action: envs.Step(0.0, jnp.zeros(1), 0.0, False)  # noqa: E731
alike = lambda key, n: jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), two_places().reset(key, 1))  # noqa: E731
test_what_breaks_a_law_is_refused = refused(
    (impure, r"step returns different results .* same key: draw all random numbers from the key"),
    (lambda: like(reset=alike), r"same first observation.*jax\.random\.split"),
    (lambda: like(evaluation=lambda state: two_places(reward=lambda out: 3 * out.reward)), r"\(state\) must not scale"),
    # `check`, which runs first, finds these.
    (lambda: like(reset=lambda key, n: None), r"reset must return \(state, obs\), got NoneType"),
    (lambda: like(step=lambda *_: (0, None)), r"\(state, Transition\), got \(state, NoneType\)"),
    (lambda: like(step=lambda *x: (0, two_places().step(*x)[1])), r"step must keep .* the state"),
    (lambda: like(observation_space=envs.Box((4,))), r"shape \(4,\), .* returns \(2,\)"),
    (lambda: like(evaluation=lambda state: two_places(reward=lambda out: None)), "reward must be floats .* got None"),
    (lambda: like(evaluation=lambda state: None), r"evaluation\(state\) returns: None is not an environment"),
    (lambda: like(zero_sum=True), r"plays both sides of this game .* info has no 'seat': return 1"),
    (lambda: like(action_space=object()), r"not a space of arrays.*check\(env, action="),
    (lambda: masked(lambda x: x.astype(int)), r"obs\.available must be bool\[4, 2\], True for .*, got int32\[4, 2\]"),
    (lambda: masked(lambda x: x > 0)._replace(action_space=envs.Box(())), r"obs\.available must be None, .* got bool"),
    (lambda: stepping(obs=lambda x: x[None].astype(int)), r"an observation like that of reset, .*, got int32\[1\]"),
    (lambda: stepping(state=lambda x: (x, x)), r"a state like that of reset, float32\[\], got [^:]*$"),
    (lambda: resetting(still, lambda key: (jnp.zeros(1), 0.0)), r"reset must return \(state, obs\), in this order"),
    (lambda: stepping(reward=lambda x: jnp.zeros(2)), r"step: reward must be numbers of shape \(\), got float32\[2\]"),
    (lambda: stepping(info=lambda x: {"a": "won"}), r"step returned 'won' as info\['a'\], not a number"),
    (lambda: stepping(reward=lambda x: None), r"step: reward must be numbers of shape \(\), got None"),
    (lambda: resetting(step, lambda key: jnp.zeros(1)), r"^auto_reset: reset must return \(state, obs\), got floa"),
    (lambda: resetting(step, lambda key: (0, jnp.zeros(1), {})), r"reset must return \(state, obs\), got 3 items"),
    (lambda: stepping(terminated=lambda x: 0.3), r"terminated must .* \(\), got float32\[\]: return terminated > 0"),
    (lambda: stepping(terminated=lambda x: 2), r"terminated must .* \(\), got int32\[\]: return terminated > 0"),
    (lambda: stepping(reward=lambda x: 1.0 if x > 0 else 0.0), TRACED + "if x > 0 .*: use jnp.where or jax.lax.cond"),
    (lambda: stepping(obs=lambda x: np.sin(x)[None]), TRACED + r".*np\.sin.* and jnp instead of np"),
    (lambda: stepping(reward=lambda x: x[None][x[None] > 0].sum()), TRACED),
    (lambda: envs.make("pgx:nim", opponent=lambda obs: 0), r"opponent must take \(key, obs\); this one takes \(obs\)"),
    (leaking, r"^check: step uses an array that .* stored outside of the state .*: keep everything that changes in"),
    (lambda: like(reset=lambda key, n: range(n)[jax.random.randint(key, (), 0, n)]), "^check: reset uses the value"),
    (lambda: like(evaluation=lambda state: 3 if state.episode_length[0] else two_places()), "^check: evaluation us"),
    (lambda: stepping(mask=lambda x: jnp.ones(2, bool)), r"step: mask must be booleans of shape \(\), got bool\[2\]"),
    (lambda: like(action_space=SimpleNamespace(shape=(2,))), "has no bounds low and high: describe actions by an env"),
    (lambda: stepping(info=lambda x: {"return": x}), r"info\['return'\] has the name of a metric of every episode"),
    (lambda: stepping(info=lambda x: {"episodes": x}), r"info\['episodes'\] has the name of a metric of every"),
    # Fields of a transition.
    field("final_obs", None, r"final_obs must be like the observation before, float32\[4, 2\], got None.*equals obs"),
    field("obs", jnp.zeros((4, 4)), r"obs must be like the observation before, float32\[4, 2\], got float32\[4, 4\]"),
    field("terminated", jnp.zeros(4), r"terminated must be booleans of .*, got float32\[4\]: return terminated > 0"),
    field("truncated", False, r"truncated must be booleans of shape \(4,\), got bool\[\]"),
    field("episode_return", jnp.zeros(4, int), r"episode_return must be floats of .*, got int32\[4\]"),
    field("episode_length", None, r"episode_length must be numbers of shape \(4,\), got None"),
    field("info", None, r"info must be a dict of numbers by name, got None: leave it out"),
    field("info", {"won": jnp.zeros((2, 2))}, r"info\['won'\] must be numbers of shape \(4,\), got float32\[2, 2\]"),
    field("info", {"won": 1j * jnp.ones(4)}, r"info\['won'\] must be numbers of shape \(4,\), got complex64\[4\]"),
    field("info", {"won": None}, r"info\['won'\] must be numbers of shape \(4,\), got None"),
    by=lambda env: envs.check_laws(env, num_steps=24),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False, repr=False)
class Place:
    """A state without `==` and without its own `repr`."""

    x: jax.Array


def test_a_state_may_be_any_pytree():
    """States are compared by their leaves, so a class needs neither a useful `==` nor a useful `repr`."""
    step = lambda key, state, action: envs.Step(Place(state.x + 1), state.x[None], state.x, state.x > 3)  # noqa: E731
    env = resetting(step, lambda key: (Place(jnp.zeros(())), jnp.zeros(1)))
    assert envs.check_laws(env, num_steps=24).terminated
    moving = pp.Part(lambda *_: Place(jnp.zeros(())), lambda b, s, c: (b, Place(s.x + 1)), "moving")
    testing.check_part(moving, laws=[state_is_stable])


def test_random_actions_lie_in_the_box():
    """This holds even where the box has one bound; where it has none, they lie between -1 and 1."""
    low, high = jnp.array([0.0, 5.0, -jnp.inf, -jnp.inf]), jnp.array([3.0, jnp.inf, -3.0, jnp.inf])
    action = random_action(like(action_space=envs.Box((4,), low, high)))(jax.random.key(0), jnp.zeros((999, 2)))
    np.testing.assert_allclose(action.min(axis=0), [0, 5, -5, -1], atol=0.02)
    np.testing.assert_allclose(action.max(axis=0), [3, 7, -3, 1], atol=0.02)


def notes_of(length, ended, cut):
    length, ended, cut = (np.asarray(x)[:, None] for x in (length, ended, cut))
    ones = np.ones((len(length), 1), np.float32)
    out = envs.Transition(ones, ones, ended & ~cut, cut, ones, ones, length, ended=ended)
    reset = lambda key, num_envs: (ones, ones[0])  # noqa: E731
    env = SimpleNamespace(observation_space=envs.Discrete(2), privileged_space=None, reset=reset)
    played = {"env": env, "ended": ended, "out": out, "first": ones[0], "evaluated": (ones[0], out)}
    return tuple(list_notes(SimpleNamespace(**played)))


def test_episodes_are_counted_and_what_is_often_a_mistake_is_noted():
    """Flags may be swapped, a time limit may be reported as a failure, or no episode ends."""
    length, ended = np.array([1, 2, 1, 2, 3, 4] * 4), np.array([0, 1, 0, 0, 0, 1] * 4, bool)
    assert notes_of(length, ended, ended & (length == 4)) == ()
    (note,) = notes_of(length, ended, ended & (length != 4))
    assert "all 4 episodes of 4 steps" in note
    assert "swapped" in note
    for share, expected in ((2, ["8 of 10 episodes"]), (9, [])):  # most episodes have to end at the same step
        length = np.tile([1, 2, 3, 4], 8)
        ended = length == 4
        early = np.flatnonzero(~ended)[:share]
        length[early], ended[early] = 1, True
        assert [note.partition(" were")[0] for note in notes_of(length, ended, ended & False)] == expected
    (note,) = notes_of(length, ended & False, ended & False)
    assert "no episode ended in 32 steps" in note
    # An end with both flags counts as a termination, and is noted.
    seen = envs.check_laws(two_places(), num_envs=3, num_steps=9)
    assert (seen.episodes, seen.terminated, seen.truncated, seen.notes) == (6, 0, 6, ())
    seen = envs.check_laws(two_places(terminated=lambda out: out.truncated), num_envs=3, num_steps=9)
    assert (seen.episodes, seen.terminated, seen.truncated) == (6, 6, 0)
    says = "6 of 6 episodes were terminated after 4 steps, and none lasted longer: if that is a time"
    assert [note[: len(says)] for note in seen.notes] == [says]
    # Real numbers outside of their space are noted, too.
    space = envs.Box((2,), 0, np.float32([np.finfo(np.float32).max, 3]))
    (note,) = envs.check_laws(like(observation_space=space), num_steps=9).notes
    assert re.search(r"^final_obs contains 4 in step 3 of environment 0, outside of the observation space, Box", note)
    unwrapped = like(reset=lambda key, n: two_places().reset(jax.random.fold_in(key, 1), n))
    (note,) = envs.check_laws(like(evaluation=lambda state: unwrapped), num_steps=9).notes
    assert note.endswith("a wrapper that changes observations must also wrap env.evaluation(state)")
    assert envs.check_laws(two_places(), num_envs=1, num_steps=1).episodes == 0


def test_rewards_of_absent_agents_do_not_count():
    """Agent 1 is absent after its second step; each agent is paid 1 in every step."""
    shown = lambda out: envs.Observation(out.obs.obs + 0.5 * out.ended[:, None, None])  # noqa: E731
    env = altered(bit_game(mortal=True), final_obs=shown)
    for each in (env, envs.fold_agents(env)):
        assert envs.check_laws(each, num_steps=9).episodes > 0
    assert not envs.check_laws(env, num_steps=9).notes
    once = lambda out: jnp.isin(out.episode_length[:, None] + jnp.array([[0, 1]]), 3)  # noqa: E731
    at_last = lambda out: jnp.repeat(out.ended[:, None], 2, axis=1)  # noqa: E731
    for change, says in (
        ({"mask": lambda out: None}, "its later steps count: .* return mask, False"),
        ({"mask": lambda out: ~out.terminated}, "ended does not count.*: mask is True in the step that ends an agent"),
        ({"terminated": once, "truncated": at_last}, "keep terminated True for an agent that has left"),
    ):
        notes = envs.check_laws(altered(env, **change), num_steps=9).notes
        assert sum(re.search(says, note) is not None for note in notes) == 1, notes
    out = play(env, lambda key, obs: jnp.abs(obs.obs[..., 0] - jnp.arange(2)).astype(int), 1, 4, seed=0).out
    assert out.episode_return[:, 0].tolist() == [[1, 1], [2, 2], [3, 2], [4, 2]]


def test_an_image_has_three_colors():
    drawn = resetting(lambda key, x, action: envs.Step(x, x[None], x, x > 0), render=lambda x: np.zeros((4, 3)))
    with pytest.raises(pp.errors.ShapeError, match=r"image of render must have shape \[H, W, 3\], got \(4, 3\)"):
        drawn.render(drawn.reset(KEY, 2)[0])


def test_only_as_many_new_episodes_are_computed_as_asked_for():
    """Six environments end in turn or together. With a ratio of 3, two new states serve all that end in a step."""

    def reset(key):
        x = jax.random.uniform(key)
        return x, x[None]

    step = lambda key, x, action: envs.Step(x, x[None], reward=x, terminated=action == 1)  # noqa: E731
    reset, step = compiled(resetting(step, reset, reset_ratio=3))
    state, obs = reset(jax.random.key(0), 6)
    assert len(set(obs[:, 0].tolist())) == 6
    _, out = step(jax.random.key(1), state, jnp.array([0, 1, 0, 1, 0, 0]))
    assert len(set(out.obs[:, 0].tolist())) == 6  # two ended, and two are new
    np.testing.assert_array_equal(out.obs[jnp.array([0, 2, 4, 5])], obs[jnp.array([0, 2, 4, 5])])
    _, out = step(jax.random.key(1), state, jnp.ones(6, int))
    assert len(set(out.obs[:, 0].tolist())) == 2
    np.testing.assert_array_equal(out.final_obs, obs)


def test_environments_may_be_vmapped_with_their_parameters():
    """`reset` and `step` close over the parameters; new episodes are computed only where one ended."""
    calls = []

    def make(start):
        def reset(key):
            jax.debug.callback(lambda: calls.append(1))
            return start, start[None]

        return resetting(lambda key, x, action: envs.Step(x + 1, x[None] + 1, 0.0, terminated=action == 1), reset)

    starts = jnp.array([0.0, 10.0])
    state = jax.vmap(lambda start: make(start).reset(KEY, 2)[0])(starts)
    stepped = jax.jit(jax.vmap(lambda start, state, action: make(start).step(KEY, state, action)))
    for ended in (0, 1):
        action, expected = [[0, ended], [0, 0]], [[1, 1 - ended], [11, 11]]
        jax.effects_barrier()
        calls.clear()
        after, out = stepped(starts, state, jnp.array(action))
        jax.effects_barrier()
        assert len(calls) == ended
        assert after.inner.tolist() == out.obs[..., 0].tolist() == expected
        np.testing.assert_array_equal(out.terminated, action)


AUTOMATIC = {"reset": lambda key: 0, "step": lambda key, state, action: 0}
AUTOMATIC |= {"observation_space": envs.Box(()), "action_space": envs.Discrete(2)}
FROM_1 = spaces.Dict(a=spaces.Discrete(2, start=1))
test_arguments_of_automatic_resets_are_checked = refused(
    ({"reset": lambda: 0}, r"reset must take \(key\); this one takes \(\)"),
    ({"reset": None}, r"reset must be a function, got None"),
    ({"shared": 1.0}, r"reset must take \(key, shared\); this one takes \(key\)"),
    ({"step": lambda state, action, key: 0}, r"step must take \(key, state, action\); .* \(state, action, key\)"),
    ({"step": lambda state, action: 0}, r"step must take \(key, state, action\); .* \(state, action\)"),
    ({"observation_space": (1,)}, r"auto_reset: observation_space must be a space, got \(1,\): write envs\.Box\(\(1,"),
    ({"action_space": envs.Discrete}, r"action_space must be a space, got <class"),
    ({"observation_space": None}, r"observation_space must be a space, got None: write envs\.Box\(shape\), envs\.Disc"),
    ({"action_space": 2}, r"action_space must be a space, got 2: write envs\.Discrete\(2\), or envs\.Box\(\(2,\)\)"),
    ({"action_space": np.int64(3)}, r"action_space must be a space, got .*: write envs\.Discrete\(3\)"),
    ({"privileged_space": [4]}, r"privileged_space must be a space, got \[4\]: write envs\.Box\(\(4,\)\)"),
    (
        {"action_space": FROM_1},
        r"auto_reset: action_space must start from 0, got Discrete\(2, start=1\): describe it from 0",
    ),
    ({"zero_sum": True, "num_agents": 2}, r"auto_reset: zero_sum must be False with num_agents=2"),
    by=lambda changed: envs.auto_reset(**{**AUTOMATIC, **changed}),
)


N = 4
SHARED = {"start": jnp.arange(4.0) * 10, "log_weight": jnp.zeros(4)}


def starting():
    """Make episodes of two steps from a start that is drawn."""

    def reset(key, shared):
        x = shared["start"][jax.random.categorical(key, shared["log_weight"])]
        return x, x[None]

    def step(key, x, action):
        return envs.Step(x + 1, x[None] + 1, reward=x, terminated=False)

    return envs.auto_reset(reset, step, envs.Box((1,)), envs.Discrete(2), time_limit=2, shared=SHARED)


def test_shared_state_stays_whole_and_is_seen_by_later_episodes_only_without_tracing_again():
    env, action = starting(), jnp.zeros(N, int)
    state, first = env.reset(KEY, N)
    assert set(first[:, 0].tolist()) <= {0, 10, 20, 30}
    step = jax.jit(env.step)
    state, _ = step(KEY, state, action)
    new = SHARED | {"start": 0 * SHARED["start"] + 100}
    state, out = step(KEY, optax.tree.set(state, shared=new), action)
    np.testing.assert_array_equal(out.final_obs, first + 2)  # the old episode goes on to its end
    np.testing.assert_array_equal(out.obs, 100)
    np.testing.assert_array_equal(optax.tree.get(state, "shared")["start"], 100)
    assert step._cache_size() == 1
    np.testing.assert_array_equal(env.evaluation(state).reset(KEY, N)[1], 100)
    np.testing.assert_array_equal(env.reset(KEY, N)[1], first)
    for other in (None, SHARED | {"start": jnp.zeros(3)}):
        with pytest.raises(pp.errors.UserTypeError, match=r"^auto_reset: shared must stay like .*float32\[4\].*, got"):
            env.step(KEY, state._replace(shared=other), action)
    rollout = pp.rollout(starting(), lambda params, batch: None, num_envs=N, num_steps=3)
    spec = jax.tree.map(lambda x: x.spec, rollout.sharding(jax.sharding.Mesh(np.array(jax.devices()[:1]), "d")))
    assert set(jax.tree.leaves(spec.env_state.shared)) == {jax.sharding.PartitionSpec()}
    assert spec.env_state.inner == jax.sharding.PartitionSpec("d")


def test_a_termination_at_the_time_limit_is_a_termination():
    env = resetting(lambda key, x, action: envs.Step(x, x[None], 0.0, terminated=action == 1), time_limit=1)
    out = play(env, lambda key, obs: jnp.array([0, 1]), 2, 1, seed=0).out
    assert (out.terminated.tolist(), out.truncated.tolist()) == ([[False, True]], [[True, False]])


def test_policy_and_critic_may_see_different_entries_of_the_observations():
    """The two entries of the stand-in are negatives of each other."""
    env = envs.make("playground:Walk", obs_key="privileged_state")
    state, obs = jax.jit(env.reset, static_argnums=1)(jax.random.key(0), 2)
    np.testing.assert_array_equal(obs, -state.inner.obs["state"])
    env = envs.make("playground:Walk,critic_obs_key=privileged_state")
    assert (env.observation_space.shape, env.privileged_space.shape) == ((2,), (2,))
    normalized = envs.prepare(env, normalize=True, gamma=0.9)
    assert envs.check_laws(normalized, num_envs=3, num_steps=30).episodes > 0
    state, obs = jax.jit(normalized.reset, static_argnums=1)(jax.random.key(0), 4)
    np.testing.assert_allclose(obs.privileged, -obs.obs)
    moments = state.inner.moments
    np.testing.assert_allclose(moments.mean[:2], jnp.mean(env.reset(jax.random.key(0), 4)[1].obs, axis=0))
    assert moments.mean.shape == (4,)
    for argument in ("obs_key", "critic_obs_key"):
        says = rf"{argument}='pixels': the observations have the entries state, privileged_state"
        with pytest.raises(pp.errors.UserValueError, match=says):
            envs.make("playground:Walk", **{argument: "pixels"})
    with pytest.raises(pp.errors.ShapeError, match=r"privileged_space has shape None, but reset returns \(2,\)"):
        envs.check(env._replace(privileged_space=None))


def test_choices_become_one_action_or_stay_choices_with_a_mask_each(monkeypatch):
    env = envs.make("jumanji:Walk-v0")
    assert (env.action_space.n, set(env.observation_space.spaces)) == (6, {"place", "time"})
    reset, step = compiled(env)
    state, obs = reset(jax.random.key(0), 6)
    assert obs.available[0].tolist() == [True, True, True, True, True, False]
    _, out = step(jax.random.key(0), state, jnp.arange(6))
    np.testing.assert_allclose(out.reward, [-0.5, -0.4, -0.3, 0.5, 0.6, 0.7], atol=1e-6)
    assert out.obs.available.any(axis=-1).all()  # everything is available where no option is left
    # An entry that is a dataclass becomes a dict; where a choice has no option left, all of its options are available.
    mask = jnp.array([[True, False, True], [False, False, False]])
    seen = lambda self, state: env_fakes.Seen(state.x, state.replace(obs=state.x), mask)  # noqa: E731
    monkeypatch.setattr(env_fakes.Jumanji, "action_spec", SimpleNamespace(num_values=jnp.array([3, 3])))
    monkeypatch.setattr(env_fakes.Jumanji, "seen", seen)
    env = envs.make("jumanji:Walk-v0")
    assert env.action_space == envs.MultiDiscrete((3, 3))
    reset, step = compiled(env)
    state, obs = reset(jax.random.key(0), 2)
    assert obs.available.tolist() == [[True, False, True, True, True, True]] * 2
    _, out = step(jax.random.key(0), state, jnp.array([[0, 2], [2, 1]]))
    np.testing.assert_allclose(out.reward, [-0.3, 1.6], atol=1e-6)
    assert (obs.obs["time"]["timestep"].dtype, obs.obs["time"]["x"].shape) == (jnp.float32, (2,))
    assert envs.check_laws(env, num_steps=20).episodes > 0


def test_the_opponent_acts_between_the_turns_of_the_policy():
    """In Nim with 5 matches, taking 2 at 5 or 2 and 1 elsewhere beats always 1, and always 2 beats always 1."""
    taken = []

    def takes_one(key, obs):
        assert obs.available.shape == (2,)
        taken.append(1)
        return jnp.zeros((), jnp.int32)

    def always_two(params, batch):
        logits = jnp.broadcast_to(params, (*batch.obs.obs.shape[:-1], 2))
        return pp.distributions.Categorical(pp.distributions.mask_logits(logits, batch.obs.available)), None

    def best(key, obs):
        left = obs.obs[:, 0]
        return ((left == 5) | (left == 2)).astype(jnp.int32)

    frozen = envs.frozen_opponent(always_two, jnp.array([0.0, 50.0]))
    for opponent, act, seen, won in (
        (takes_one, best, {4.0, 5.0}, True),  # the opponent began some of the games
        (frozen, lambda key, obs: jnp.zeros(32, int), {3.0, 5.0}, False),
    ):
        played = play(envs.make("pgx:nim", opponent=opponent), act, 32, 4, seed=0)
        assert set(played.first.obs[:, 0].tolist()) == seen
        assert played.ended.any(axis=0).all()
        assert (played.out.info["won"][played.ended] == won).all()
        assert (played.out.reward[played.ended] == 2 * won - 1).all()
    assert taken
    with pytest.raises(pp.errors.UserValueError, match="a policy with memory"):
        envs.frozen_opponent(pp.Policy(lambda key: {}, lambda params, batch: None, lambda n: None), {})


def test_what_an_adapter_cannot_take_is_refused(monkeypatch):
    four, image = SimpleNamespace(num_values=jnp.array([4])), lambda self, params: {"img": (2,)}
    opponents = r"\"self\", None or a function \(key, obs\) -> action, got 'random'"
    for fake, name, value, env_id, says in (
        (env_fakes.Jumanji, "action_spec", four, "jumanji:Walk-v0", "Walk-v0 has several agents, or actions"),
        (env_fakes.XMiniGrid, "observation_shape", image, "xminigrid:Walk-v0", r"has observations \{'img'"),
        (env_fakes.Nim, "num_players", 2, "pgx:nim,opponent=random", opponents),
        (env_fakes.Nim, "num_players", 4, "pgx:nim", "nim has 4 players"),
        (env_fakes.Nim, "num_players", 1, "pgx:nim,opponent=self", "nim has one player, so there is no opponent"),
    ):
        monkeypatch.setattr(fake, name, value)
        with pytest.raises(pp.errors.UserValueError, match=says):
            envs.make(env_id)


def test_an_action_of_brax_lasts_for_several_steps_but_not_beyond_the_end(monkeypatch):
    """However many steps it lasts, the simulator is traced once."""
    traced, simulate = [], env_fakes.Brax.step
    monkeypatch.setattr(env_fakes.Brax, "step", lambda *given: traced.append(1) or simulate(*given))
    reset, step = compiled(envs.from_brax(env_fakes.Brax(), time_limit=3, action_repeat=3))
    state, _ = reset(jax.random.key(0), 2)
    start = np.asarray(state.inner.x)
    state, out = step(jax.random.key(1), state, jnp.array([[0.1], [1.0]]))
    steps = np.array([3, np.ceil((1.5 - start[1]) / 1.0 + 1e-6)])  # an episode ends beyond 1.5
    np.testing.assert_allclose(out.reward, steps * [0.1, 1.0], rtol=1e-5)
    np.testing.assert_allclose(out.final_obs[:, 0], start + out.reward, rtol=1e-5)
    assert out.terminated.tolist() == [False, True]
    assert traced == [1]
    for _ in range(2):
        state, out = step(jax.random.key(2), state, jnp.zeros((2, 1)))
    assert out.truncated.tolist() == [True, False]  # after three actions


@pytest.mark.envs
@pytest.mark.parametrize("name", ["brax:inverted_pendulum", "playground:CartpoleBalance"])
def test_mujoco_draws_the_first_environment(name, monkeypatch):
    pytest.importorskip("brax" if name.startswith("brax") else "mujoco_playground")
    monkeypatch.setenv("MUJOCO_GL", "egl")  # read when mujoco is first imported
    env = envs.make(name)
    state, _ = jax.jit(env.reset, static_argnums=1)(jax.random.key(0), 2)
    try:
        first = env.evaluation(state).render(state)
    except pp.errors.UserValueError as error:
        pytest.skip(str(error))
    state, _ = jax.jit(env.step)(jax.random.key(1), state, jnp.ones((2, 1)))
    assert first.shape == (240, 320, 3)
    assert np.any(first != env.render(state))  # the robot moves
