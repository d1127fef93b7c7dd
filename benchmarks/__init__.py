"""Benchmarks of the hot core and of whole runs: `python -m benchmarks <name>`, from a checkout.

A module with `main` is a benchmark, and imports no other one; its records are in the file of its name in `results`:

* `parts`, `update`, `budget`, `train`, `hosts` and `devices` measure programs, and `house` the code;
* `reproduce` and `report` read the records, with `_tables` and `_figures`, which know all benchmarks;
* the others train what a table lists, many seeds at once.

`classic`, `craftax`, `rnd`, `choices` and `faults` are programs that they train. What benchmarks share:

* `_records`: the command line, and the files of the records;
* `_timing`, `_rivals` and `_by_hand`: interleaved timing, programs of other libraries, updates written by hand;
* `_seeds` and `_protocol`: training of many seeds, statistics over them, and evaluations in between;
* `_cards`: the code of docs/gallery.
"""
