"""`python -m weft.cli`, equivalent to `weft`."""

from weft.cli import main

main()
