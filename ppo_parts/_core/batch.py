"""`Batch`, the record that every part reads and returns, and `Policy`, which is evaluated on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base.checked import checked
from .._base.hyperparameters import check_takes
from .._base.trees import axis_sharding
from ..errors import ShapeError, UserTypeError, UserValueError
from ..functional._common import check_array, check_floating
from ..functional._errors import did_you_mean

Array = jax.Array
Params = Any

ABSENT: Any = None
"""Default of the fields of a `Batch`, with type Any so that parts need not repeat the checks of `requires`."""

MetricReduction = Literal["mean", "sum", "max", "min"]
"""How a metric is reduced over the minibatches of an update."""


class Output(NamedTuple):
    """The output of a policy network for a batch of observations.

    A network may return the tuples `(distribution, value)` or, for recurrent policies, `(distribution, value, carry)`.

    Attributes:
        distribution: an object with the methods of `ppo_parts.distributions.Distribution`.
        value: one number per element, without a trailing axis of size 1, or one for each of K > 1 reward streams, along
            a last axis. None means that the policy has no critic.
        carry: state of a recurrent policy after the batch's last step, leaves `[N, ...]`.
        aux: any pytree of arrays with the leading axes of the batch, for additional heads such as a second value or a
            prediction. Losses read it, with gradients, as `batch.current.aux`.
    """

    distribution: Any
    value: Array | None = None
    carry: Any = None
    aux: Any = None


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy network for rollout, learner, training and evaluation; it is called like its `evaluate`.

    Attributes:
        init: `init(key) -> params`.
        evaluate: `evaluate(params, batch) -> Output`, or `(distribution, value[, carry])`.
        initial_carry: for recurrent policies, `initial_carry(num_envs) -> carry`, leaves `[N, ...]`. Only structure,
            shapes and dtypes matter, because every episode begins with `reset` = 1. None means no memory.
        after_action: for recurrent policies, `after_action(carry, action, output) -> carry`, if the state after a step
            depends on the sampled action, for example because an option continues. In an update, `evaluate` must do the
            same with `batch.action`.
        draws: whether `evaluate` draws random numbers, for example for dropout or noisy layers. The rollout then
            records a key for each step, `extras["policy_key"]`, so that an update draws the same numbers as when the
            action was taken. With `rollout(noise_steps=)`, several steps of an environment share a key.
    """

    init: Callable[[Array], Params]
    evaluate: Evaluate
    initial_carry: Callable[[int], Any] | None = None
    after_action: Callable[[Any, Any, Output], Any] | None = None
    draws: bool = False

    def __post_init__(self) -> None:
        check_takes("Policy", "init", self.init, ("key",))
        check_takes("Policy", "evaluate", self.evaluate, ("params", "batch"))
        if self.initial_carry is not None:
            check_takes("Policy", "initial_carry", self.initial_carry, ("num_envs",))
        if self.after_action is not None:
            check_takes("Policy", "after_action", self.after_action, ("carry", "action", "output"))
            if self.initial_carry is None:
                raise UserValueError("Policy: after_action changes a carry, and without initial_carry there is none")

    def __call__(self, params: Params, batch: Batch) -> Any:
        """Compute `evaluate(params, batch)`."""
        if not isinstance(batch, Batch):
            raise UserTypeError(f"policy(params, batch): batch must be a Batch, got {kind(batch)}: pass Batch(obs=obs)")
        return self.evaluate(params, batch)


class Current(NamedTuple):
    """The policy being trained, evaluated on the minibatch; only the learner writes it, after the sampler."""

    distribution: Any
    log_prob: Array
    value: Array = ABSENT
    aux: Any = None


