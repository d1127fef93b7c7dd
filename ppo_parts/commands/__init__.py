"""The commands `python -m ppo_parts.evaluate`, `watch`, `compare`, `export` and `doctor`."""
