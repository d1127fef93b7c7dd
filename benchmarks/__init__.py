"""Microbenchmarks of the hot core; run one with `python -m benchmarks.<name>`, from a checkout."""
