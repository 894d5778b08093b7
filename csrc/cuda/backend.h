// The CUDA backend: all that csrc/torch and python.cpp may call. In a build without nvcc every call says so (stub.cpp).
//
// Pointers in all params are device pointers, those of frequencies too. Except where it is said, functions only queue
// work on the stream of a launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>

#include "../frequency.h"
#include "../given_frequencies.h"
#include "../params.h"
#include "../positions.h"
#include "sort.h"

namespace posenc::cuda {

class ErrorRecord;

// `check` is a call that only looks at indices; `other` has none.
enum class Op : uint64_t { embed = 0, embed_backward = 1, embed_backward_sparse = 2, check = 3, other = 4, add = 5 };

// Out-of-range indices in their order: by the number of the call, of which the low bits count, then by the place of the
// index in the order of the tokens. The first one is raised.
constexpr int kPlaceBits = 40;
constexpr unsigned long long kNoKey = ~0ull;

// What an index is, and of which table.
enum class IndexOf : uint32_t { ids = 0, positions = 1 };

// Where kernels leave the first out-of-range index they meet, for the host to raise later. In device memory.
struct OutOfRange {
  unsigned long long first = kNoKey;  // the smallest key so far; what follows may still be of a larger one
  uint32_t locked = 0;                // what follows
  IndexOf of = IndexOf::ids;
  unsigned long long key = kNoKey;
  int64_t index = 0;  // must lie in [0, rows)
  int64_t rows = 0;
};

struct ErrorSink {
  OutOfRange* record = nullptr;
  uint32_t* found = nullptr;  // memory of the host that the device can write: whether `record` holds something
  uint64_t call = 0;          // its number, counted on the host
};

// How many blocks of a kernel a device can hold at a time. It shapes a launch, never a value.
class Occupancy {
 public:
  virtual int64_t resident_blocks(const void* kernel, int threads) = 0;

 protected:
  ~Occupancy() = default;
};

// Where a launcher runs.
struct Launch {
  void* stream = nullptr;  // a cudaStream_t
  Occupancy* occupancy = nullptr;
  ErrorSink errors;

  template <class... Arguments>
  int64_t resident_blocks(void (*kernel)(Arguments...), int threads) const {
    return occupancy->resident_blocks(reinterpret_cast<const void*>(kernel), threads);
  }
};

// What a call asks of the framework that it serves, at first uses only.
struct Framework {
  // Memory of a device that is kept until the process ends, not used by other work before, for work on `stream` first.
  // Not called for a stream under capture.
  void* (*keep)(int device, void* stream, int64_t bytes) = nullptr;
  // Whether the stream that is current on a device is never destroyed.
  bool (*stream_lasts)(int device) = nullptr;
};

// One call of an op: from before its first launch to after its last.
//
// The device finds an out-of-range index after the call has returned. The first call after that raises it
// (std::out_of_range). With POSENC_EXT_SYNC_ERRORS=1 the call itself raises it. Nothing is raised while a graph is
// captured. The first call on a device waits for what is set up there; under capture, the graph does when it runs.
class Call {
 public:
  // `device` must be the current one, and `stream` the one that is current there. Raises what earlier calls have left.
  Call(Op op, int device, void* stream, const Framework& framework);

  const Launch& launch() const { return launch_; }
  // The table in memory of the device. Its first use uploads it and waits likewise. Up to kKeptTableBytes stay there,
  // and every table that a graph under capture uses. Any other is uploaded by each call, in the order of its stream, to
  // `scratch(bytes)`, which the caller must not free before the kernels are queued.
  Frequencies frequencies(const FrequencyTable& table, const std::function<void*(int64_t)>& scratch) const;
  // Waits for the stream, reads a value of its device, and raises an out-of-range index that was found by then.
  int64_t read(const int32_t* value) const;
  // Raises what has gone wrong with the launches. With POSENC_EXT_SYNC_ERRORS=1 it waits for them too.
  void finish() const;
  // Waits for the stream and raises an out-of-range index of this call or of an earlier one.
  void finish_and_wait() const;

 private:
  bool capturing() const;
  void wait() const;
  void raise_launch_error() const;

  Op op_;
  int device_;
  Launch launch_;
  const Framework* framework_ = nullptr;
  void* ended_ = nullptr;  // a cudaEvent_t that tells of its end, on a stream that may not be there later
  ErrorRecord* record_ = nullptr;
  std::unique_lock<std::mutex> alone_;  // of a check
};

// Waits for every stream that was used, but those under capture, and raises an out-of-range index found on a device.
// Does nothing in a process that was forked from one that used CUDA.
POSENC_API void check_errors();

void forward(const ForwardParams& params, const Launch& launch);

// Frequencies that a caller gives, as kernels read them: queued, into FrequencyMemory::bytes(given.pairs) of `memory`,
// which the caller must not free before the kernels are queued.
Frequencies convert(const GivenFrequencies& given, void* memory, const Launch& launch);

// Looks at the ids of a gathered base term, and at positions where they are of a table.
void check_bounds(const ForwardParams& params, const Launch& launch);

// Positions that are counted, see positions.h.
void count_real_tokens(const PaddingParams& params, const Launch& launch);
void count_in_sequences(const SequenceIdParams& params, const Launch& launch);
void count_in_sequences(const SequenceStartParams& params, const Launch& launch);

// Moves what a record holds to `taken` and forgets it; taken->key is kNoKey where it holds nothing. `found` and `taken`
// are in memory of the host that the device can write.
void take_out_of_range(OutOfRange* record, uint32_t* found, OutOfRange* taken, void* stream);

// ---- the weight gradient, in scratch memory that the caller allocates

// Tokens that one call can sort; the caller refuses more.
constexpr int64_t kMostGradientTokens = (int64_t{1} << 31) - 1;
// Rows likewise: a key for each, and one that is no row.
constexpr int64_t kMostGradientRows = (int64_t{1} << 32) - 2;

// The parts of the scratch memory. Segments are told apart by their row (dense) or numbered (sparse).
struct GradientScratch {
  uint32_t *keys = nullptr, *sorted_keys = nullptr;
  int32_t *tokens = nullptr, *order = nullptr;
  int32_t *begin = nullptr, *end = nullptr;  // of segments that have tokens; others are neither written nor read
  int32_t* segment_counts = nullptr;         // sparse: segments that begin at or before each sorted token
  void* partials = nullptr;
  void* temporary = nullptr;  // of the sort and the scan
  size_t temporary_bytes = 0;
  SortShape sort;
  int64_t bytes = 0;  // of all parts

  // Computes `bytes`. Once the caller has that much memory, `place` says where each part lies in it.
  GradientScratch(const GradientTokens& tokens, const BackwardParams& params, bool sparse);
  void place(void* memory);

 private:
  int64_t segment_count_, partial_bytes_;
  bool sparse_;
};

// In all three, params.segments is not used.
//
// Dense: writes all params.rows rows of params.out.
void backward(const GradientTokens& tokens, const BackwardParams& params, const GradientScratch& scratch,
              const Launch& launch);

// Sparse, in two steps: the number of segments is the size of the output, so the caller reads it in between. It is
// segment_counts[tokens.count - 1] once this has run.
void number_segments(const GradientTokens& tokens, const GradientScratch& scratch, const Launch& launch);
// params.rows segments. Writes their rows of the table, ascending, to segment_rows.
void backward_of_segments(const GradientTokens& tokens, const BackwardParams& params, const GradientScratch& scratch,
                          int64_t* segment_rows, const Launch& launch);

}  // namespace posenc::cuda
