"""Benchmarks of the hot core and of whole runs: `python -m benchmarks <name>`, from a checkout."""
