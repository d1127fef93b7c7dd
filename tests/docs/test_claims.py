"""Claims on the pages match the records: functions yield a page, and sentences of it with numbers of the records."""

import numpy as np
import pytest

from benchmarks import _seeds, _tables, differences, kuhn, mujoco, report, study
from ppo_parts import training


def results(benchmark, name):
    return _tables.read_records(benchmark)[name]["results"]


def evaluated(name):
    return results("learning", name)["evaluation_100_episodes_return"]


def excludes_0(change):
    return change["95"][0] > 0 or change["95"][1] < 0


def compile_seconds(row):
    return sum(row["compile_seconds"][step] for step in ("trace", "compile"))


def of_speed():
    yield "README.md"
    sizes, three = (4, 64, 2048), "{:.2f}, {:.2f} and {:.2f} times"

    def average(version, program, measure):
        rows = [row for number in (1, 2) for row in results("train", f"one_core_{version}_{number}")]
        of_size = ([measure(x) for x in rows if (x["program"], x["num_envs"]) == (program, n)] for n in sizes)
        return np.array([np.mean(numbers) for numbers in of_size])

    older, newer = (
        average(version, "purejaxrl", lambda row: row["over_cleanrl"]["median"]) for version in ("0.10.2", "0.11.2")
    )
    yield f"64 CartPoles train [{older[1]:.2f} times as fast]"
    yield f"with jax 0.10.2, and {newer[1]:.2f} times with 0.11.2"
    yield "docs/benchmarks.md"
    yield f"the recipe is {three.format(*newer)} as fast"
    for rival in ("purejaxrl", "purejaxrl, same options"):
        ours, theirs = (average("0.10.2", program, compile_seconds) for program in ("cleanrl", rival))
        yield three.format(*(ours / theirs))
    gae = {tuple(x["size"]): x for x in results("parts", "cpu") if (x["part"], x["method"]) == ("gae", "ours")}
    microseconds = [gae[size]["us"]["median"] for size in ((128, 4), (128, 2048))]
    yield "`gae` takes {:.2f} µs at 128x4 and {:.0f} µs at 128x2048".format(*microseconds)
    yield "docs/devices.md"
    rows = {(row["num_envs"], row["program"]): row for row in results("train", "h100") if row["seeds"] == 1}
    ours, theirs, puffer = ([rows[n, p] for n in (65536, 8192)] for p in ("cleanrl", "purejaxrl", "pufferlib"))
    (carts, games), others = ([row["steps_per_second"] / 1e6 for row in each] for each in (ours, puffer))
    ratios = [row["over_cleanrl"]["median"] for row in theirs]
    yield f"65,536 CartPoles at {carts:.1f} million and 8,192 Breakouts at {games:.1f} million"
    yield "{:.2f} and {:.2f} times as fast as PureJaxRL, and `pufferlib` at {:.1f} and {:.1f}".format(*ratios, *others)
    compiling = [[compile_seconds(row) for row in each] for each in (ours, theirs)]
    yield "takes {:.1f} and {:.1f} times as long as PureJaxRL to compile".format(*np.divide(*compiling))
    gae = [row for row in results("parts", "h100") if row["part"] == "gae"]
    ours, scans = ([row for row in gae if row["method"] == method] for method in ("ours", "unrolled"))
    rates = sorted(np.prod(row["size"]) / row["us"]["median"] / 1e3 for row in ours)
    yield "processes {:.0f} to {:.0f} billion elements per second".format(*rates)
    yield "in {:.1f} to {:.1f} times the time".format(*(row["over_floor"]["median"] for row in ours))
    yield "takes {:.1f} to {:.1f} times as long".format(*(row["over_ours"]["median"] for row in scans))


