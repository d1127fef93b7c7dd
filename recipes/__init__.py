"""Whole algorithms, one file each, to be read top to bottom and copied. `python -m recipes` lists them."""
