// Many threads, one record of out-of-range indices. The threads take turns at every access to memory of the device, in
// an order that CUDA_ON_CPU_SEED decides; some record, others take what was recorded.
//
//   contention_checks ROUNDS
//
// Under TSan the threads run one after another, and every access that no fence orders is a race.
#include <cstdio>
#include <cstdlib>
#include <set>

#include "buffer.h"
#include "cuda/bounds.cuh"
#include "fake_cuda.h"

namespace {

using namespace posenc::cuda;

constexpr int kThreads = 96, kAttempts = 3, kTakes = 4;

struct Attempt {
  uint64_t call;
  int64_t place;
};

// What belongs to a key.
__device__ int64_t index_of(const Attempt& attempt) {
  return static_cast<int64_t>(attempt.call * 1000003) - attempt.place;
}
__device__ int64_t rows_of(const Attempt& attempt) { return static_cast<int64_t>(attempt.call) + 17; }

struct Shared {
  OutOfRange record;
  uint32_t found = 0;
  Attempt attempts[kThreads][kAttempts] = {};
  int attempt_count[kThreads] = {}, take_count[kThreads] = {};  // of each thread
  int pause[kThreads] = {};                                     // accesses before each time that it takes
  OutOfRange taken[kThreads][kTakes];
};

__global__ void contend(Shared* shared) {
  const unsigned me = threadIdx.x;
  for (int i = 0; i < shared->take_count[me]; ++i) {
    for (int turns = 0; turns < shared->pause[me]; ++turns) (void)*const_cast<volatile int*>(&shared->pause[me]);
    take_record(&shared->record, &shared->found, &shared->taken[me][i]);
  }
  for (int i = 0; i < shared->attempt_count[me]; ++i) {
    const Attempt attempt = shared->attempts[me][i];
    record_out_of_range({&shared->record, &shared->found, attempt.call}, attempt.place, index_of(attempt),
                        rows_of(attempt));
  }
}

unsigned long long key_of(const Attempt& attempt) {
  return attempt.call << kPlaceBits | static_cast<unsigned long long>(attempt.place);
}

int failures = 0;

void expect(bool passed, const char* what) {
  if (passed) return;
  if (++failures <= 10) std::printf("FAILED %s\n", what);
}

void check_round(Random& random, cudaStream_t stream) {
  // TSan knows no memory of the device's.
  static void* const on_device =
      cuda_on_cpu::kTsan ? std::malloc(sizeof(Shared)) : fake_cuda::allocate(sizeof(Shared), 0, stream, false);
  Shared shared;
  const int64_t calls = 1 + random.below(3), takers = random.below(3) == 0 ? 0 : random.below(6),
                busy = random.below(4);
  std::set<unsigned long long> keys;
  int64_t next_place = 0;
  for (int thread = 0; thread < kThreads; ++thread) {
    if (random.below(kThreads) < takers) {
      shared.take_count[thread] = kTakes;
      shared.pause[thread] = static_cast<int>(random.below(40));
    } else if (random.below(4) <= busy) {
      shared.attempt_count[thread] = kAttempts;
      for (Attempt& attempt : shared.attempts[thread]) {
        attempt = {static_cast<uint64_t>(random.below(calls) + 8), ++next_place};
        if (random.below(2) == 0) attempt.place = 1000 - next_place;
        keys.insert(key_of(attempt));
      }
    }
  }
  std::memcpy(on_device, &shared, sizeof(shared));
  POSENC_LAUNCH(contend, 1, kThreads, stream, static_cast<Shared*>(on_device));
  cudaStreamSynchronize(stream);
  std::memcpy(static_cast<void*>(&shared), on_device, sizeof(shared));

  const OutOfRange& record = shared.record;
  expect(record.locked == 0, "the lock is free in the end");
  expect(record.first == record.key, "what is kept is the first of all");
  expect(shared.found == (record.key != kNoKey), "the host is told exactly of what is kept");
  std::set<unsigned long long> seen;
  const auto check_kept = [&](const OutOfRange& kept) {
    if (kept.key == kNoKey) return;
    expect(keys.count(kept.key) == 1, "what is found was recorded");
    expect(seen.insert(kept.key).second, "what is found is found once");
    const Attempt attempt{kept.key >> kPlaceBits, static_cast<int64_t>(kept.key & ((1ull << kPlaceBits) - 1))};
    expect(kept.index == index_of(attempt) && kept.rows == rows_of(attempt), "index and rows are those of the key");
  };
  check_kept(record);
  bool took = false;
  for (int thread = 0; thread < kThreads; ++thread)
    for (int i = 0; i < shared.take_count[thread]; ++i) {
      took = true;
      check_kept(shared.taken[thread][i]);
    }
  expect(keys.empty() == seen.empty(), "something is found where something was recorded");
  if (!keys.empty()) expect(seen.count(*keys.begin()) == 1, "the first is found");
  if (!took) expect(seen.size() <= 1, "one is found");
}

}  // namespace

int main(int argc, char** argv) {
  fake_cuda::machine.knows_all_memory = !cuda_on_cpu::kTsan;
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  Random random(cuda_on_cpu::seed());
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 1;
  for (int i = 0; i < rounds; ++i) check_round(random, stream);
  std::printf("%d rounds, %d failed\n", rounds, failures);
  return failures == 0 ? 0 : 1;
}