class Stop(NamedTuple):
    """A stop request from a part to the learner: the two (traced) booleans of `Batch.add_stop`."""

    discard: Array
    after: Array

    def merge(self, other: Stop | None) -> Stop:
        """Combine two requests."""
        return self if other is None else Stop(self.discard | other.discard, self.after | other.after)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A rollout, or a minibatch of one, which every part reads and returns. Absent fields are None.

    The leading axes are `[T, N]` (time, segment) in a rollout, `[T, M]` after a segment sampler, and `[M]` after a step
    sampler, which removes the time axis; `axes` names them. All fields may share additional axes, such as agents.
    `reward`, `value`, `next_value`, `advantage` and `target` may have one more last axis of K > 1 streams, such as
    objectives, which `combine_advantages` joins before a policy loss.

    Attributes:
        obs: the observation at step t, any pytree with leaves `[T, N, ...]`.
        action: the action at step t, before any clipping for the environment, any pytree with leaves `[T, N, ...]`.
        log_prob: `[T, N]`, log-probability of the action under the behavior policy, in nats.
        value: `[T, N]`, V(obs) at the time of the step (or as last written back by a `refresh`), in reward units.
        reward: `[T, N]`, the reward of the transition from step t.
        terminated: `[T, N]`, 1 where that transition ended the episode, or the probability that it did, in [0, 1].
        truncated: `[T, N]`, 1 where a time limit cut the episode at step t; None means nowhere.
        next_value: `[T, N]`, V of the observation that followed, which is the final one where the episode was truncated
            or the rollout ended. It is arbitrary where the episode terminated.
        mask: `[T, N]`, 1 where the step counts; None means everywhere.
        advantage: `[T, N]`, written by an advantage part.
        target: `[T, N]`, value target, written by an advantage part.
        weight: `[M]`, importance weight of each sampled element, written by a sampler.
        log_ratio: `[T, N]`, log pi_current - log pi_behavior as last evaluated before the sampler; None means 0.
        carry: state of a recurrent policy before step 0 of each segment, leaves `[N, ...]`.
        reset: for recurrent policies, `[T, N]`, 1 where the state is zeroed before step t.
        next_obs: the observation that followed step t, or the final one where the episode ended, any pytree with leaves
            `[T, N, ...]`. `rollout(..., keep_next_obs=True)` writes it.
        behavior: the distribution from which actions were sampled, leaves `[T, N, ...]`.
            `rollout(..., keep_distribution=True)` writes it.
        current: the policy being trained on this minibatch (`Current`); None before the sampler.
        losses: named losses, each with the shape of `log_prob`, one per segment `[M]`, or scalar; see `add_loss`.
        metrics: named scalars.
        extras: named data of each step, for your own parts, with leaves `[T, N, ...]` that are sampled like `obs`.
        per_segment: named data of each segment, for your own parts, with leaves `[N, ...]`, or `[M, ...]` after a
            segment sampler. A step sampler gives each step the entry of its segment.
        shared: any other data for your own parts, any pytree, which is never sampled.
        stop: the stop request that `add_stop` writes; None means no request.
        axes: the leading axes' names, such as ("time", "segment") or ("step",).
        shards: number of equal blocks of neighboring segments that samplers do not mix, so that each block can stay on
            a separate device; `rollout(..., shards=S)` writes it. The `[M]` elements of a minibatch also form S blocks.
        reductions: names and `MetricReduction` of the metrics that are not averaged over minibatches; see
            `add_metrics`.
    """

    obs: Any = ABSENT
    action: Any = ABSENT
    log_prob: Array = ABSENT
    value: Array = ABSENT
    reward: Array = ABSENT
    terminated: Array = ABSENT
    truncated: Array = ABSENT
    next_value: Array = ABSENT
    mask: Array = ABSENT
    advantage: Array = ABSENT
    target: Array = ABSENT
    weight: Array = ABSENT
    log_ratio: Array = ABSENT
    carry: Any = ABSENT
    reset: Array = ABSENT
    next_obs: Any = ABSENT
    behavior: Any = ABSENT
    current: Any = ABSENT
    losses: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    extras: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    per_segment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shared: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stop: Stop = ABSENT
    axes: tuple[str, ...] = dataclasses.field(default=("time", "segment"), metadata={"static": True})
    reductions: tuple[tuple[str, MetricReduction], ...] = dataclasses.field(default=(), metadata={"static": True})
    shards: int = dataclasses.field(default=1, metadata={"static": True})

    def __new__(cls, *unnamed: Any, **fields: Any) -> Batch:
        """Raise for a name that is not a field, and for fields without a name."""
        if unnamed:
            raise UserTypeError(f"a Batch takes fields by name, as in Batch(obs=obs), got {kind(unnamed[0])}")
        if unknown := fields.keys() - cls.__dataclass_fields__.keys():
            known, name = cls.__dataclass_fields__, min(unknown)
            hint = did_you_mean(name, known) or f"; its fields are {', '.join(known)}"
            raise UserTypeError(f"a Batch has no field {name!r}{hint}")
        return super().__new__(cls)

    def replace(self, **changes: Any) -> Batch:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def sharding(self, mesh: jax.sharding.Mesh) -> Batch:
        """Return a batch in which each leaf is the `NamedSharding` that divides it over the devices of a mesh.

        Segments are divided over all axes of the mesh; each device holds all of `shared`. Use the result with
        `jax.device_put` or as `in_shardings` of `jax.jit`.

        Args:
            mesh: a mesh whose number of devices divides the number of shards.

        Raises:
            ValueError: if the number of devices does not divide the number of shards.
        """
        sharding, along = axis_sharding("Batch.sharding", mesh, self.shards), field_axes(self)
        trees = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if not field.metadata}
        return self.replace(
            **{name: jax.tree.map(lambda _, name=name: sharding(along.get(name)), tree) for name, tree in trees.items()}
        )

    def add_extras(self, **entries: Any) -> Batch:
        """Return a copy with new entries in `extras`, leaves `[T, N, ...]`, which replace those with the same name."""
        return self.replace(extras={**self.extras, **entries})

    @checked
    def add_loss(self, name: str, loss: Array, *, per: Literal["element", "segment", "batch"] = "element") -> Batch:
        """Return a copy with one more named loss.

        Args:
            name: a name that no other loss has.
            loss: an array of the shape that `per` specifies.
            per: "element" for one number per element, with the shape of `log_prob`, of which the learner takes the
                masked mean; "segment" for one number per sampled segment, `[M]`, of which the learner takes the mean
                over the segments with an unmasked step; "batch" for one number, which is not reduced.

        Raises:
            ValueError: if the name is taken, or a loss per segment follows a sampler that cuts the time axis.
            TypeError: if `loss` is not floating. ShapeError: if its shape is wrong.
        """
        loss = jnp.asarray(check_floating("add_loss", name, loss))  # other dtypes have no gradient
        if name in self.losses:
            raise UserValueError(
                f"a loss named {name!r} is already in this chain ({', '.join(self.losses)}): rename one of "
                'the two with name="..."'
            )
        element = jnp.shape(self.log_prob) if self.log_prob is not None else jnp.shape(loss)
        expected = {"element": element, "segment": element[1:2], "batch": ()}[per]
        if per == "segment" and self.axes[0] != "time":
            raise UserValueError(
                f"loss {name!r} is one number per segment, but the sampler cuts the time axis: use a "
                "sampler that keeps time, such as segment_minibatches()"
            )
        if jnp.shape(loss) != expected:
            raise ShapeError(
                f"loss {name!r} has shape {jnp.shape(loss)}, expected {expected} for per={per!r}: the learner "
                'reduces losses and applies the mask; a single number is a loss with per="batch"'
            )
        return self.replace(losses={**self.losses, name: loss})

    @checked
    def add_metrics(self, reduce: MetricReduction = "mean", /, **metrics: Array) -> Batch:
        """Return a copy with more named scalars.

        Args:
            reduce: how the learner reduces them over the minibatches of an update: "mean", "sum", "max" or "min".
            **metrics: scalars by name.

        Raises:
            ValueError: if a name is taken. ShapeError: if a metric is not a scalar.
        """
        for name, value in metrics.items():
            if name in self.metrics:
                raise UserValueError(
                    f"a metric named {name!r} is already in this chain: rename one of the two parts, or "
                    "put it into within(part, name=...)"
                )
            check_array("add_metrics", name, value)
            if jnp.shape(value) != ():
                raise ShapeError(
                    f"metric {name!r} must be a scalar, got shape {jnp.shape(value)}: reduce it first, for "
                    f"example with functional.masked_mean({name}, batch.mask)"
                )
        kept = self.reductions if reduce == "mean" else (*self.reductions, *((name, reduce) for name in metrics))
        return self.replace(metrics={**self.metrics, **metrics}, reductions=kept)

    def add_stop(self, *, discard: Array | bool = False, after: Array | bool = False) -> Batch:
        """Return a copy that asks to skip the rest of this phase in this update, combined with earlier requests.

        Args:
            discard: whether to stop without applying this minibatch.
            after: whether to stop after applying this minibatch.
        """
        for name, value in {"discard": discard, "after": after}.items():
            if jnp.shape(value) != ():
                raise ShapeError(
                    f"add_stop: {name} must be one boolean, got shape {jnp.shape(value)}: reduce it first, for "
                    "example with jnp.any over the unmasked elements"
                )
        return self.replace(stop=Stop(jnp.asarray(discard, bool), jnp.asarray(after, bool)).merge(self.stop))

    def current_log_ratio(self) -> Array:
        """Return log pi_current - log pi_behavior of this minibatch's actions (differentiable), after the sampler."""
        if self.current is None:
            raise UserValueError(
                "batch.current_log_ratio() needs the policy being trained, which exists only after the sampler: put "
                'the part there, and declare place="after_sampler"; in a loop of your own, set batch.current'
            )
        return self.current.log_prob - self.log_prob


