#define POSENC_ISA baseline
#include "prelude.h"

#define POSENC_KERNELS kernels_baseline
#define POSENC_VECTOR_BYTES 16
#include "kernels.inl"
