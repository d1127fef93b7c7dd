"""The command `python -m ppo_parts.evaluate`, and its functions."""

from .commands.evaluate import describe as describe
from .commands.evaluate import main as main
from .commands.evaluate import play_episodes as play_episodes
from .commands.evaluate import summarize as summarize

if __name__ == "__main__":
    main()
