"""The forward kernel alone: `python -m bench.kernels` is `python -m bench --kernels`."""

import sys

from .__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--kernels", *sys.argv[1:]]))
