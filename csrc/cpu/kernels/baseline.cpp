#define POSENC_ISA baseline
#define POSENC_KERNELS kernels_baseline
#define POSENC_VECTOR_BYTES 16
#include "kernels.inl"
