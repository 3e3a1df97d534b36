"""`python -m parlinalg`: the command line."""

import sys

from parlinalg.cli import main

if __name__ == "__main__":
    sys.exit(main())
