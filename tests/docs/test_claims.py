"""Claims on the pages match the records."""

import numpy as np

from benchmarks import _pages, _tables, differences, kuhn, mujoco, report, study


def words(page):
    """The text of a page without line breaks."""
    return " ".join((report.ROOT / page).read_text().replace("−", "-").split())


def results(benchmark, name):
    return _tables.read_records(benchmark)[name]["results"]


def compile_seconds(row):
    return sum(row["compile_seconds"][step] for step in ("trace", "compile"))


def test_claims_speed_is_that_of_the_record():
    rows = sorted(results("train", "cpu_one_core"), key=lambda row: row["num_envs"])
    medians = [row["over_cleanrl"]["median"] for row in rows if row["program"] == "purejaxrl"]
    assert "runs {:.2f}, {:.2f} and {:.2f} times as fast".format(*medians) in words("README.md")
    seconds = {(row["program"], row["num_envs"]): compile_seconds(row) for row in rows}
    for rival in ("purejaxrl", "purejaxrl, same options"):
        ratios = [seconds["cleanrl", number] / seconds[rival, number] for number in (4, 64, 2048)]
        assert "{:.2f}, {:.2f} and {:.2f} times".format(*ratios) in words("docs/benchmarks.md"), ratios


def test_claims_speed_on_a_gpu_is_that_of_the_records():
    page = words("docs/devices.md")
    rows = {(row["num_envs"], row["program"]): row for row in results("train", "h100") if row["seeds"] == 1}
    ours, theirs, puffer = ([rows[n, p] for n in (65536, 8192)] for p in ("cleanrl", "purejaxrl", "pufferlib"))
    (carts, games), others = ([row["steps_per_second"] / 1e6 for row in each] for each in (ours, puffer))
    ratios = [row["over_cleanrl"]["median"] for row in theirs]
    assert f"65,536 CartPoles at {carts:.1f} million and 8,192 Breakouts at {games:.1f} million" in page
    assert (
        "{:.2f} and {:.2f} times as fast as PureJaxRL, and `pufferlib` at {:.1f} and {:.1f}".format(*ratios, *others)
        in page
    )
    compiling = [[compile_seconds(row) for row in each] for each in (ours, theirs)]
    assert "compiles {:.1f} and {:.1f} times as long as PureJaxRL".format(*np.divide(*compiling)) in page
    gae = [row for row in results("parts", "h100") if row["part"] == "gae"]
    ours, scans = ([row for row in gae if row["method"] == method] for method in ("ours", "unrolled"))
    speeds = sorted(np.prod(row["size"]) / row["us"]["median"] / 1e3 for row in ours)
    assert "processes {:.0f} to {:.0f} billion elements per second".format(*speeds) in page
    assert "in {:.1f} to {:.1f} times the time".format(*(row["over_floor"]["median"] for row in ours)) in page
    assert "takes {:.1f} to {:.1f} times as long".format(*(row["over_ours"]["median"] for row in scans)) in page


def test_claims_of_the_study_and_of_populations():
    page = words("docs/study.md")
    tasks = {task: results("study", task)["arms"] for task in ("acrobot", "pendulum", "breakout")}
    means = {task: {arm: x[study.WHOLE]["mean"] for arm, x in arms.items()} for task, arms in tasks.items()}
    share = {t: {arm: (x - m["plain"]) / abs(m["plain"]) for arm, x in m.items()} for t, m in means.items()}
    gains = [f"{100 * max(share[task].values()):.0f} %" for task in tasks]
    assert "gains of at most {} on Acrobot, {} on Pendulum and {} on Breakout".format(*gains) in page
    assert f"and a loss of {-100 * min(min(x.values()) for x in share.values()):.0f} %" in page

    def signs(arm, other="plain"):  # of the differences whose interval excludes 0, by task
        pairs = ([arms[each][study.WHOLE]["per_seed"] for each in (arm, other)] for arms in tasks.values())
        return [int(np.sign(x["95"]).sum() / 2) for x in (_pages.compare_pairs(*pair) for pair in pairs)]

    trace, whole = "refresh + V-trace", "all three (PufferLib)"
    assert signs(trace) == signs(trace, "refresh") == signs(whole) == [1, 0, 1]
    assert (signs("refresh"), signs("refresh per epoch"), signs("priorities")) == ([0, 1, 0], [-1, 1, 0], [-1, -1, 0])
    assert signs(whole, trace) == [0, 0, 0]
    page = words("docs/sweeps.md")
    runs = [results("population", f"acrobot_{seed}")["arms"].values() for seed in (101, 201)]
    pairs = np.concatenate([np.subtract(*(arm["per_seed"] for arm in run)) for run in runs])
    assert f"one pair with {np.max(pairs):+.0f} makes the difference; the median is {np.median(pairs):.1f}." in page
    found = results("population", "sweep_cartpole")["confirmation"]
    best, default = (_pages.show_interval(found[which], 0) for which in ("best", "default"))
    assert f"returns {best} with ten other seeds, the defaults {default};" in page


