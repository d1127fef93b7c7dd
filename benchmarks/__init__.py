"""Benchmarks of the hot core and of whole runs: `python -m benchmarks <name>`, from a checkout.

Each module with a `main` is a benchmark. It imports no other benchmark, and `results/<name>.jsonl` has its records:

* `parts`, `update`, `budget`, `train`, `hosts` and `devices` measure programs, and `house` measures the code;
* `reproduce` and `report` read the records, together with `_tables` and `_figures`, which know all benchmarks;
* the others train the rows of a table, many seeds at once.

`classic`, `craftax`, `rnd`, `choices` and `faults` are programs that they train. The benchmarks share:

* `_records`: the command line, and the files of the records;
* `_timing`, `_rivals` and `_by_hand`: interleaved timing, programs of other libraries, handwritten updates;
* `_seeds` and `_protocol`: training of many seeds, statistics over them, and evaluations during training;
* `_cards`: the code of docs/gallery.
"""