def of_humanoid():
    yield "docs/results.md"  # its text below the tables, which are written from the records
    runs = {(x["task"], x["variant"], x["env_steps"] > 2_000_000): x for x in _tables.read_runs("mujoco")}
    three = runs["Humanoid-v5", "no_contact_forces", True]["best_evaluation"]
    ends = [sorted(runs["Humanoid-v5", "no_contact_forces", x]["last_evaluation"]["per_seed"])[::-1] for x in (0, 1)]
    yield "four of ten seeds end above 2,800 after 1M steps, and one after 3M"
    yield "3M ({:,.0f}; the next have {:,.0f} and {:,.0f})".format(*ends[1][:3])
    assert [sum(x > 2800 for x in each) for each in ends] == [4, 1]
    assert three["mean_95"][0] < 1360 < three["mean_95"][1]  # Tianshou's
    found = results("humanoid", "preset_1")
    trained, least = _seeds.show_interval(found["last_100_episodes"]), min(found["last_100_episodes"]["per_seed"])
    yield f"reaches {trained} in the last 100 training episodes of 1M steps, and at least {least:,.0f} with each seed"
    yield f"seeds {_tables.show_seeds(found['seeds'])},"
    assert found["seeds"] == list(range(1, 11))
    others = {name: results("humanoid", name) for name in ("preset_101", "preset_107")}
    for name, other in others.items():
        yield f"[{_tables.show_seeds(other['seeds'])}](../benchmarks/results/humanoid.jsonl#{name})"
    least = min(x for other in others.values() for x in other["last_100_episodes"]["per_seed"])
    yield f"at least {least:,.0f} after 1M steps. Seed 106"
    _, long = _tables.read_preset_runs()
    (then,) = (row["last_100_episodes"] for row in long["curve"] if row["env_steps"] == 999_424)
    yield f"the same seeds have {_seeds.show_interval(training.summary(np.array(then)))}"
    yield f"at this point, and at least {min(then):,.0f}"
    assert sorted(long["seeds"]) == list(range(1, 11))
    late = {row["env_steps"]: row["last_100_episodes"][0] for row in results("humanoid", "preset_3M_106")["curve"]}
    yield f"Seed 106 learns later: {late[999_424]:,.0f} after 1M steps and {late[2_998_272]:,.0f} [after 3M]"
    last = (results("humanoid", f"preset_3M_{seed}")["curve"][-1] for seed in (101, 102, 104, 105, 106, 107))
    others = [row["evaluation"][0] for row in last]
    yield f"101, 102 and 104 - 107 for 3M; they evaluate at {min(others):,.0f} to {max(others):,.0f}"
    for says, found in {
        "in training after 3M": "last_100_episodes",
        "in the last evaluation": "last_evaluation",
    }.items():
        returns = long[found]["per_seed"]
        yield f"between {min(returns):,.0f} and {max(returns):,.0f} {says}"
    presets = [results("humanoid", name) for name in ("preset_1", "preset_101", "preset_107", "preset_3M_106")]
    rows = [row for preset in presets for row in preset["curve"] if row["env_steps"] in (786_432, 794_624)]
    reached = sorted(x for row in rows for x in row["evaluation"])
    yield f"{len(reached)} seeds of the preset are between {reached[0]:,.0f} and {reached[-1]:,.0f}."
    variants = results("humanoid", "ablation")["variants"].items()  # these ran for 800,000 steps
    runs = {name.removeprefix("humanoid"): [x["evaluation"][3] for x in seeds.values()] for name, seeds in variants}
    for name in ("-all", "+noise", "-noise", "-network"):
        *some, last = (f"{x:,.0f}" for x in runs[name])
        yield f"{', '.join(some)} and {last}" if some else last
    assert max(*runs["-all"], *runs["-noise"], *runs["-network"]) < reached[0] < min(runs["+noise"])
    (now,) = (run for run in _tables.read_runs("mujoco") if run["task"] == "Swimmer-v5")
    before = _tables.merge(_tables.read_results("retired", "swimmer_little_noise_1", "swimmer_little_noise_101"))
    little, ours = (np.reshape(run["last_evaluation"]["per_seed"], (-1, 10)) for run in (before, now))
    assert now["seeds"] == [*before["seeds"], *range(201, 211)]
    yield "the last evaluations of these seeds are {:.0f} and {:.0f}".format(*little.mean(axis=1))
    yield "instead of {:.0f} and {:.0f}, and four".format(*ours[:2].mean(axis=1))
    assert [np.sum(x < 150) for x in (little, ours[:2])] == [4, 1]
    yield f"reach {_seeds.show_interval(training.summary(ours[2]))}, and each at least {ours[2].min():.0f}"
    yield "four of the 20 end below 150; now one does."


