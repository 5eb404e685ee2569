"""`python -m pycoll`: the command line where the console script is not on the path."""

from pycoll.cli import main

main()