def test_claims_mujoco_returns_are_those_of_the_records():
    """Of the text below the table, which is written from the records."""
    page = words("docs/results.md")
    runs = {(x["task"], x["variant"], x["env_steps"] > 2_000_000): x for x in _tables.read_runs("mujoco")}
    one, three = (runs["Humanoid-v5", "no_contact_forces", long]["best_evaluation"] for long in (False, True))
    assert "four of ten seeds learn to run in 1M steps, and three of ten in 3M" in page
    assert [sum(x > 1200 for x in found["per_seed"]) for found in (one, three)] == [4, 3]
    assert three["mean_95"][0] < 1360 < three["mean_95"][1]  # Tianshou's


def test_claims_every_seed_of_the_preset_learns_to_run_on_humanoid():
    found = results("humanoid", "preset_1")
    training = _pages.show_interval(found["last_100_episodes"])
    least, page = min(found["last_100_episodes"]["per_seed"]), words("docs/results.md")
    assert f"reaches {training} in the last 100 training episodes, and at least {least:,.0f} with each seed" in page
    assert f"seeds {_tables.show_seeds(found['seeds'])}," in page
    assert found["seeds"] == list(range(1, 11))
    others = {name: results("humanoid", name) for name in ("preset_101", "preset_107")}
    for name, other in others.items():
        assert f"[{_tables.show_seeds(other['seeds'])}](../benchmarks/results/humanoid.jsonl#{name})" in page
    least = min(x for other in others.values() for x in other["last_100_episodes"]["per_seed"])
    assert f"at least {least:,.0f}. Seed 106" in page
    curve = {row["env_steps"]: row for row in results("humanoid", "preset_3M_106")["curve"]}
    first, last = curve[999_424], curve[2_998_272]
    training = (row["last_100_episodes"][0] for row in (first, last))
    assert "Seed 106 learns later: {:,.0f} after 1M steps and {:,.0f} [after 3M]".format(*training) in page
    assert f"where an evaluation gives {last['evaluation'][0]:,.0f}." in page
    last = [results("humanoid", f"preset_3M_{seed}")["curve"][-1] for seed in (1, 3)]
    training, played = ([f"{x:,.0f}" for row in last for x in row[key]] for key in ("last_100_episodes", "evaluation"))
    for says, (*some, end) in {"reach {} and {} after 3M,": training, "evaluations give {} and {}.": played}.items():
        assert says.format(", ".join(some), end) in page


def test_claims_what_makes_the_preset_learn_on_humanoid():
    presets = [results("humanoid", name) for name in ("preset_1", "preset_101", "preset_107", "preset_3M_106")]
    rows = [row for preset in presets for row in preset["curve"] if row["env_steps"] in (786_432, 794_624)]
    reached, page = sorted(x for row in rows for x in row["evaluation"]), words("docs/results.md")
    assert f"{len(reached)} seeds of the preset are between {reached[0]:,.0f} and {reached[-1]:,.0f}." in page
    runs = {
        name.removeprefix("humanoid"): [seed["evaluation"][3] for seed in seeds.values()]  # after 800,000 steps
        for name, seeds in results("humanoid", "ablation")["variants"].items()
    }
    for name in ("-all", "+noise", "-noise", "-network"):
        *some, last = (f"{x:,.0f}" for x in runs[name])
        assert (f"{', '.join(some)} and {last}" if some else last) in page
    assert max(*runs["-all"], *runs["-noise"], *runs["-network"]) < reached[0] < min(runs["+noise"])


