"""``python -m tuning`` is the ``arborist`` command."""

import sys

from tuning.cli import main

if __name__ == "__main__":
    sys.exit(main())
