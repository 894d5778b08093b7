#if defined(__x86_64__)
#define POSENC_ISA x86_64_v4
#define POSENC_KERNELS kernels_x86_64_v4
#define POSENC_TARGET "arch=x86-64-v4"
#define POSENC_VECTOR_BYTES 64
#include "kernels.inl"
#endif
