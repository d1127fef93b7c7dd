"""The command `python -m ppo_parts.export`, and its functions."""

from .commands.export import draw_inputs as draw_inputs
from .commands.export import main as main
from .commands.export import make_policy_function as make_policy_function
from .commands.export import measure_difference as measure_difference
from .commands.export import to_onnx as to_onnx

if __name__ == "__main__":
    main()