def test_claims_which_memory_is_for_which_task():
    def returns(name):
        return results("learning", f"popgym_{name}")["evaluation_100_episodes_return"]

    page, other = words("docs/results.md"), "repeat_previous_medium_memory_"
    means = [f"{returns(other + cell)['mean']:.3f}" for cell in ("gru", "lstm", "mingru")]
    assert "RepeatPreviousMedium ends at {}, {} and {} (three seeds)".format(*means) in page
    names = ("repeat_previous_medium", "repeat_previous_hard", "autoencode", "count_recall")
    last = [f"{returns(f'{name}_101')['mean']:.3f}" for name in names]
    assert "Seeds 101 - 110 reach {}, {}, {} and {} on the last four".format(*last) in page
    assert sum(x >= 0.94 for x in returns("repeat_first")["per_seed"]) == 6
    assert "only six of ten seeds reach the threshold" in page


def test_claims_which_single_choices_of_mujoco_ppo_have_a_visible_effect():
    page = words("docs/results.md").replace(",", "")
    (found,) = _tables.compare_runs("mujoco", mujoco.VARIANTS)
    for name in ("refresh_rollout", "value_clip", "advantage_normalize"):
        for change in (found.last[name], found.mean[name]):
            assert change["95"][0] < 0 < change["95"][1]
    costs = {name: round(-x["mean"]) for name, x in found.last.items() if not x["95"][0] < 0 < x["95"][1]}
    assert len(costs) == 2
    assert "Two changes have an interval without 0" in page
    base = round(found.runs["recipe"]["last_evaluation"]["mean"])
    assert f"unscaled rewards cost {costs['unscaled_rewards']} of {base}" in page
    assert f"instead of ten {costs['obs_clip_1']}." in page
    power = float(np.median([change["detectable"] for change in found.last.values()]))
    assert f"ten seeds show one of {power:.0f} with a power of 80 %" in page


def test_claims_settings_of_minatar():
    page = words("docs/pufferlib.md")
    breakout = [x["results"] for name, x in _tables.read_records("pilots").items() if name.startswith("breakout")]
    returns = {x["config"]["ent_coef"]: x["evaluation_100_episodes_return"] for x in breakout}
    much, little = (returns[entropy]["mean"] for entropy in (0.1, 0.03))
    assert f"annealed to 0 reaches {much:.1f} instead of {little:.1f} with 0.03" in page
    eight = [round(x) for entropy in (0.01, 0.03) for x in returns[entropy]["per_seed"]]
    assert f"all eight seeds end at {min(eight)} to {max(eight)}." in page
    assert "nine settings" in page
    assert len(_tables.read_records("pilots")) == 9


def test_claims_self_play_in_poker():
    """Of the page, and of the function that computes them: Kuhn's equilibria, whose value is -1/18, have 0."""
    for alpha in (0, 0.2, 1 / 3):
        table = np.array([[alpha, 1 / 3, 0, 0], [0, 0, 1 / 3, alpha + 1 / 3], [3 * alpha, 1, 1, 1]])
        assert abs(kuhn.exploit(table)) < 1e-9
        assert abs(kuhn.compute_return(table, table) + 1 / 18) < 1e-9
    page = words("docs/gallery/self_play.md")
    assert f"a uniform policy {kuhn.exploit(np.full((3, 4), 0.5)):.3f}" in page
    games = ("connect_four", "connect_four_self_play")
    against, by_self_play = ([x["won_sampled"] for x in results("games", game)["seeds"]] for game in games)
    assert "trained against random moves win more" in page
    assert min(against) > max(by_self_play)
    mirror, clipped = results("kuhn", "kuhn")["arms"]
    first = clipped["curve"][0]
    assert f"is {np.mean(first['exploitability']):.3f} after {first['env_steps']:,} moves" in page
    for arm in (mirror, clipped):
        assert len(arm["seeds"]) == 10
        assert _pages.show_interval(arm["exploitability"], 3) in page


