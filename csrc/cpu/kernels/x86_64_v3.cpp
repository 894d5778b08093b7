#if defined(__x86_64__)
#define POSENC_ISA x86_64_v3
#define POSENC_KERNELS kernels_x86_64_v3
#define POSENC_TARGET "arch=x86-64-v3"
#define POSENC_VECTOR_BYTES 32
#include "kernels.inl"
#endif
