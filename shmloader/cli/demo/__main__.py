"""``python -m shmloader.cli.demo SPEC RESULT``: one run of the demonstration, in a process of its own."""

import sys

from shmloader.cli.demo.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
