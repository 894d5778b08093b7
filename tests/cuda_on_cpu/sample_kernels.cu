#include "sample_kernels.cuh"
