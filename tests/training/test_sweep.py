"""Studies of a recipe, with the real package."""

import dataclasses
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optuna
import pytest

from ppo_parts import training
from ppo_parts.errors import UserTypeError, UserValueError
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.training import _search
from ppo_parts.training._search import objective, read_search, sweep
from tests import recipe
from tests.runs import tiny

SEARCH = {"learning_rate": {"low": "1e-4", "high": 1, "log": True}, "num_steps": {"low": 2, "high": 3}}
optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    seed: int = 5
    learning_rate: float = 0.1
    num_steps: int = 2
    anneal: bool = False
    limit: float | None = 0.1


class Fake(NamedTuple):
    """Its metric is `rate * num_steps * (updates so far) + seed`; an episode ends in every second update."""

    config: Config
    num_updates: int = 40

    shapes = None, {"episode_return": None, "won": None}
    on_host = False

    def init(self, key):
        return jnp.zeros(()), jax.random.key_data(key)[-1].astype(jnp.float32)

    def step(self, state):
        done, seed = state[0] + 1, state[1]
        value = self.config.learning_rate * self.config.num_steps * done + seed
        return (done, seed), {"episode_return": jnp.where(done % 2 == 0, value, jnp.nan), "won": jnp.nan * value}


def make_train(config: training.Config):
    if not isinstance(config.learning_rate, jax.core.Tracer):
        training.check_config(config)
        assert config.learning_rate < 2, "the learning rate is out of range"
    made.append(config)
    return Fake(config)


made: list[Config] = []


def count_traced():
    return sum(isinstance(config.learning_rate, jax.core.Tracer) for config in made)


def test_a_trial_is_a_run_with_its_hyperparameters():
    """Trials have two seeds, and report on the way; all rates share the programs of a number of steps."""
    made.clear()
    run = objective(make_train, Config(), SEARCH, num_seeds=2)
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
    study.optimize(run, 20)
    assert count_traced() == 4  # init and updates, for 2 and for 3 steps
    for trial in study.trials:
        slope = trial.params["learning_rate"] * trial.params["num_steps"]
        reports = [slope * (4 * piece + 3) + 5.5 for piece in range(10)]  # updates 2 and 4 of each piece
        assert list(trial.intermediate_values.values()) == pytest.approx(reports, rel=1e-5)
        assert trial.value == pytest.approx(reports[-1], rel=1e-5)
    assert {trial.params["num_steps"] for trial in study.trials} == {2, 3}


def test_a_pruner_ends_a_trial_and_one_without_episodes_fails():
    pruner = optuna.pruners.ThresholdPruner(upper=20.0)
    study = optuna.create_study(pruner=pruner)
    study.enqueue_trial({"learning_rate": 1.0, "num_steps": 2})
    study.optimize(objective(make_train, Config(), SEARCH), 1)
    (trial,) = study.trials
    assert trial.state == optuna.trial.TrialState.PRUNED
    assert list(trial.intermediate_values) == [0, 1, 2]  # the metric was 11, 19 and 27
    study.optimize(objective(make_train, Config(), SEARCH, metric="won"), 1)
    assert study.trials[-1].state == optuna.trial.TrialState.FAIL
    with pytest.raises(ValueError, match=r"objective: metric must be a metric.* got 'win'; did you mean 'won'"):
        objective(make_train, Config(), SEARCH, metric="win")


def test_choices_of_a_number_may_be_words_as_yaml_reads_them():
    for name, given, found in (
        ("learning_rate", ["1e-4", 1], [1e-4, 1.0]),
        ("num_steps", [2, "1e1"], [2, 10]),
        ("limit", ["1e-3", None], [1e-3, None]),
    ):
        assert read_search(Config(), {name: {"choices": given}})[name][1] == {"choices": found}
        objective(make_train, Config(), {name: {"choices": given}})
    for name in ("shards", "microbatch"):  # their defaults are None and "auto"
        given = {"low": 1, "high": "1e1", "log": True}
        assert read_search(tiny(), {name: given})[name] == ("suggest_int", {"low": 1, "high": 10, "log": True})


def test_each_combination_of_choices_is_one_trial_and_fails_where_a_recipe_refuses_it(tmp_path):
    def make_train(config):
        if config.anneal and config.num_steps > 2:
            raise UserValueError("anneal needs num_steps 2")
        return Fake(config)

    search = {"num_steps": {"choices": [2, 3]}, "anneal": {"choices": [False, True]}}
    result = sweep(make_train, Config(), search, tmp_path / "refused")
    assert (result["complete"], result["pruned"], result["fail"]) == (3, 0, 1)
    few = {"trials": 5, "num_steps": search["num_steps"]}  # each combination is tried once
    assert [sweep(make_train, Config(), few, tmp_path / "few")["complete"] for _ in range(2)] == [2, 2]


