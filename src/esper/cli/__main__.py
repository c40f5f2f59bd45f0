"""`python -m esper.cli` is `esper`."""

import sys

from esper.cli import main

if __name__ == "__main__":  # workers of a pool import this file, too
    sys.exit(main())
