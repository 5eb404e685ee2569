"""`python -m pycoll`, for where the console script is not on the path."""

from pycoll.cli import main

main()
