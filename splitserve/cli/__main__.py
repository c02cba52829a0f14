"""``python -m splitserve.cli``."""

from splitserve.cli import main

main(prog_name="splitserve")