Evaluate = Callable[[Params, Batch], Any]
"""`evaluate(params, batch) -> Output`, or `(distribution, value)`, or `(distribution, value, carry)`; see `Output`."""


# Fields of a batch with the axes `[T, N]`, from which samplers draw.
PER_STEP = (
    "obs", "action", "log_prob", "value", "reward", "terminated", "truncated", "next_value", "mask", "advantage",
    "target", "log_ratio", "reset", "next_obs", "behavior", "extras",
)  # fmt: skip
PER_SEGMENT = ("carry", "per_segment")  # fields of a batch without a time axis, `[N, ...]`
POLICY_READS = ("obs", "action", "next_obs", "carry", "reset", "mask", "extras", "per_segment", "shared")
"""Fields of a batch that a policy may read; it cannot read what parts compute."""


def map_streams(f: Callable[..., Any], like: Array, *arrays: Any, axis: int = -1) -> Callable[..., Any]:
    """Return `f`, mapped over the stream axis `axis` if the arrays have one more axis than `like`."""
    several = all(np.ndim(x) > np.ndim(like) for x in arrays)
    if several and len({x.shape[axis] for x in arrays}) > 1:
        shapes = ", ".join(str(x.shape) for x in arrays)
        raise ShapeError(
            f"these must have the same number of streams, got {shapes}: give the critic an output for each reward"
        )
    return jax.vmap(f, axis, -1) if several else f