def of_trpo():
    yield "docs/results.md"
    runs = {(x["task"], x["variant"]): x for x in _tables.read_whole_runs() if x["env_steps"] < 2_000_000}
    for task in ("Hopper", "Walker2d"):
        last = (_seeds.show_interval(runs[f"{task}-v5", name]["last_evaluation"]) for name in ("trpo", "recipe"))
        yield "{} instead of {} on {}".format(*last, task)
    first, others = (runs["InvertedDoublePendulum-v5", name] for name in ("tianshou", "recipe"))
    assert first["best_evaluation"]["mean"] == np.mean(first["curve"][0]["evaluation"])
    yield f"(../benchmarks/results/README.md#mujoco) reaches {first['last_evaluation']['mean']:.0f}. With"
    yield "these two are {:.0f} and {:.0f}".format(*(others[f"{x}_evaluation"]["mean"] for x in ("best", "last")))
    curve = results("retired", "trpo_constant_region")["curve"]
    means = {row["env_steps"]: np.mean(row["evaluation"]) for row in curve}
    yield f"{means[348_160]:,.0f} after 350,000 steps, but {means[749_568]:,.0f} after 750,000"


def of_noise():
    yield "docs/results.md"
    runs = [results("retired", f"ant_little_noise_{first}") for first in (1, 6)]
    other = results("mujoco", "Ant-v5_1000000_no_contact_forces_1")
    assert [seed for run in runs for seed in run["seeds"]] == other["seeds"]
    for at, when in ((5, "after 300,000 steps"), (19, "after 1M")):
        less = np.mean([run["curve"][at]["evaluation"] for run in runs])
        yield f"{less:,.0f} instead of {np.mean(other['curve'][at]['evaluation']):,.0f} {when}"


def of_choices():
    yield "docs/study.md"
    tasks = {task: results("study", task)["arms"] for task in ("acrobot", "pendulum", "breakout")}
    means = {task: {arm: x[study.WHOLE]["mean"] for arm, x in arms.items()} for task, arms in tasks.items()}
    share = {t: {arm: (x - m["plain"]) / abs(m["plain"]) for arm, x in m.items()} for t, m in means.items()}
    gains = [f"{100 * max(share[task].values()):.0f} %" for task in tasks]
    yield "gains of at most {} on Acrobot, {} on Pendulum and {} on Breakout".format(*gains)
    yield f"and a loss of {-100 * min(min(x.values()) for x in share.values()):.0f} %"

    def signs(arm, other="plain"):  # signs of the differences whose interval excludes 0, by task
        pairs = ([arms[each][study.WHOLE]["per_seed"] for each in (arm, other)] for arms in tasks.values())
        return [int(np.sign(x["95"]).sum() / 2) for x in (_seeds.compare_pairs(*pair) for pair in pairs)]

    trace, whole = "refresh + V-trace", "all three (PufferLib)"
    assert signs(trace) == signs(trace, "refresh") == signs(whole) == [1, 0, 1]
    assert (signs("refresh"), signs("refresh per epoch"), signs("priorities")) == ([0, 1, 0], [-1, 1, 0], [-1, -1, 0])
    assert signs(whole, trace) == [0, 0, 0]
    yield "docs/sweeps.md"
    runs = [results("population", f"acrobot_{seed}")["arms"].values() for seed in (101, 201)]
    pairs = np.concatenate([np.subtract(*(arm["per_seed"] for arm in run)) for run in runs])
    yield f"one pair with {np.max(pairs):+.0f} makes the difference; the median is {np.median(pairs):.1f}."
    sweep = results("population", "sweep_cartpole")
    best, default = (_seeds.show_interval(sweep["confirmation"][which], 0) for which in ("best", "default"))
    first, second, third, *_ = (f"`{name}` ({x:.2f})" for name, x in sweep["importance"].items())
    yield f"were {first}, {second}"
    yield f"and {third}"
    yield f"returns {best} with ten other seeds, and the defaults return {default};"
    yield "docs/results.md"
    (found,) = _tables.compare_runs("mujoco", mujoco.VARIANTS)
    for name in ("refresh_rollout", "value_clip", "advantage_normalize"):
        assert not any(map(excludes_0, (found.last[name], found.mean[name])))
    costs = {name: round(-x["mean"]) for name, x in found.last.items() if excludes_0(x)}
    assert len(costs) == 2
    yield "The intervals of two changes exclude 0"
    base = round(found.runs["recipe"]["last_evaluation"]["mean"])
    yield f"unscaled rewards cost {costs['unscaled_rewards']} of {base}"
    yield f"instead of ten cost {costs['obs_clip_1']}."
    sizes = [found.last[name]["detectable"] for name in ("refresh_rollout", "value_clip", "advantage_normalize")]
    yield f"ten seeds detect one of {min(sizes):.0f} to {max(sizes):.0f} in these with a power of 80 %"
    yield "docs/pufferlib.md"
    pilots = _tables.read_records("pilots")
    breakout = [x["results"] for name, x in pilots.items() if name.startswith("breakout")]
    returns = {x["config"]["ent_coef"]: x["evaluation_100_episodes_return"] for x in breakout}
    much, little = (returns[entropy]["mean"] for entropy in (0.1, 0.03))
    yield f"annealed to 0 reaches {much:.1f} instead of {little:.1f} with 0.03"
    eight = [round(x) for entropy in (0.01, 0.03) for x in returns[entropy]["per_seed"]]
    yield f"all eight seeds end at {min(eight)} to {max(eight)}."
    yield "six settings"
    assert len({name.partition("_")[2] for name in pilots}) == 6
    yield "docs/libraries.md"
    for task in _tables.compare_runs("differences", differences.VARIANTS):
        name, last = task.task.split("-v5")[0], task.last
        visible = [change for change in last.values() if excludes_0(change)]
        yield from (f" {_seeds.show_change(change)} |".replace(",", "") for change in visible)
        yield f"{_seeds.show_interval(task.runs['none']['last_evaluation'])} on {name}".replace(",", "")
        counts = {"HalfCheetah": (24, 4, 18), "Ant": (24, 1, 8)}
        assert (len(last), len(visible), sum(change["mean"] < 0 for change in last.values())) == counts[name]
        yield f"{np.median([change['detectable'] for change in last.values()]):.0f} on {name}"
    names = [f"HalfCheetah-v5_300000_{variant}_1" for variant in ("no_normalize", "none")]  # with seeds 1 to 10
    alone = _seeds.compare_means(*(results("differences", name)["curve"][-1]["evaluation"] for name in names))
    yield f"({_seeds.show_change(alone)})".replace(",", "")
    names = [f"HalfCheetah-v5_300000_{variant}_11" for variant in ("none", "adaptive_rate")]
    cost = _seeds.compare_pairs(*(results("differences", name)["last_100_episodes"]["per_seed"] for name in names))
    yield f"costs {_seeds.show_change(cost, '.0f')} of the same training return".replace(",", "")
    last = _seeds.compare_means(*(results("differences", name)["curve"][-1]["evaluation"] for name in names))
    yield f"but {_seeds.show_change(last, '.0f')} in the last evaluation".replace(",", "")


