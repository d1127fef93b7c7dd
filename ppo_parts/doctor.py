"""The command `python -m ppo_parts.doctor`, and its functions."""

import sys

from .commands.doctor import main as main
from .commands.doctor import read_run as read_run

if __name__ == "__main__":
    sys.exit(1 if main() else 0)
