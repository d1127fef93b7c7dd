"""Whole algorithms, one file each, to be read top to bottom and copied."""

import os

# XLA's multi-threaded CPU runtime can stand still for ever, all threads idle, in vmapped programs of many small
# operations (seen with recurrent policies and jaxlib 0.10.2). Networks of this size gain nothing from it. It has to be
# said before JAX starts; XLA_FLAGS of your own take precedence.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
