"""`python -m trainer` is the `accel-train` command."""

from trainer.cli import main

main()
