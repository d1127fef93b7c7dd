"""The PPO of each library with its default hyperparameters, on MuJoCo tasks.

    python -m benchmarks libraries HalfCheetah-v5 --steps 3e5 --seeds 10 --variant brax

The variants are the presets of `ppo_parts.recipes.library_ppo`, the protocol is that of `python -m benchmarks mujoco`.
"humanoid" plays without contact forces in its observations. "humanoid-noise" is that preset with the noise of
`mujoco_ppo`, "humanoid+noise" has all differences between the two but this one, and so on for each of `DIFFERENCES`.
The records are in benchmarks/results/libraries.jsonl.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ppo_parts.recipes import library_ppo

from .mujoco import Variant, run

DIFFERENCES = {  # what `mujoco_ppo` has instead of the settings of the preset "humanoid"
    "network": {"hidden": (64, 64), "activation": "tanh", "shared": False},
    "values": {"normalize_value": False, "normalize_rewards": True, "reward_scale": 1.0, "vf_coef": 0.5},
    "rate": {"target_kl": None, "adapt_each_epoch": False},
    "batches": {"num_envs": 8, "num_steps": 256, "num_minibatches": 8, "update_epochs": 10},
    "noise": {"log_std": -1.0},
}
ALL = {field: value for fields in DIFFERENCES.values() for field, value in fields.items()}
HUMANOID: dict[str, dict[str, Any]] = {  # variant: fields of the configuration
    "humanoid": {},
    "humanoid-all": ALL,
    "humanoid-rate-batches": DIFFERENCES["rate"] | DIFFERENCES["batches"],
    **{f"humanoid-{name}": fields for name, fields in DIFFERENCES.items()},
    **{f"humanoid+{name}": {k: v for k, v in ALL.items() if k not in fields} for name, fields in DIFFERENCES.items()},
}
PRESET = library_ppo.PRESETS["humanoid"]
LIBRARIES = [name for name in library_ppo.PRESETS if name not in ("playground", "humanoid")]
VARIANTS = {name: Variant(library_ppo.make_train, library_ppo.PRESETS[name]) for name in LIBRARIES} | {
    name: Variant(library_ppo.make_train, dataclasses.replace(PRESET, **fields), contact_forces=False)
    for name, fields in HUMANOID.items()
}


def main() -> None:
    """Command line."""
    run(__doc__, VARIANTS, "libraries")
