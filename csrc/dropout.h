// Dropout: which elements are kept. The same for CPU and CUDA, and nothing is stored: the backward pass draws again.
//
// Column c of token n has the 16 bits r = half c % 8 of Philox4x32-7 with the counter (c / 8, 0, n) and the seed as its
// key; half h is the lower or upper one of word h / 2. The element is dropped where r < threshold, and otherwise
// multiplied by 2^16 / (2^16 - threshold). c counts columns of the whole row, so shards draw what the whole would.
//
// Philox: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". 7 rounds are the fewest that pass
// BigCrush.
#pragma once

#include "params.h"
#include "sinusoid.h"

namespace posenc {
inline namespace POSENC_ISA {

constexpr int64_t kColumnsPerDraw = 8;

// One draw a lane: replaces the counters by 128 random bits each. Several at a time, since each waits for its products.
template <int count, class Uint>
POSENC_HD void philox(Uint (&draws)[count][4], uint64_t seed) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 7; ++round) {
    for (Uint(&word)[4] : draws) {
      const Uint a = Uint{} + 0xD2511F53u, b = Uint{} + 0xCD9E8D57u;
      const Uint high0 = Lane<Uint>::high_product(a, word[0]), high1 = Lane<Uint>::high_product(b, word[2]);
      const Uint low0 = a * word[0], low1 = b * word[2];
      word[0] = high1 ^ word[1] ^ key0;
      word[1] = low1;
      word[2] = high0 ^ word[3] ^ key1;
      word[3] = low0;
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

}  // namespace POSENC_ISA
}  // namespace posenc
