"""The command `python -m ppo_parts.export`, and its functions."""

from .commands.export import largest_difference as largest_difference
from .commands.export import main as main
from .commands.export import policy_function as policy_function
from .commands.export import random_inputs as random_inputs
from .commands.export import to_onnx as to_onnx

if __name__ == "__main__":
    main()
