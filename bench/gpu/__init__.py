"""The benchmark of the CUDA half: `python -m bench.gpu`. Read ../README.md, section "On a GPU"."""
