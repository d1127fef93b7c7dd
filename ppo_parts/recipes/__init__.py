"""Algorithms, one in each file: a configuration, a policy, a chain of parts and an optimizer.

Read a file from top to bottom, copy it and change it. `python -m ppo_parts.recipes` lists all of them
with their presets.
"""
