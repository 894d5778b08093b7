// Small kernels that use what the real ones may use, one feature each: what the shim and the PTX translator are tested
// with. The second half is wrong on purpose.
#pragma once

#include <cstdint>

#include "cuda/platform.cuh"

namespace samples {

// Parameters as the real kernels take them: one plain struct, beside a scalar or two.
struct Pointers {
  const float* in = nullptr;
  float* out = nullptr;
  int64_t count = 0;
  bool negate = false;
  uint8_t code = 0;
  int32_t words[6] = {};
  double factor = 1.0;
};

__global__ void arithmetic(const Pointers args, const int64_t* integers, const double* doubles, int64_t* integers_out,
                           double* doubles_out);
__global__ void conversions(const float* in, uint32_t* out, int count);
__global__ void vectors(const uint4* in, uint4* out, uint2* halves, int count);
__global__ void block_sum(const float* in, float* out, int count);
__global__ void rotate_rounds(const float* in, float* out, int rounds);
__global__ void last_block_sum(const float* in, float* partial, float* out, unsigned* done);
__global__ void atomics(const int* in, int* out_int, unsigned long long* out_long, float* out_float, int count);
__global__ void local_array(const Pointers args);
template <class T>
__global__ void scaled(const T* in, T* out, T factor, int count);

// ---- wrong ones

__global__ void reads_too_far(const float* in, float* out);
__global__ void writes_too_far(float* out);
__global__ void loads_vectors_anywhere(const float* in, float* out);
__global__ void overruns_shared(float* out);
__global__ void reads_unwritten_shared(float* out);
__global__ void leaves_out_barrier(const float* in, float* out);
__global__ void leaves_out_second_barrier(const float* in, float* out, int rounds);
__global__ void ends_before_barrier(float* out);
__global__ void waits_at_two_barriers(float* out);
__global__ void adds_in_block(float* out);
__global__ void adds_across_blocks(float* out);
__global__ void adds_across_blocks_with_barriers(float* out);
__global__ void publishes_without_fence(float* partial, float* out, unsigned* done);
__global__ void waits_for_another(unsigned* flag);
__global__ void adds_to_half_an_atomic(char* out);

#if !defined(POSENC_KERNELS_FROM_PTX)

__device__ __forceinline__ int64_t global_index() { return blockIdx.x * int64_t{blockDim.x} + threadIdx.x; }

__global__ void arithmetic(const Pointers args, const int64_t* integers, const double* doubles, int64_t* integers_out,
                           double* doubles_out) {
  const int64_t i = global_index();
  if (i >= args.count) return;
  const float x = args.in[i];
  float y = __fmaf_rn(x, x, -1.0f) / (x + 3.0f);
  if (args.negate) y = -y;
  switch (args.code) {
    case 0: y = y + 1.0f; break;
    case 1: y = y * 0.5f; break;
    case 2: y = y - x; break;
    case 3: y = fabsf(y); break;
    case 4: y = fminf(y, x); break;
    case 5: y = fmaxf(y, x); break;
    default: y = 7.0f; break;
  }
  args.out[i] = y + static_cast<float>(args.words[i % 6]);  // indexed at run time
  const int64_t n = integers[i];
  const uint64_t u = static_cast<uint64_t>(n);
  uint64_t result = __umul64hi(u, 0x9E3779B97F4A7C15ull) ^ static_cast<uint64_t>(n >> (i & 63)) ^ u << ((i * 7) & 63);
  result += __umulhi(static_cast<unsigned>(u), 0x85EBCA6Bu);
  result -= static_cast<uint64_t>(n / (i + 1) + n % (i + 3)) + u / static_cast<uint64_t>(i + 5);
  result += static_cast<uint64_t>(__popc(static_cast<unsigned>(u)) + __clz(static_cast<int>(n)));
  result += static_cast<uint64_t>((n < 0 ? -n : n) % 1000);
  integers_out[i] = static_cast<int64_t>(result);
  doubles_out[i] = doubles[i] * args.factor / (doubles[i] + 0.25) - static_cast<double>(n);
}

__global__ void conversions(const float* in, uint32_t* out, int count) {
  const int64_t i = global_index();
  if (i >= count) return;
  const float x = in[i];
  uint32_t* to = out + i * 12;
  to[0] = __float_as_uint(__bfloat162float(__float2bfloat16_rn(x)));
  to[1] = __float_as_uint(__half2float(__float2half_rn(x)));
  const __nv_bfloat162 bf = __floats2bfloat162_rn(x, -x);
  const __half2 half = __floats2half2_rn(-x, x);
  memcpy(&to[2], &bf, 4);
  memcpy(&to[3], &half, 4);
  const bool small = x > -2e9f && x < 2e9f;  // where C++ defines the conversion
  to[4] = small ? static_cast<uint32_t>(static_cast<int32_t>(x)) : 0;
  to[5] = small ? static_cast<uint32_t>(static_cast<int32_t>(floorf(x))) : 0;
  to[6] = small ? static_cast<uint32_t>(static_cast<int64_t>(ceilf(x))) : 0;
  to[7] = small ? static_cast<uint32_t>(static_cast<int32_t>(rintf(x))) : 0;
  to[8] = __float_as_uint(static_cast<float>(static_cast<int32_t>(__float_as_uint(x))));
  to[9] = __float_as_uint(static_cast<float>(static_cast<uint64_t>(__float_as_uint(x)) * 0x10001u));
  to[10] = __float_as_uint(static_cast<float>(static_cast<double>(x) * 1.0000000596));
  to[11] = static_cast<uint32_t>(static_cast<uint16_t>(__float_as_uint(x) >> 7)) +
           static_cast<uint32_t>(static_cast<int8_t>(__float_as_uint(x) >> 3));
}

__global__ void vectors(const uint4* in, uint4* out, uint2* halves, int count) {
  const int64_t i = global_index();
  if (i >= count) return;
  const uint4 v = __ldg(in + i);
  out[i] = make_uint4(v.w, v.z, v.y, v.x);
  halves[i] = make_uint2(v.x ^ v.y, v.z ^ v.w);
}

__global__ void block_sum(const float* in, float* out, int count) {
  POSENC_SHARED(float, partial, 256);
  const int64_t i = global_index();
  partial[threadIdx.x] = i < count ? in[i] : 0.0f;
  for (unsigned by = blockDim.x / 2; by > 0; by /= 2) {
    __syncthreads();
    if (threadIdx.x < by) partial[threadIdx.x] += partial[threadIdx.x + by];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = partial[0];
}

// Every round, each thread takes its neighbour's value: two barriers a round.
__global__ void rotate_rounds(const float* in, float* out, int rounds) {
  POSENC_SHARED(float, values, 128);
  float mine = in[global_index()];
  for (int round = 0; round < rounds; ++round) {
    values[threadIdx.x] = mine;
    __syncthreads();
    mine = values[(threadIdx.x + 1) % blockDim.x] + 1.0f;
    __syncthreads();
  }
  out[global_index()] = mine;
}

// The block that is done last sums what all have left, ordered by fences and an atomic.
__global__ void last_block_sum(const float* in, float* partial, float* out, unsigned* done) {
  if (threadIdx.x != 0) return;
  partial[blockIdx.x] = in[blockIdx.x] * 2.0f;
  __threadfence();
  if (atomicAdd(done, 1u) != gridDim.x - 1) return;
  __threadfence();
  float sum = 0.0f;
  for (unsigned block = 0; block < gridDim.x; ++block) sum += partial[block];
  *out = sum;
}

__global__ void atomics(const int* in, int* out_int, unsigned long long* out_long, float* out_float, int count) {
  const int64_t i = global_index();
  if (i >= count) return;
  atomicAdd(out_int, in[i]);
  atomicMin(out_int + 1, in[i]);
  atomicMax(out_int + 2, in[i]);
  if (i == 5) atomicExch(out_int + 3, 77);
  if (i < 32) atomicCAS(reinterpret_cast<unsigned*>(out_int) + 4, 0u, 9u);
  atomicAdd(out_long, static_cast<unsigned long long>(in[i] & 0xFF));
  atomicMax(out_long + 1, static_cast<unsigned long long>(i) << 33);
  atomicAdd(out_float, 0.5f);
}

// An array indexed at run time, which lies in local memory.
__global__ void local_array(const Pointers args) {
  const int64_t i = global_index();
  if (i >= args.count) return;
  float values[24];
  for (int k = 0; k < 24; ++k) values[k] = args.in[i] * static_cast<float>(k);
#pragma unroll 1
  for (int k = 0; k < 48; ++k) values[args.words[k % 6] % 24] += values[(args.words[k % 5] + k) % 24];
  args.out[i] = values[args.words[i % 6] % 24];
}

template <class T>
__global__ void __launch_bounds__(128) scaled(const T* in, T* out, T factor, int count) {
  for (int64_t i = global_index(); i < count; i += int64_t{gridDim.x} * blockDim.x) out[i] = in[i] * factor;
}
template __global__ void scaled<float>(const float*, float*, float, int);
template __global__ void scaled<double>(const double*, double*, double, int);

// ---- wrong ones

__global__ void reads_too_far(const float* in, float* out) { out[threadIdx.x] = in[threadIdx.x + 1]; }

__global__ void writes_too_far(float* out) { out[global_index() + 1] = 1.0f; }

__global__ void loads_vectors_anywhere(const float* in, float* out) {
  *reinterpret_cast<float4*>(out + 4 * threadIdx.x) = *reinterpret_cast<const float4*>(in + 4 * threadIdx.x);
}

__global__ void overruns_shared(float* out) {
  POSENC_SHARED(float, values, 32);
  values[threadIdx.x + out[0] > 32.0f ? threadIdx.x : threadIdx.x + 1] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void reads_unwritten_shared(float* out) {
  POSENC_SHARED(float, values, 32);
  if (threadIdx.x != 5) values[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[31 - threadIdx.x];
}

__global__ void leaves_out_barrier(const float* in, float* out) {
  POSENC_SHARED(float, values, 128);
  values[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}

__global__ void leaves_out_second_barrier(const float* in, float* out, int rounds) {
  POSENC_SHARED(float, values, 128);
  float mine = in[global_index()];
  for (int round = 0; round < rounds; ++round) {
    values[threadIdx.x] = mine;
    __syncthreads();
    mine = values[(threadIdx.x + 1) % blockDim.x] + 1.0f;
  }
  out[global_index()] = mine;
}

__global__ void ends_before_barrier(float* out) {
  if (threadIdx.x == 3) return;
  __syncthreads();
  out[threadIdx.x] = 1.0f;
}

__global__ void waits_at_two_barriers(float* out) {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
    out[threadIdx.x] = 1.0f;
  } else {
    out[threadIdx.x] = 2.0f;
    __syncthreads();
  }
}

__global__ void adds_in_block(float* out) { out[0] += 1.0f; }

__global__ void adds_across_blocks(float* out) {
  if (threadIdx.x == 0) out[0] += 1.0f;
}

__global__ void adds_across_blocks_with_barriers(float* out) {
  __syncthreads();
  if (threadIdx.x == 0) out[0] += 1.0f;
  __syncthreads();
}

__global__ void publishes_without_fence(float* partial, float* out, unsigned* done) {
  if (threadIdx.x != 0) return;
  partial[blockIdx.x] = 2.0f;
  if (atomicAdd(done, 1u) != gridDim.x - 1) return;
  __threadfence();
  float sum = 0.0f;
  for (unsigned block = 0; block < gridDim.x; ++block) sum += partial[block];
  *out = sum;
}

__global__ void waits_for_another(unsigned* flag) {
  if (threadIdx.x == 0) {
    while (atomicCAS(flag, 1u, 2u) != 1u) {
    }
  } else {
    atomicExch(flag, 1u);
  }
}

__global__ void adds_to_half_an_atomic(char* out) { atomicAdd(reinterpret_cast<unsigned*>(out + 2), 1u); }

#endif  // POSENC_KERNELS_FROM_PTX

}  // namespace samples
