"""What `python -m ppo_parts.evaluate`, `watch`, `compare` and `export` run."""
