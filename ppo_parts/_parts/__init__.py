"""The parts, with one module per family; the public modules next to this folder export them."""