def test_a_search_checks_declared_ranges_and_has_no_seeds(tmp_path, monkeypatch):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Ranged(Config):
        noise: Annotated[float, training.Range(0)] = 0.1

    for search, says in (
        ({"noise": {"low": -1, "high": 1}}, r"noise must lie in \[0, inf\), got -1\.0"),
        ({"seed": {"choices": [1, 2]}}, "no field 'seed', because .* num_seeds"),
    ):
        for engine in ("optuna", "ray"):
            with pytest.raises(UserValueError, match=says):
                sweep(Fake, Ranged(), {**search, "engine": engine}, tmp_path)
    assert not list(tmp_path.iterdir())

    # With options, one program cannot be traced inside another.
    monkeypatch.setattr(_search, "compiler_options", lambda: {"xla_llvm_disable_expensive_passes": True})
    objective(Fake, Config(), SEARCH)

    def measured(config):
        np.sqrt(float(config.learning_rate))
        return Fake(config)

    says = "must not need the value of learning_rate, because .* traced: compute with"
    with pytest.raises(UserTypeError, match=says):
        sweep(measured, Config(), {"learning_rate": {"low": 0.1, "high": 1}}, tmp_path)


def test_trials_step_environments_on_the_host():
    config = tiny(40, env_id="gym:CartPole-v1")
    train_and_report = objective(cleanrl_ppo.make_train, config, {"gamma": {"low": 0.9, "high": 0.99}})
    study = optuna.create_study(direction="maximize")
    study.optimize(train_and_report, 2)
    assert all(trial.value > 5 for trial in study.trials)


def test_several_workers_share_a_study(tmp_path):
    given = {**SEARCH, "anneal": {"choices": [False, True]}, "trials": 12}
    colors = matplotlib.rcParams["axes.prop_cycle"]
    with ThreadPoolExecutor(2) as workers:
        list(workers.map(lambda _: sweep(make_train, Config(), given, tmp_path / "study"), range(2)))
    (tmp_path / "config.json").touch()
    with pytest.raises(training.RunExistsError, match="holds a run: give another --name"):
        sweep(make_train, Config(), given, tmp_path)
    with pytest.raises(ValueError, match="study of other runs; num_seeds was 1, is 2: keep these, or give another"):
        sweep(make_train, Config(), given, tmp_path / "study", 2)
    result = sweep(make_train, Config(), {**given, "trials": 15}, tmp_path / "study")
    assert 15 <= result["complete"] + result["pruned"] <= 16  # both workers may have begun the twelfth trial
    assert result["value"] == pytest.approx(39 * result["best"]["learning_rate"] * result["best"]["num_steps"] + 5)
    assert (tmp_path / "study/importance.png").read_bytes().startswith(b"\x89PNG")
    assert matplotlib.rcParams["axes.prop_cycle"] == colors  # the colors of the caller's figures


