"""Rules that explain why a run does not learn, from its metrics, its configuration and `probe`.

Each rule compares a number with its normal range. Ranges of settings contain the defaults of ten libraries
(docs/libraries.md). Others contain nearly all healthy runs in the training split of `python -m benchmarks doctor`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from .._base.checked import checked
from ..errors import UserValueError
from ._config import RunOptions
from ._probe import read_fields
from ._run import find_nonfinite

RISEN = 3
"""A return rose if it rose by more than this many standard errors."""
Confidence = Literal["certain", "likely", "possible"]


class Finding(NamedTuple):
    """A cause that explains why the `value` of a `metric` is not in the range `normal`.

    The confidence is "certain" if the value is wrong by definition, "likely" if a setting or a measurement points to
    this cause, and "possible" if other causes look the same.
    """

    name: str
    cause: str
    metric: str
    value: float
    normal: tuple[float, float]
    advice: str
    confidence: Confidence


class Evidence:
    """Access to the metrics and settings in `diagnose`. Unknown values are NaN, so comparisons with them are False."""

    def __init__(self, metrics: Mapping[str, Any], config: Any = None) -> None:
        try:
            arrays = {name: np.asarray(x, float) for name, x in metrics.items()}
        except (TypeError, ValueError) as error:
            raise UserValueError(f"must be numbers or arrays: {error}", where="diagnose", argument="metrics") from None
        self.metrics = {name: x for name, x in arrays.items() if x.size}
        self.config = read_fields(config)
        self.epochs = self.setting("update_epochs", "actor_epochs")

    def find(self, name: str) -> str | None:
        """Return the name of a metric, perhaps with a phase's prefix, or None if it is missing."""
        excluded = ("evaluation/", "population/", "probe/", "nonfinite/")
        of_phases = (x for x in self.metrics if x.endswith(f"/{name}") and not any(each in x for each in excluded))
        return name if name in self.metrics else next(of_phases, None)

    def series(self, name: str) -> np.ndarray:
        """Return the known values of a metric, as medians over the seeds; see `find`."""
        found = self.find(name)
        x = np.asarray(np.nan) if found is None else self.metrics[found]
        x = x.reshape(1, -1) if name.startswith("probe/") or not x.ndim else x.reshape(len(x), -1)
        return np.nanmedian(x[np.isfinite(x).any(axis=1)], axis=1)

    def over(self, name: str, statistic: Callable[[np.ndarray], Any]) -> float:
        """Return a statistic of a metric's known values."""
        x = self.series(name)
        return float(statistic(x)) if len(x) else np.nan

    def early(self, name: str) -> float:
        """Return the mean of the first tenth of the values."""
        return self.over(name, lambda x: np.mean(x[: -(-len(x) // 10)]))

    def size(self, name: str) -> float:
        """Return the mean absolute value of the first quarter of the values."""
        return self.over(name, lambda x: np.mean(np.abs(x[: -(-len(x) // 4)])))

    def late(self, name: str) -> float:
        """Return the mean of the last quarter of the values."""
        return self.over(name, lambda x: np.mean(x[3 * len(x) // 4 :]))

    def setting(self, *names: str) -> float:
        """Return the first of these settings that is a number."""
        found = [self.config[x] for x in names if isinstance(self.config.get(x), (int, float, np.number))]
        return float(found[0]) if found else np.nan

    def progress(self) -> float:
        """Return the rise of the return, in standard deviations of its noise between updates."""
        rise = self.late("episode_return") - self.early("episode_return")
        return rise / self.noise() if len(self.series("episode_return")) >= 8 else np.nan

    def noise(self) -> float:
        """Return the standard deviation of the return between updates."""
        return self.over("episode_return", lambda x: np.std(np.diff(x)) / 2**0.5 + 1e-9)

    def rise(self) -> float:
        """Return the rise of the return, in standard errors of the means of the first tenth and the last quarter."""
        return self.progress() * (len(self.series("episode_return")) / 14) ** 0.5

    def rose(self, errors: float = RISEN) -> bool:
        """Return whether the return rose by this many standard errors."""
        return self.rise() > errors


def nonfinite_updates(run: Evidence) -> float:
    """Count updates with non-finite numbers, from the learner's counts, or from losses in other libraries' logs."""
    counts = [x > 0 for name, x in run.metrics.items() if "nonfinite/" in name]
    losses = [~np.isfinite(run.metrics[name]) for name in ("value_loss", "policy_loss") if name in run.metrics]
    bad = [x.reshape(len(x), -1).any(axis=1) for x in counts or losses]
    return float(max(map(np.sum, bad), default=0))


def copied_seeds(run: Evidence) -> float:
    """Count seeds whose losses are bit-identical to another seed's."""
    losses = [x for name, x in run.metrics.items() if name.endswith("loss") and x.ndim == 2]
    return float(len(losses[0].T) - len(np.unique(np.concatenate(losses), axis=1).T)) if losses else 0.0


def false_ends(run: Evidence) -> float:
    """Count terminations that values do not predict, if the last ones all come after the same 50 or more steps."""
    length = run.series("episode_length")
    length = length[-max(3, len(length) // 4) :]
    fixed = len(length) >= 3 and np.ptp(length) == 0 and length[0] >= 50
    foreseen = run.late("probe/value_at_end") < 0.5
    return np.nan if run.late("probe/truncated") or not fixed or foreseen else run.late("probe/terminated")


def actions_matter(run: Evidence) -> bool:
    """Return whether actions may change what follows; if they do not, no end or horizon can be wrong."""
    return run.late("probe/no_effect") != 1


def lost_in_evaluation(run: Evidence) -> float:
    """Return the share of the return's rise that the last evaluations lack; NaN without a significant rise."""
    if not run.rose():
        return np.nan
    early, late, played = run.early("episode_return"), run.late("episode_return"), run.late("evaluation/episode_return")
    episodes = np.nan_to_num(run.late("episodes"), nan=32)  # per update; 32 are a small evaluation
    loss = (late - played) / (run.noise() * (episodes / 32) ** 0.5)
    return (late - played) / (late - early) if loss * run.rise() > 25 else np.nan  # neither is noise


def motion_left(run: Evidence) -> float:
    """Return the divergence in the second half, without its end, divided by the divergence at the beginning."""
    kl, first = run.series("approx_kl"), run.early("approx_kl")
    return float(np.median(kl[len(kl) // 2 : 9 * len(kl) // 10])) / first if len(kl) >= 20 and first > 1e-5 else np.nan


def largest_divergence(run: Evidence) -> float:
    """Return the larger of the divergences at the beginning and at the end."""
    return max(run.early("approx_kl"), run.late("approx_kl"))


def policy_loss_size(run: Evidence) -> float:
    """Return the policy loss of the first quarter in units of sqrt(2 KL), its bound for standardized advantages.

    A surrogate's loss is the mean of (ratio - 1) * A, and the mean of (ratio - 1)^2 is about 2 KL (Cauchy-Schwarz).
    The unit is at least 0.06, because of noise, and 0.5 if the divergence is unknown or 0, as with other losses.
    """
    unit = (2 * (run.size("approx_kl") or np.nan)) ** 0.5
    return run.size("policy_loss") / max(np.nan_to_num(unit, nan=0.5), 0.06)


def is_first_step(run: Evidence) -> bool:
    """Return whether the loss always has its value before the first step, 0 for standardized advantages."""
    found = run.find("policy_loss")
    return found is not None and run.early(found.replace("policy_loss", "minibatches")) == 1


def entropy_lost(run: Evidence) -> float:
    """Return the lost share of the entropy, or of 1.5 nats if the entropy was not positive."""
    early, late = run.early("entropy"), run.late("entropy")
    return (early - late) / (early if early > 0 else 1.5)


def collapsed(run: Evidence) -> bool:
    """Return whether the policy became deterministic without a rise of the return, a clear one if it is a density."""
    return entropy_lost(run) > 0.8 and run.rise() <= (5 if run.late("entropy") < 0 else 2)


def return_left(run: Evidence) -> float:
    """Return the share of the first returns that is left, or NaN unless they are positive."""
    early = run.early("episode_return")
    return run.late("episode_return") / early if early > 0 else np.nan


def rewards_shrank(run: Evidence) -> bool:
    """Return whether rewards may be small because the policy became deterministic or avoids most costs."""
    early = run.early("episode_return")
    return collapsed(run) or (early < 0 and 0.1 * early < run.late("episode_return") <= 0)


def failed_to_learn(run: Evidence) -> bool:
    """Return whether the value loss did not fall and the return did not rise in 100 updates and 100,000 steps."""
    updates, fell = len(run.series("explained_variance")), run.late("value_loss") < 0.5 * run.early("value_loss")
    steps = updates * run.setting("num_envs") * run.setting("num_steps")
    return updates >= 100 and not steps < 100_000 and not fell and not run.rose()


class Rule(NamedTuple):
    """A rule that gives a `Finding` if `value` (None means the late `metric`) is not between `low` and `high`.

    The rule applies only `when` a condition holds, `unless` an earlier rule explains the same numbers. Commas separate
    the alternatives in its advice.
    """

    name: str
    confidence: Confidence
    metric: str
    low: float
    high: float
    cause: str
    advice: str
    value: Callable[[Evidence], float] | None = None
    when: Callable[[Evidence], bool] = lambda run: True
    unless: tuple[str, ...] = ()


INF = np.inf
RULES = (
    # Faults by definition.
    Rule("not_finite", "certain", "updates with non-finite numbers", -INF, 0, "numbers are not finite",
         "look at the quantity where they arose first", nonfinite_updates),
    Rule("duplicated_seeds", "certain", "copied seeds", -INF, 0, "seeds are copies of each other",
         "give each seed its own key: jax.random.split", copied_seeds),
    Rule("memory_not_reset", "certain", "probe/memory_after_reset", -INF, 1e-3,
         "the policy's memory survives the end of an episode", "zero the carry where batch.reset is 1"),
    Rule("action_unavailable", "certain", "probe/action_unavailable", -INF, 0,
         "the policy takes actions that the observation's mask rules out",
         "distributions.mask_logits(logits, batch.obs.available) in evaluate"),
    Rule("action_changed", "certain", "probe/log_ratio", -INF, 1e-2,
         "the stored action is not the one that was sampled: it was clipped or squashed",
         "store it as it was sampled; envs.clip_action changes it in the environment",
         when=lambda run: run.late("probe/action_beyond") == 0 and not run.late("probe/log_ratio_inside") > 1e-2),
    Rule("policy_differs", "certain", "change of log-probability or value", -INF, 1e-2,
         "training evaluates another policy, or other observations, than the rollout did",
         "store observations as the policy saw them; no dropout or batch statistics in evaluate; return the new carry",
         lambda run: float(np.fmax(run.late("probe/log_ratio"), run.late("probe/value_change"))),
         unless=("memory_not_reset", "action_changed")),
    Rule("log_prob_wrong", "likely", "probe/score", -INF, 6,
         "log_prob is not the density from which the policy samples",
         "log_prob of the action as it was sampled, with the Jacobian of what squashes it",
         when=lambda run: not run.late("probe/action_at_bound") - run.late("probe/action_beyond") > 0.5
         and not run.setting("noise_steps") > 1,  # squashed actions are rounded at a bound
         unless=("memory_not_reset", "action_changed", "policy_differs")),
    Rule("softmax_twice", "likely", "probe/softmax_twice", -INF, 0.1,
         "all logits can be probabilities, one of which is often large: they are the output of a softmax",
         "leave out the softmax: Categorical takes logits"),
    Rule("mean_rectified", "likely", "probe/mean_zero", -INF, 0.1,
         "the mean of an action is exactly 0 for many observations, as after a ReLU",
         "no activation after the last layer of the policy"),
    Rule("parameters_unused", "likely", "probe/unused_parameters", -INF, 0,
         "neither log-probabilities nor values depend on some parameters",
         "look for stop_gradient, and for layers whose results are not used, in evaluate"),
    # Faults in the settings.
    Rule("gamma_short", "likely", "gamma", 0.88, INF, "the horizon 1 / (1 - gamma) is much shorter than an episode",
         "--gamma 0.99", lambda run: run.setting("gamma"),
         lambda run: actions_matter(run) and 0.35 * run.early("episode_length") * (1 - run.setting("gamma")) > 1),
    Rule("rollout_short", "likely", "steps of a rollout with a memory", 16, INF,
         "what the policy should remember reaches beyond a rollout, where its gradient ends", "a larger --num-steps",
         lambda run: run.setting("num_steps"),
         lambda run: run.late("episode_length") > run.setting("num_steps")
         and not np.isnan(run.late("probe/memory_after_reset"))),
    Rule("minibatch_small", "likely", "elements of a minibatch", 16, INF, "small minibatches make gradients noisy",
         "a smaller --num-minibatches, or more environments",
         lambda run: run.setting("num_envs") * run.setting("num_steps") / run.setting("num_minibatches")),
    Rule("updates_few", "possible", "updates", 10, INF, "a few updates cannot change the policy much",
         "a smaller --num-steps, a larger --total-timesteps", lambda run: len(run.series("policy_loss")) or np.nan,
         lambda run: not run.rose()),
    Rule("epochs_many", "likely", "epochs", -INF, 25, "so many epochs overfit each rollout",
         "4 epochs, or --target-kl 0.02", lambda run: run.epochs),
    Rule("stops_at_once", "likely", "early_stopped", -INF, 0.95, "the early stop ends every update in its first epoch",
         "a target_kl of 0.02", when=lambda run: run.late("epochs") <= 1.1 < run.epochs),
    Rule("learning_rate_large", "likely", "learning_rate", -INF, 0.02, "the learning rate is too large for Adam",
         "a learning rate of 3e-4",
         lambda run: float(np.fmax(run.setting("learning_rate", "actor_learning_rate"), run.early("learning_rate")))),
    Rule("value_explains_nothing", "likely", "vf_coef", 0.01, INF, "the value function is hardly trained",
         "--vf-coef 0.5", lambda run: run.setting("vf_coef")),
    Rule("clip_large", "likely", "clip_coef", -INF, 0.6, "the clip range is so large that nothing limits the ratio",
         "--clip-coef 0.2", lambda run: run.setting("clip_coef")),
    Rule("clip_small", "likely", "clip_coef", 0.01, INF, "the clip range removes most gradients", "--clip-coef 0.2",
         lambda run: run.setting("clip_coef")),
    Rule("clip_small", "likely", "clip_fraction", -INF, 0.3, "the clip range removes most gradients",
         "--clip-coef 0.2, or clip_eps=0.2",
         lambda run: run.early("clip_fraction"), lambda run: run.early("approx_kl") < 1e-3),
    Rule("entropy_bonus_large", "likely", "ent_coef", -INF, 0.15, "the entropy bonus keeps the policy random",
         "--ent-coef 0.01", lambda run: run.setting("ent_coef"), lambda run: entropy_lost(run) < 0.1),
    # Faults in the data.
    Rule("flags_shifted", "likely", "probe/jump_at_end", 0.5, INF,
         "ends are flagged one step early or late, or the first observation of an episode belongs to another one",
         "terminated[t] is of the transition out of step t: envs.check_laws(env) checks it; look at reset, too"),
    Rule("time_limit_as_end", "likely", "probe/terminated", -INF, 0,  # Pardo et al. 2018, arXiv:1712.00378
         "a time limit is reported as a termination, unless it is part of the task",
         "return truncated instead, and final_obs", false_ends, actions_matter),
    Rule("end_as_time_limit", "possible", "truncations, none of them at a fixed time", -INF, 4,
         "ends are reported as time limits, although episodes differ in length", "return terminated instead",
         lambda run: run.late("probe/truncated"),
         lambda run: run.late("probe/terminated") == 0 and run.late("probe/length_spread") > 0.02),
    Rule("never_ends", "likely", "steps without an end", -INF, 5000, "no episode ends",
         "add a time limit; pass rollout_state on to the next rollout",
         lambda run: len(run.metrics.get("episodes", ())) * run.setting("num_steps"),
         lambda run: not np.nansum(run.metrics["episodes"])),
    Rule("never_ends", "likely", "episodes of an update, none flagged", -INF, 1, "no step is flagged as an end",
         "terminated[t] or truncated[t] is 1 where the transition out of step t ended the episode",
         lambda run: run.late("episodes"), lambda run: run.late("probe/terminated") + run.late("probe/truncated") == 0),
    Rule("end_rewarded", "possible", "episode_length", 3, INF,
         "the policy learned to end its episodes at once: an end costs less than going on",
         "a reward for each step, or a cost of the ends that are failures",
         when=lambda run: run.over("episode_length", lambda x: x[0]) > 1.5 * run.late("episode_length")
         and run.late("probe/reward_balance") < -0.95 and run.late("probe/terminated") > 0),
    Rule("statistics_frozen", "likely", "probe/obs_seen", 0.5, INF,
         "running statistics of observations are not updated", "pass the environment's state on to the next rollout"),
    Rule("observations_large", "likely", "probe/obs_rms", -INF, 20,
         "observations are too large: they are not standardized", "--normalize-env, or envs.normalize_observation"),
    Rule("observations_vanish", "likely", "probe/obs_std", 0.02, INF,
         "observations are constant, or divided by statistics that exploded", "look for outliers in observations",
         when=lambda run: not entropy_lost(run) > 0.8,  # a deterministic policy may see little
         unless=("end_rewarded",)),
    Rule("action_unused", "likely", "probe/action_effect", 1e-12, INF,
         "a component of the action changes neither observations nor rewards",
         "look at how step reads the action", when=actions_matter),
    Rule("action_unused", "likely", "probe/actions_ignored, or probe/no_effect without rewards", -INF, 0.5,
         "a different policy sees the same observations and receives the same rewards",
         "look at how step reads the action, and at the mask, which must be True where an action is available",
         lambda run: run.late("probe/actions_ignored" if run.late("probe/reward_size") else "probe/no_effect")),
    Rule("duplicated_envs", "likely", "probe/same_envs", -INF, 0.5,
         "environments are copies of each other, or no action has an effect", "give each environment its own key",
         when=lambda run: not entropy_lost(run) > 0.8,  # a deterministic policy may lead them all to the same place
         unless=("action_unused",)),
    Rule("observation_late", "possible", "probe/observation_late", -INF, 0,
         "the observation after a step does not depend on its action, but the next one does",
         "return the observation of the new state, and let it show velocities", when=lambda run: not run.rose()),
    Rule("reward_elsewhere", "likely", "probe/reward_elsewhere", -INF, 0.5,
         "most agents' actions change the rewards of others, but not their own",
         "keep observations, actions and rewards in the same order of agents"),
    Rule("advantage_lost", "likely", "mean |policy_loss|, first quarter", 1e-7, INF,
         "all advantages are 0, or the optimizer does not change the policy",
         "standardize over the minibatch or the rollout, not each element alone; look at which parameters are trained",
         lambda run: run.size("policy_loss"),
         lambda run: not is_first_step(run)),
    Rule("update_reversed", "likely", "probe/update_direction", -0.01, INF,
         "the first update of a new run makes actions with a positive advantage less probable",
         "look at the signs of advantages, of the loss and of the step, and at your estimator where episodes end",
         when=lambda run: not run.rose(),  # the chain may add larger terms to rewards
         unless=("learning_rate_large", "advantage_lost")),
    Rule("reward_constant", "likely", "probe/reward_spread", 1e-3, INF,
         "all rewards are the same, and no episode ends early",
         "look at wrappers that clip the reward, and at a time limit too short for the goal",
         when=lambda run: run.late("probe/terminated") == 0 and actions_matter(run)
         and not run.over("episode_length", lambda x: np.ptp(x) / np.max(x)) > 0.02
         and not run.late("probe/reward_balance") > 0,  # paid steps favor no end
         unless=("update_reversed",)),
    Rule("reward_constant", "likely", "largest |return|", 1e-12, INF, "no reward was ever found",
         "wrappers that clip the reward, more exploration, a start nearer to the goal",
         lambda run: run.over("episode_return", lambda x: np.max(np.abs(x))),
         lambda run: run.late("probe/reward_size") == 0),
    Rule("reward_sign", "likely", "sign of reward * return", 0, INF,
         "the learner receives rewards of the opposite sign", "look at the sign in wrappers of the reward",
         lambda run: float(np.sign(run.late("probe/reward_balance") * run.late("episode_return"))),
         lambda run: abs(run.late("probe/reward_balance")) > 0.95),
    Rule("reward_scale_large", "likely", "probe/target_rms", -INF, 3000,
         "rewards are so large that the value loss hides the policy", "envs.normalize_reward with the gamma of gae"),
    Rule("reward_scale_large", "likely", "probe/reward_size", -INF, 50,
         "rewards are so large that the value loss hides the policy", "envs.normalize_reward with the gamma of gae"),
    Rule("reward_scale_large", "likely", "value_loss, late or 2 % of early", -INF, 3e3,  # the policy may collapse
         "the value loss is so large that it hides the policy", "envs.normalize_reward with the gamma of gae",
         lambda run: float(np.fmax(run.late("value_loss"), run.early("value_loss") / 50))),
    Rule("reward_scale_small", "likely", "probe/reward_size", 0.003, INF,
         "rewards are so small that errors of the value function hide them", "envs.normalize_reward",
         lambda run: run.late("probe/reward_size") or np.nan,  # 0 means that they are rare
         lambda run: actions_matter(run) and not rewards_shrank(run)),
    Rule("reward_scale_small", "likely", "probe/target_rms", 0.2, INF,
         "rewards are so small that errors of the value function hide them", "envs.normalize_reward",
         when=lambda run: run.early("value_loss") < 0.03 and 0 < run.late("probe/reward_size") < 0.2  # else rare
         and not run.late("probe/value_error") < 10 and not rewards_shrank(run) and not return_left(run) < 0.2),
    # Faults in the gradient steps.
    Rule("advantage_not_standardized", "likely", "mean |policy_loss| / sqrt(2 approx_kl), first quarter", -INF, 0.5,
         "advantages are not standardized, so rewards scale the policy's gradient",
         "--norm-adv, or pp.advantage_normalize()", policy_loss_size, unless=("action_changed", "policy_differs")),
    Rule("schedule_ends_early", "likely", "approx_kl, second half / beginning", 1e-6, INF,
         "the policy stops moving early, as if a schedule in updates counted gradient steps",
         "pp.clipped_adam counts updates; optax counts gradient steps", motion_left,
         lambda run: not entropy_lost(run) > 0.8  # a deterministic policy does not move either
         and not (np.isnan(entropy_lost(run)) and run.rose()),
         ("softmax_twice", "end_rewarded")),
    Rule("learning_rate_large", "likely", "approx_kl", -INF, 0.1, "steps leave the neighborhood of the acting policy",
         "a learning rate of 3e-4, or --target-kl 0.02",
         lambda run: run.early("approx_kl") if run.rose() and not run.late("approx_kl") > 1
         else largest_divergence(run),
         unless=("epochs_many", "clip_large")),
    Rule("learning_rate_large", "likely", "clip_fraction", -INF, 0.4, "the first steps leave the clip range",
         "a learning rate of 3e-4", lambda run: run.early("clip_fraction"),
         lambda run: run.early("approx_kl") > 0.01, ("epochs_many",)),
    Rule("learning_rate_small", "likely", "target_kl", 1e-3, INF, "the rate adapts to a divergence that is too small",
         "--target-kl 0.01", lambda run: run.setting("target_kl"), lambda run: "adapt_each_epoch" in run.config),
    Rule("learning_rate_small", "likely", "learning_rate", 1e-4, INF, "the learning rate is too small",
         "a learning rate of 3e-4", lambda run: run.setting("learning_rate", "actor_learning_rate"),
         lambda run: largest_divergence(run) < 1e-4 and not run.rose(30)),
    Rule("learning_rate_small", "likely", "approx_kl", 1e-5, INF, "steps are so small that the policy hardly moves",
         "a learning rate three times as large, and again", largest_divergence,
         # Annealing over a few updates also makes steps small, and if the return clearly rises, they are large enough.
         lambda run: len(run.series("approx_kl")) >= 20 and not run.rose(30),
         ("advantage_lost", "stops_at_once", "clip_small", "gamma_short", "reward_scale_large")),
    Rule("reward_sign", "likely", "rise of the return, in standard deviations", -10, INF,
         "training lowers the return, as if rewards or the loss had the opposite sign",
         "look at the sign in wrappers of the reward and in the loss, and at what rewards pay for", Evidence.progress,
         unless=("learning_rate_large", "epochs_many", "policy_differs", "update_reversed")),
    Rule("entropy_collapsed", "likely", "entropy lost", -INF, 0.8,
         "the policy became deterministic before it had learned", "a larger --ent-coef, or smaller steps",
         entropy_lost, collapsed, ("update_reversed", "action_unused")),
    Rule("reward_sign", "likely", "share of the first returns that is left", 0.2, INF,
         "training loses what the first policy earned, as if rewards or the loss had the opposite sign",
         "look at the sign in wrappers of the reward and in the loss, and at what rewards pay for", return_left,
         unless=("learning_rate_large", "epochs_many", "policy_differs", "update_reversed")),
    # Faults in the network.
    Rule("agents_alike", "likely", "probe/agents_alike", -INF, 0.99,
         "agents that share a policy are indistinguishable to it, so they all act the same",
         "--agent-id, or envs.with_agent_id",
         when=lambda run: not entropy_lost(run) > 0.8),  # they may have learned to act alike
    Rule("inputs_shrunk", "possible", "probe/value_spread", 3e-3, INF,
         "values of a new policy hardly depend on what it observes",
         "look in the network for a second division of observations, as by 255, and for a value head with a small gain",
         when=lambda run: not run.rose() or run.late("probe/dead_units") > 0.3),  # few inputs reach such units
    Rule("dead_units", "likely", "probe/dead_units", -INF, 0.3,  # Sokar et al. 2023, arXiv:2302.12902
         "no gradient reaches many hidden units", "--activation tanh, orthogonal initialization, smaller steps",
         unless=("observations_large", "inputs_shrunk")),  # large inputs saturate units
    Rule("actions_saturated", "likely", "probe/action_at_bound", -INF, 0.9,
         "actions are at their bounds, where the policy has no effect",
         "envs.rescale_action, a smaller log_std, --squash, or pp.regularizers.bounds_loss",
         when=lambda run: not run.rose() or run.late("probe/action_at_bound") > 0.98),  # some effect lets returns rise
    Rule("actions_narrow", "likely", "probe/action_spread", 0.02, INF,
         "actions cover a small part of their range", "envs.rescale_action",
         when=lambda run: not run.rose() and not entropy_lost(run) > 0.5, unless=("actions_saturated",)),
    Rule("value_dominates", "likely", "vf_coef", -INF, 50,
         "the value loss dominates the parameters that policy and value share", "--vf-coef 0.5",
         lambda run: run.setting("vf_coef"), lambda run: not np.isnan(run.late("probe/value_dominance"))),
    Rule("value_dominates", "likely", "probe/value_dominance", -INF, 1000,
         "the value loss dominates the parameters that policy and value share",
         "a smaller --vf-coef, envs.normalize_reward, or separate networks",
         when=lambda run: not run.rose(), unless=("reward_scale_large",)),
    Rule("other_loss_dominates", "possible", "|loss| / (1 + |policy_loss| + value_loss)", -INF, 30,
         "a loss other than those of policy and value dominates the gradient",
         "a smaller coefficient; if it adapts, look at the sign of its steps",
         lambda run: abs(run.late("loss")) / (1 + abs(run.late("policy_loss")) + run.late("value_loss")),
         lambda run: not run.rose()),
    Rule("evaluation_apart", "likely", "share of the rise lost in evaluation", -INF, 0.75,
         "evaluation plays another policy, or standardizes observations by other statistics",
         "env.evaluation(state) and the current parameters; compare --eval-mode with samples", lost_in_evaluation),
    Rule("value_explains_nothing", "possible", "explained_variance, 90 % quantile", 0.01, INF,
         "the value function never explains the returns", "a larger --vf-coef, or a larger critic",
         lambda run: run.over("explained_variance", lambda x: np.quantile(x, 0.9)),  # it falls if returns are equal
         failed_to_learn, ("reward_scale_large", "reward_scale_small")),
)  # fmt: skip
"""Rules from causes to consequences; of two findings with the same confidence, the first one is more likely."""


def select_advice(advice: str, config: Mapping[str, Any]) -> str:
    """Omit alternatives with a flag that neither the (known) configuration nor every run has."""

    def fits(alternative: str) -> bool:
        names = [flag.replace("-", "_") for flag in re.findall(r"--([\w-]+)", alternative)]
        return not config or all(name in config or hasattr(RunOptions, name) for name in names)

    return ", ".join(filter(fits, advice.split(", "))).removeprefix("or ")


@checked
def diagnose(metrics: Mapping[str, Any], config: Any = None) -> list[Finding]:
    """Return at most five findings about what is wrong with a run, the most likely first, or none.

    Args:
        metrics: every metric by name, `[updates]` or `[updates, seeds]`, such as `LoadedRun.metrics` or the metrics of
            a `TrainResult`, NaN where not measured. Measurements of `probe` allow more findings. A `vmap` puts seeds
            first, so transpose its metrics.
        config: the configuration, a dataclass or a mapping; None if it is unknown.

    Example:
        >>> import numpy as np
        >>> from ppo_parts import training
        >>> metrics = {"approx_kl": np.full(50, 0.5), "clip_fraction": np.full(50, 0.6)}
        >>> [(found.name, found.value) for found in training.diagnose(metrics)]
        [('learning_rate_large', 0.5)]
    """
    run, seen = Evidence(metrics, config), dict[str, Finding]()
    updates = run.setting("total_timesteps") // (run.setting("num_envs") * run.setting("num_steps"))
    for name, x in run.metrics.items():
        if x.ndim == 2 and x.shape[1] == updates > x.shape[0]:
            says = f"must be [updates, seeds], but {name!r} has shape {x.shape} in a run of {updates:.0f} updates"
            raise UserValueError(f"{says}: transpose it", where="diagnose", argument="metrics")
    for rule in RULES:
        value = run.late(rule.metric) if rule.value is None else rule.value(run)
        explained = seen.keys() & {rule.name, *rule.unless}
        if (value < rule.low or value > rule.high) and not explained and rule.when(run):
            normal = rule.low, rule.high
            advice = select_advice(rule.advice, run.config)
            seen[rule.name] = Finding(rule.name, rule.cause, rule.metric, value, normal, advice, rule.confidence)
    if "not_finite" in seen and (first := find_nonfinite(run.metrics)) is not None:
        seen["not_finite"] = seen["not_finite"]._replace(cause=f"in update {first[0] + 1}{first[1]}")
    levels = get_args(Confidence)
    return sorted(seen.values(), key=lambda finding: levels.index(finding.confidence))[:5]
