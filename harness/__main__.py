"""``python -m harness``."""

import sys

if __name__ == "__main__":
    try:
        from harness.cli import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)