def test_a_trial_of_ray_goes_on_from_the_state_of_another(tmp_path, monkeypatch):
    """Its hyperparameters are its own, as in population-based training; Ray is a stand-in."""

    class Trainable:
        def __init__(self, given):
            self.setup(given)

    stand_in = types.ModuleType("ray.tune")
    stand_in.Trainable = Trainable
    for name in ("ray", "ray.tune"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr(training._search, "keep_compiled_programs", lambda: None)
    kind = training.trainable(make_train, Config(), updates=15, num_seeds=2)
    made.clear()
    trial, other = kind({"learning_rate": 0.5, "num_steps": 3}), kind({"learning_rate": 1.5, "num_steps": 3})
    first, second = trial.step(), trial.step()
    nan = pytest.approx(np.nan, nan_ok=True)
    assert first == {"episode_return": 0.5 * 3 * 8 + 5.5, "won": nan, "updates": 15, "done": False}  # updates 2 to 14
    assert second["episode_return"] == pytest.approx(0.5 * 3 * 23 + 5.5)
    assert (second["updates"], second["done"]) == (30, True)  # 10 are left
    trial.save_checkpoint(str(tmp_path))
    count = count_traced()
    for rate in (1.0, 2.0):
        assert other.reset_config({"learning_rate": rate / 2, "num_steps": 3})
        assert other.begun is None  # it has no state that the restored one would replace
        other.load_checkpoint(str(tmp_path))
        assert other.step()["episode_return"] == pytest.approx(rate / 2 * 3 * 38 + 5.5)
        assert count_traced() == count + 2  # shapes of its state, and its updates; another rate traces nothing again
    with pytest.raises(ValueError, match="trainable: config has no field 'num_step'; did you mean 'num_steps'"):
        other.reset_config({"num_step": 3})


@pytest.mark.envs
def test_population_based_training_of_ray(tmp_path):
    ray = pytest.importorskip("ray")
    from ray import tune

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    kind = training.trainable(cleanrl_ppo.make_train, tiny(4), updates=1)
    rates = {"learning_rate": tune.loguniform(1e-4, 1e-2)}
    scheduler = tune.schedulers.PopulationBasedTraining(perturbation_interval=1, hyperparam_mutations=rates)
    chosen = tune.TuneConfig(metric="value_loss", mode="min", num_samples=4, scheduler=scheduler, reuse_actors=True)
    where = tune.RunConfig(storage_path=str(tmp_path), verbose=0)
    found = tune.Tuner(kind, param_space=rates, tune_config=chosen, run_config=where).fit()
    given = {"engine": "ray", "trials": 2, "learning_rate": SEARCH["learning_rate"], "update_epochs": {"choices": [1]}}
    first, result = (sweep(cleanrl_ppo.make_train, tiny(4), given, tmp_path / "sweep") for _ in range(2))
    ray.shutdown()
    assert {**first, "best": result["best"]} == result  # nothing was left to do; either of equal trials is the best
    assert result["complete"] + result["pruned"] == 2
    assert (tmp_path / "sweep/best.yaml").read_text().splitlines() == [f"{x}: {y}" for x, y in result["best"].items()]
    assert found.num_errors == 0
    assert [x.metrics["updates"] for x in found] == [4] * 4


@pytest.mark.filterwarnings("ignore:Target and region quantiles")  # optuna says this about two trials
def test_a_sweep_from_the_command_line_writes_a_configuration(tmp_path, capsys):
    file, here = tmp_path / "sweep.yaml", ["--directory", str(tmp_path)]
    file.write_text("trials: 1\nlearning_rate: {low: 1e-4, high: 1e-2, log: true}\n")
    main = [cleanrl_ppo.make_train, cleanrl_ppo.PRESETS]
    small = {"default": recipe.Config(total_timesteps=160)}
    result = training.main(recipe.make_train, small, [*here, "--sweep", str(file)])
    assert result["complete"] == 1

    def begin(train, config, options):
        assert config.learning_rate == result["best"]["learning_rate"]
        return {}

    training.main(*main, ["--config", str(tmp_path / "sweep/best.yaml")], run=begin)
    for text, message in (
        ("learning_rate: {low: -1, high: 1}", "--learning-rate must lie in .* got -1.0"),
        ("lerning_rate: {low: 1, high: 2}", "config has no field 'lerning_rate'; did you mean 'learning_rate'"),
        ("gamma: {low: 1, high: 0}", r"--gamma cannot be drawn from {'low': 1, 'high': 0}: .*low"),
        ("engine: rai", "engine must be one of 'optuna', 'ray', got 'rai'"),
        ("hidden: {low: 1, high: 2}", "--hidden must be a mapping with a list of choices, got"),
        (
            "gamma: {low: 0.9}",
            "--gamma must be a mapping with a list of choices, or with low and high.*, got {'low': 0.9}",
        ),
        ("env_id: {choices: CartPole-v1}", "--env-id must be a mapping with a list of choices, got"),
        ("gamma: {low: 0.9, high: 1, log: 'no'}", "log of gamma must be True or False, got 'no'"),
        ("hidden: {choices: [[8], [4]]}", r"--hidden cannot be drawn from .*: a study stores numbers, .* not \[8\]"),
        ("num_envs: {low: 4.9, high: 16}", "--num-envs cannot be drawn from .*: '4.9' is not an integer"),
        ("num_minibatches: {choices: [4, 3, 8]}", "512 .* 3"),
        ("trials: 2", "search must name a field to search, got {}"),
        ("trials: 0", "trials must be at least 1, got 0"),
    ):
        file.write_text(text)
        with pytest.raises(SystemExit, match=message):
            training.main(*main, [*here, "--sweep", str(file)])
    for given, options, message in (
        (["--seed", str(2**32 - 1), "--num-seeds", "2"], {}, "--seed must be such that all seeds"),
        (["--name", "../escaped"], {}, "--name must name a folder inside directory, got '../escaped'"),
        (["--no-progress", "--no-tensorboard", "--track"], {}, r"--track does nothing in a --sweep: leave it out"),
        ([], {"run": begin}, "--sweep does not call the run function"),
    ):
        file.write_text("learning_rate: {low: 1e-4, high: 1e-2}")
        with pytest.raises(SystemExit, match=message):
            training.main(*main, [*here, "--sweep", str(file), *given], **options)