def of_tasks():
    yield "docs/results.md"
    cells = [f"popgym_repeat_previous_medium_memory_{cell}" for cell in ("gru", "lstm", "mingru")]
    means = [f"{evaluated(name)['mean']:.3f}" for name in cells]
    yield "RepeatPreviousMedium ends at {}, {} and {} (three seeds)".format(*means)
    names = ("repeat_first", "repeat_previous_medium", "repeat_previous_hard", "autoencode", "count_recall")
    last = [f"{evaluated(f'popgym_{name}_101')['mean']:.3f}" for name in names]
    yield "Seeds 101 - 110 reach {}, {}, {}, {} and {}".format(*last)
    first = [evaluated(f"popgym_repeat_first{of_seeds}")["per_seed"] for of_seeds in ("", "_101")]
    assert [sum(x >= 0.94 for x in each) for each in first] == [6, 6]
    yield "only six of ten seeds reach the threshold, in both sets of seeds"
    hybrid, one = map(evaluated, ("hybrid_golf", "hybrid_golf_discretized"))
    yield f"the recipe reaches [{_seeds.show_interval(one, 2)}]"
    assert max(one["per_seed"]) < min(hybrid["per_seed"])
    found = [evaluated(f"craftax_classic_memory{of_seeds}") for of_seeds in ("", "_101")]
    yield f"101 - 110 reach less, [{_seeds.show_interval(found[1], 1)}]"
    yield f"the worst of the 20 seeds {min(x for each in found for x in each['per_seed']):.1f}"
    yield "docs/gallery/self_play.md"
    for alpha in (0, 0.2, 1 / 3):  # these are Kuhn's equilibria, whose value is -1/18; nothing exploits them
        table = np.array([[alpha, 1 / 3, 0, 0], [0, 0, 1 / 3, alpha + 1 / 3], [3 * alpha, 1, 1, 1]])
        assert abs(kuhn.exploit(table)) < 1e-9
        assert abs(kuhn.compute_return(table, table) + 1 / 18) < 1e-9
    yield f"a uniform policy {kuhn.exploit(np.full((3, 4), 0.5)):.3f}"
    games = ("connect_four", "connect_four_self_play")
    against, by_self_play = ([x["won_sampled"] for x in results("games", game)["seeds"]] for game in games)
    yield "trained against random moves win more"
    assert min(against) > max(by_self_play)
    mirror, clipped = results("kuhn", "kuhn")["arms"]
    first = clipped["curve"][0]
    yield f"is {np.mean(first['exploitability']):.3f} after {first['env_steps']:,} moves"
    assert len(mirror["seeds"]) == len(clipped["seeds"]) == 10
    yield from (_seeds.show_interval(arm["exploitability"], 3) for arm in (mirror, clipped))
    yield "docs/gallery/levels.md"
    yield "the difference between PLR and uniform levels includes 0"
    for name in ("maze_1", "maze_101"):
        found = results("levels", name)
        assert (len(found["seeds"]), found["config"]["total_timesteps"] // (32 * 64)) == (10, 97)
        assert round(100 * found["share_of_random_levels"]) == 5
        plain, plr, accel = (found["arms"][arm]["held_out"]["per_seed"] for arm in ("uniform", "PLR", "ACCEL"))
        assert not excludes_0(_seeds.compare_means(plr, plain))
        assert _seeds.compare_means(accel, plain)["95"][1] < 0
    yield "docs/exploration.md"
    names = [[f"gsde_mountain_car_continuous{x}{end}" for x in ("", "_101")] for end in ("", "_noise_steps_None")]
    held, white = (np.concatenate([evaluated(name)["per_seed"] for name in both]) for both in names)
    assert (len(held), len(white)) == (20, 20)
    assert np.min(held) > 85  # 100 for the flag minus the energy
    assert np.sum(np.abs(white) < 0.1) == 5
    assert np.mean(white[white > 1]) > np.mean(held)
    yield "all 20 seeds reach the flag. Without gSDE, 5 of 20 end at a return of 0"
    yield "docs/gallery/values.md"
    yield "faster than PPO with one network at each of three learning rates. With two networks"
    arms = results("retired", "ppg")["arms"].items()
    half = [dict(arms)[name]["0.0005"]["second_half"]["mean"] for name in ("PPG", "PPO, two networks")]
    yield "returns {:.0f} instead of {:.0f} at the smallest rate".format(*half)
    arms = {name: [np.nanmean(np.array(x["curves"], float), axis=1) for x in arm.values()] for name, arm in arms}
    for other, visible in (("one network", True), ("two networks", False)):
        changes = map(_seeds.compare_means, arms["PPG"], arms[f"PPO, {other}"])
        assert [change["95"][0] > 0 for change in changes] == [visible] * 3
    yield "docs/coming-from.md"
    programs = results("retired", "migration_purejaxrl")["programs"]
    last = {name: program["mean_return"]["last tenth"] for name, program in programs.items()}
    returns = ["{mean:.1f} ({std:.1f})".format(**last[name]) for name in ("after", "before")]
    yield "reaches {} in the last tenth of the run instead of {}, and is as fast".format(*returns)
    perfect = {name: sum(x == 500 for x in found["per_seed"]) for name, found in last.items()}
    assert perfect == {"before": 1, "after": 18}
    yield "in 18 of 20 seeds, instead of in 1."
    speed = results("retired", "migration_purejaxrl_speed")["speed_after_over_before"]
    assert speed["q1"] < 1 < speed["q3"]


@pytest.mark.parametrize("claims", [of_speed, of_humanoid, of_trpo, of_noise, of_choices, of_tasks])
def test_claims(claims):
    """The check ignores line breaks, the kind of minus and, for claims without commas, the commas of the page."""
    missing, text = [], ""
    for claim in claims():
        if claim.endswith(".md"):
            text = " ".join((report.ROOT / claim).read_text().replace("−", "-").split())
        elif claim not in text and claim not in text.replace(",", ""):
            missing.append(claim)
    assert missing == []