def any_stream(x: Array, like: Array) -> Array:
    """Return where a flag is True in any stream; streams are the last axis, if it has one more axis than `like`."""
    return x if np.ndim(x) == np.ndim(like) else jnp.any(x, axis=-1)


def field_axes(batch: Batch) -> dict[str, int]:
    """Return each field's segment axis, or its step axis if there is no time axis."""
    return dict.fromkeys(PER_STEP, len(batch.axes) - 1) | dict.fromkeys((*PER_SEGMENT, "weight"), 0)


def kind(x: Any) -> str:
    """Describe a value of an unexpected kind for an error message."""
    if isinstance(x, jax.Array):
        return f"an array of shape {x.shape}"
    return f"{len(x)} items" if type(x) is tuple else type(x).__name__


def field_at(batch: Batch, path: str) -> Any:
    """Return a field of the batch, an entry ("extras.x") or a nested field ("current.aux.x"), or None if absent."""
    value: Any = batch
    while path and value is not None:
        name, path = _split_path(value, path)
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value


def _split_path(tree: Any, path: str) -> tuple[str, str]:
    """Return the first name of a path and the rest; the name of an entry of a mapping may contain dots."""
    name, _, rest = path.partition(".")
    return (path, "") if isinstance(tree, Mapping) and path in tree else (name, rest)


def with_field_at(batch: Batch, path: str, value: Any) -> Batch:
    """Return the batch with a new value at a path, which is a field, an entry ("extras.x") or a nested field."""

    def replaced(tree: Any, path: str) -> Any:
        if not path:
            return value
        name, rest = _split_path(tree, path)
        if isinstance(tree, Mapping) or tree is None:
            return {**(tree or {}), name: replaced((tree or {}).get(name), rest)}
        replace = tree.replace if isinstance(tree, Batch) else tree._replace
        return replace(**{name: replaced(getattr(tree, name), rest)})

    return replaced(batch, path)


def require(batch: Batch, where: str, **remedies: str) -> None:
    """Raise a `ValueError` for the first of these fields that is None, with its remedy."""
    for field, remedy in remedies.items():
        if getattr(batch, field) is None:
            raise UserValueError(f"{where}: batch.{field} is missing: {remedy}")