def test_claims_chosen_levels_are_no_better_in_small_mazes():
    assert "the difference between PLR and uniform levels includes 0" in words("docs/gallery/levels.md")
    for name in ("maze_1", "maze_101"):
        found = results("levels", name)
        assert len(found["seeds"]) == 10
        assert found["config"]["total_timesteps"] // (32 * 64) == 97
        assert round(100 * found["share_of_random_levels"]) == 5
        plain, plr, accel = (found["arms"][arm]["held_out"]["per_seed"] for arm in ("uniform", "PLR", "ACCEL"))
        low, high = _pages.compare_means(plr, plain)["95"]
        assert low < 0 < high
        assert _pages.compare_means(accel, plain)["95"][1] < 0


def test_claims_state_dependent_exploration():
    page = words("docs/exploration.md")

    def returns(name):
        found = [results("learning", x) for x in name]
        return np.concatenate([x["evaluation_100_episodes_return"]["per_seed"] for x in found])

    name = "gsde_mountain_car_continuous"
    held, white = (returns([f"{name}{end}", f"{name}_101{end}"]) for end in ("", "_noise_steps_None"))
    assert (len(held), len(white)) == (20, 20)
    assert np.min(held) > 85  # 100 for the flag, minus the energy
    assert np.sum(np.abs(white) < 0.1) == 5
    assert np.mean(white[white > 1]) > np.mean(held)
    assert "all 20 seeds reach the flag. Without gSDE, 5 of 20 end at a return of 0" in page


def test_claims_a_discretized_action_reaches_less_than_a_hybrid_one():
    names = ("hybrid_golf", "hybrid_golf_discretized")
    hybrid, one = (results("learning", name)["evaluation_100_episodes_return"] for name in names)
    assert f"the recipe reaches [{_pages.show_interval(one, 2)}]" in words("docs/results.md")
    assert max(one["per_seed"]) < min(hybrid["per_seed"])


def test_claims_differences_between_libraries():
    page = words("docs/libraries.md").replace(",", "")
    for task in _tables.compare_runs("differences", differences.VARIANTS):
        name, last = task.task.split("-v5")[0], task.last
        visible = [change for change in last.values() if not change["95"][0] < 0 < change["95"][1]]
        quoted = [f" {_pages.show_change(change)} |".replace(",", "") for change in visible]
        assert [text for text in quoted if text not in page] == []
        returns = _pages.show_interval(task.runs["none"]["last_evaluation"]).replace(",", "")
        assert f"{returns} on {name}" in page
        counts = {"HalfCheetah": (24, 4, 18), "Ant": (24, 1, 8)}
        assert (len(last), len(visible), sum(change["mean"] < 0 for change in last.values())) == counts[name]
        assert f"{np.median([change['detectable'] for change in last.values()]):.0f} on {name}" in page

    def last_evaluation(variant):  # of seeds 1 to 10
        return results("differences", f"HalfCheetah-v5_300000_{variant}_1")["curve"][-1]["evaluation"]

    alone = _pages.compare_means(last_evaluation("no_normalize"), last_evaluation("none"))
    assert f"({_pages.show_change(alone)})".replace(",", "") in page


def test_claims_phasic_policy_gradient():
    claim = "faster than PPO with one network at each of three learning rates, but not visibly faster than with two"
    assert claim in words("docs/gallery/values.md")
    found = results("retired", "ppg")["arms"]
    arms = {
        name: [np.nanmean(np.array(x["curves"], float), axis=1) for x in arm.values()] for name, arm in found.items()
    }
    for other, visible in (("one network", True), ("two networks", False)):
        changes = map(_pages.compare_means, arms["PPG"], arms[f"PPO, {other}"])
        assert [change["95"][0] > 0 for change in changes] == [visible] * 3


def test_claims_returns_of_purejaxrl_before_and_after_its_migration():
    page = words("docs/coming-from.md")
    programs = results("retired", "migration_purejaxrl")["programs"]
    last = {name: program["mean_return"]["last tenth"] for name, program in programs.items()}
    returns = ["{mean:.1f} ({std:.1f})".format(**last[name]) for name in ("after", "before")]
    assert "reaches {} in the last tenth of the run instead of {}, and is as fast".format(*returns) in page
    perfect = {name: sum(x == 500 for x in found["per_seed"]) for name, found in last.items()}
    assert perfect == {"before": 1, "after": 18}
    assert "in 18 of 20 seeds, instead of in 1." in page
    speed = results("retired", "migration_purejaxrl_speed")["speed_after_over_before"]
    assert speed["q1"] < 1 < speed["q3"]
