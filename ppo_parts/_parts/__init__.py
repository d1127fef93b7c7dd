"""The parts, a module for each family; the public modules beside this folder export them."""
