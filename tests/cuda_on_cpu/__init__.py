"""The CUDA kernels on a machine without a GPU; see README.md."""
