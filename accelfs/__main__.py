"""`python -m accelfs` is the `accelfs` command."""

from accelfs.cli.app import main

main()
