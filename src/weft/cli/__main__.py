"""`python -m weft.cli`, the same as `weft`."""

from weft.cli import main

main()
