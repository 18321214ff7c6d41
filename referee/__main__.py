"""`python -m referee` is `referee`.

Takes    the command line.
Gives    what `referee.cli` gives.
Knows nothing else.
"""

from referee.cli import cli

if __name__ == "__main__":
    cli(prog_name="referee")
