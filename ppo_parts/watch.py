"""The command `python -m ppo_parts.watch`, and its functions."""

from .commands.watch import main as main
from .commands.watch import render_frames as render_frames
from .commands.watch import write_animation as write_animation

if __name__ == "__main__":
    main()
