"""`python -m lossscale` is the command `lossscale`."""

import sys

from lossscale.cli import main

if __name__ == "__main__":
    sys.exit(main())
