"""Watch a trained agent: play episodes and write them to an animation.

python -m ppo_parts.watch runs/first --output first.gif
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._base.checked import Count, checked
from .._base.command_line import positive
from .._base.extras import require_package
from .._base.hyperparameters import check_number
from ..envs import host_errors
from ..envs._rendering import rendering
from ..envs._rollout import RolloutState
from ..errors import UserValueError
from ..functional._arguments import POSITIVE
from ..functional._common import Range
from ..training import Train, TrainState, exit_on_user_error
from ..training._evaluate import play_step
from ..training._files import check_writable, replace_file
from ..training._train import make_keys
from ._shared import add_episodes, load_run, make_parser, report, select_seed


@checked
def render_frames(
    train: Train, state: TrainState, *, episodes: Count = 1, seed: int = 0, mode: bool = False, max_steps: Count = 1000,
    on_episode: Callable[[str], object] = lambda sentence: None,
) -> Iterator[np.ndarray]:  # fmt: skip
    """Play episodes with the state of one seed, and yield an image `[H, W, 3]` (uint8) before each step.

    `mode` plays the distribution's mode instead of a sample. `on_episode` receives a sentence about each episode.
    """
    env = train.env.evaluation(state.rollout.env_state)
    if env.render is None:
        how = "give its Env a render(state) -> array [H, W, 3], as in envs.auto_reset(..., render=draw)"
        raise UserValueError(f"this environment cannot be rendered: {how}")
    begin = jax.jit(lambda key: RolloutState.begin(env, train.policy, env.folded, *env.reset(key, env.folded)))
    play = jax.jit(functools.partial(play_step, env, train.policy, state.learner.params, mode=mode))
    for episode, (reset_key, key) in enumerate(jax.random.split(make_keys(seed, 1), (episodes, 2))):
        now = begin(reset_key)
        for steps in range(max_steps):
            yield np.asarray(env.render(now.env_state))
            now, out = play(jax.random.fold_in(key, steps), now)
            if ended := bool(out.episode_ends()[0][0]):
                break
        gained = float(np.mean(out.episode_return))
        cut = "" if ended else ", cut by --max-steps"
        on_episode(f"episode {episode + 1}: return {gained:.1f} in {int(out.episode_length[0])} steps{cut}")


@checked
def write_animation(path: Path, frames: Iterable[np.ndarray], fps: float = 30, width: Count = 320) -> int:
    """Write frames `[H, W, 3]` (uint8) to a GIF or MP4, depending on the extension; return their number.

    `width` is in pixels, and frames keep their aspect ratio. A GIF rounds the time between frames to 0.01 s, and its
    `fps` is at most 50, because browsers slow down faster ones.
    """
    gif = _check_animation(path, fps)
    image = require_package("PIL.Image", "watch")

    def resize(frame: np.ndarray) -> Any:
        height = max(2, 2 * round(frame.shape[0] * width / frame.shape[1] / 2))  # MP4 needs even sizes
        picture = image.fromarray(np.ascontiguousarray(frame))
        return picture.resize((width + width % 2, height), image.Resampling.LANCZOS)

    options: dict[str, Any] = {"duration": 10 * round(100 / fps), "loop": 0, "palettesize": 64}  # Pillow would truncate
    if not gif:
        require_package("imageio_ffmpeg", "watch")
        options = {"fps": fps, "macro_block_size": 2}
    imageio, number = require_package("imageio", "watch"), 0
    with replace_file(path) as partial, imageio.get_writer(partial, **options) as writer:
        for frame in frames:
            writer.append_data(np.asarray(resize(frame)))
            number += 1
        if not number:
            raise UserValueError(f"{path}: there are no frames to write")
    return number


def _check_animation(path: Path, fps: float) -> bool:
    """Return whether an animation is a GIF, after checking that it can be written at this rate."""
    check_writable(path, (".gif", ".mp4"))
    gif = path.suffix.lower() == ".gif"
    check_number("write_animation", "fps", fps, Range(0, 50, open_low=True) if gif else POSITIVE, schedule=False)
    return gif


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the command line; return the path of the animation."""
    parser = make_parser("watch", "Write episodes with the policy of a trained run to an animation.", one_seed=True)
    parser.add_argument("--output", type=Path, default=Path("watch.gif"), help="GIF or MP4 (default: watch.gif)")
    add_episodes(parser, 1)
    limit = "limit on the steps of an episode (default: 1000)"
    parser.add_argument("--max-steps", type=positive, default=1000, help=limit)
    parser.add_argument("--fps", type=positive, default=30, help="frames per second, of a GIF at most 50 (default: 30)")
    parser.add_argument("--width", type=positive, default=320, help="width in pixels (default: 320)")
    given = parser.parse_args(arguments)
    for device in ("AUDIO", "VIDEO"):  # pygame draws only into arrays here, and needs no devices
        os.environ.setdefault(f"SDL_{device}DRIVER", "dummy")
    os.environ.setdefault("IMAGEIO_FFMPEG_NO_PREVENT_SIGINT", "1")  # otherwise it forks while JAX has threads
    with exit_on_user_error(), host_errors():
        _check_animation(given.output, given.fps)
        with rendering():
            run = load_run(given)
        state = select_seed(run, given.seed_index)
        report(f"compiling, then playing {given.episodes} episode{'s' * (given.episodes > 1)}")
        options = {"episodes": given.episodes, "seed": given.seed, "mode": given.mode, "max_steps": given.max_steps}
        frames = render_frames(run.train, state, **options, on_episode=print)
        number = write_animation(given.output, frames, given.fps, given.width)
        print(f"{given.output}: {number} frames")
    return given.output
