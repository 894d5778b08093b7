"""The cases of the GPU: `python -m bench.gpu` is `python -m bench --gpu`."""

import sys

from .__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--gpu", *sys.argv[1:]]))
