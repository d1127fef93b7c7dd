"""The command `python -m ppo_parts.compare`, and its functions."""

from .commands.compare import Curve as Curve
from .commands.compare import describe as describe
from .commands.compare import main as main
from .commands.compare import make_table as make_table
from .commands.compare import plot_curves as plot_curves
from .commands.compare import read_curve as read_curve

if __name__ == "__main__":
    main()
