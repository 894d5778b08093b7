#if defined(__x86_64__)
#define POSENC_ISA x86_64_v4_bf16
#define POSENC_KERNELS kernels_x86_64_v4_bf16
#define POSENC_TARGET "arch=x86-64-v4,avx512bf16"
#define POSENC_HAVE_AVX512_BF16 1
#define POSENC_VECTOR_BYTES 64
#include "kernels.inl"
#endif
