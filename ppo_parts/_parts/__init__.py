"""The parts, one family a file; the modules beside this folder export them."""
