#include "frequency.h"

#include <algorithm>
#include <cmath>
#include <compare>
#include <list>
#include <map>
#include <mutex>

namespace posenc {
namespace {

// An unsigned fixed-point number: limb[0] is the integer part, the other limbs are 192 fractional bits. Frequencies
// need 128 bits after up to `pairs` multiplications, each of which may lose the last bit.
struct Fixed {
  uint64_t limb[4] = {};
  auto operator<=>(const Fixed&) const = default;
};
constexpr Fixed kZero;

constexpr int kLimbs = 4;
constexpr int kSeriesTerms = 128;  // more than 192 bits for every series below; they stop at the first zero term

Fixed from_integer(uint64_t value) { return {{value, 0, 0, 0}}; }

Fixed add(const Fixed& a, const Fixed& b) {
  Fixed sum;
  unsigned __int128 carry = 0;
  for (int i = kLimbs - 1; i >= 0; --i) {
    carry += static_cast<unsigned __int128>(a.limb[i]) + b.limb[i];
    sum.limb[i] = static_cast<uint64_t>(carry);
    carry >>= 64;
  }
  return sum;
}

Fixed subtract(const Fixed& a, const Fixed& b) {  // a >= b
  Fixed difference;
  uint64_t borrow = 0;
  for (int i = kLimbs - 1; i >= 0; --i) {
    const unsigned __int128 taken = static_cast<unsigned __int128>(b.limb[i]) + borrow;
    difference.limb[i] = a.limb[i] - static_cast<uint64_t>(taken);
    borrow = taken > a.limb[i] ? 1 : 0;
  }
  return difference;
}

Fixed multiply(const Fixed& a, const Fixed& b) {
  uint64_t product[2 * kLimbs] = {};  // most significant first; [0] overflows, [1] is the integer part
  for (int i = kLimbs - 1; i >= 0; --i) {
    uint64_t carry = 0;
    for (int j = kLimbs - 1; j >= 0; --j) {
      const unsigned __int128 sum = static_cast<unsigned __int128>(a.limb[i]) * b.limb[j] + product[i + j + 1] + carry;
      product[i + j + 1] = static_cast<uint64_t>(sum);
      carry = static_cast<uint64_t>(sum >> 64);
    }
    product[i] = carry;
  }
  return {{product[1], product[2], product[3], product[4]}};
}

Fixed divide(const Fixed& a, uint64_t divisor) {
  Fixed quotient;
  unsigned __int128 rest = 0;
  for (int i = 0; i < kLimbs; ++i) {
    rest = (rest << 64) | a.limb[i];
    quotient.limb[i] = static_cast<uint64_t>(rest / divisor);
    rest %= divisor;
  }
  return quotient;
}

// 2 * atanh(t) = 2 * (t + t^3/3 + t^5/5 + ...), t <= 1/3
Fixed twice_atanh(const Fixed& t) {
  const Fixed square = multiply(t, t);
  Fixed power = t, sum;
  for (uint64_t n = 1; n < 2 * kSeriesTerms && power != kZero; n += 2) {
    sum = add(sum, divide(power, n));
    power = multiply(power, square);
  }
  return add(sum, sum);
}

Fixed log_two() { return twice_atanh(divide(from_integer(1), 3)); }

// ln(base) of a double in [1, inf): base = m * 2^e with m in [1, 2), ln m = 2 atanh((m - 1) / (m + 1))
Fixed log_of(double base) {
  int exponent = 0;
  const double half_m = std::frexp(base, &exponent);  // in [1/2, 1)
  const uint64_t one = uint64_t{1} << 52;
  const uint64_t m = static_cast<uint64_t>(std::ldexp(half_m, 53));  // in [one, 2 * one)
  Fixed logarithm = twice_atanh(divide(from_integer(m - one), m + one));
  const Fixed two = log_two();
  for (int i = 1; i < exponent; ++i) logarithm = add(logarithm, two);
  return logarithm;
}

// exp(-y): y = n ln 2 + r, Taylor's series of exp(-r), n halvings
Fixed exp_of_minus(Fixed y) {
  const Fixed two = log_two();
  int halvings = 0;
  while (y >= two) {
    y = subtract(y, two);
    ++halvings;
  }
  Fixed term = from_integer(1), sum = from_integer(1);
  for (uint64_t n = 1; n < kSeriesTerms; ++n) {
    term = divide(multiply(term, y), n);
    if (term == kZero) break;
    sum = n % 2 == 1 ? subtract(sum, term) : add(sum, term);
  }
  for (int i = 0; i < halvings && sum != kZero; ++i) sum = divide(sum, 2);
  return sum;
}

std::shared_ptr<const FrequencyTable> make(const FrequencyKey& key) {
  const auto [base, divisor, width, pairs] = key;
  const Fixed inverse_two_pi = {{0, 0x28BE60DB9391054A, 0x7F09D5F47D4D3770, 0x36D8A5664F10E410}};
  // The exponent of w_k is -k * numerator / denominator.
  const uint64_t numerator = divisor == Divisor::d ? 2 : 1;
  const int64_t half = divisor == Divisor::half_minus_1 ? width / 2 - 1 : width / 2;
  const uint64_t denominator = divisor == Divisor::d ? width : std::max<int64_t>(half, 1);

  auto table = std::make_shared<FrequencyTable>();
  for (auto& words : table->turns) words.reserve(pairs + kFrequencyPadding);
  table->angular.reserve(pairs + kFrequencyPadding);

  const Fixed log_base = log_of(base);
  const Fixed ratio = exp_of_minus(divide(numerator == 2 ? add(log_base, log_base) : log_base, denominator));
  // As the fp32 tables of the field are built: exp(fl32(numerator * k) * fl32(-ln(base) / denominator)), with the
  // exponential rounded correctly (torch.exp agrees with it in 98.5 % of the columns of a table).
  const float step = static_cast<float>(-(std::log(base) / static_cast<double>(denominator)));
  Fixed w = from_integer(1);
  for (int64_t k = 0; k < pairs; ++k) {
    const Fixed turns = multiply(w, inverse_two_pi);
    table->turns[0].push_back(static_cast<uint32_t>(turns.limb[1] >> 32));
    table->turns[1].push_back(static_cast<uint32_t>(turns.limb[1]));
    table->turns[2].push_back(static_cast<uint32_t>(turns.limb[2] >> 32));
    table->turns[3].push_back(static_cast<uint32_t>(turns.limb[2]));
    const float exponent = static_cast<float>(numerator * k) * step;
    table->angular.push_back(static_cast<float>(std::exp(static_cast<double>(exponent))));
    w = multiply(w, ratio);
  }
  for (auto& words : table->turns) words.resize(pairs + kFrequencyPadding);
  table->angular.resize(pairs + kFrequencyPadding);
  table->key = key;
  return table;
}

using Table = std::shared_ptr<const FrequencyTable>;

// The tables used last. One that is dropped lives on where it is in use.
class Cache {
 public:
  Table find_or_make(const FrequencyKey& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = places_.find(key);
    if (found != places_.end()) {
      tables_.splice(tables_.begin(), tables_, found->second);
      return tables_.front();
    }
    tables_.push_front(make(key));
    places_[key] = tables_.begin();
    bytes_ += tables_.front()->bytes();
    while (bytes_ > kKeptTableBytes && tables_.size() > 1) {
      bytes_ -= tables_.back()->bytes();
      places_.erase(tables_.back()->key);
      tables_.pop_back();
    }
    return tables_.front();
  }

 private:
  std::mutex mutex_;
  std::list<Table> tables_;  // the one used last comes first
  std::map<FrequencyKey, std::list<Table>::iterator> places_;
  int64_t bytes_ = 0;
};

}  // namespace

Frequencies FrequencyTable::view() const {
  Frequencies result;
  for (int i = 0; i < 4; ++i) result.turns[i] = turns[i].data();
  result.angular = angular.data();
  return result;
}

std::shared_ptr<const FrequencyTable> frequencies(double base, Divisor divisor, int64_t width, int64_t pairs) {
  const FrequencyKey key{base, divisor, width, pairs};
  thread_local Table last;  // a model uses one spec: skip the lock
  if (last && last->key == key) return last;
  static auto* cache = new Cache;  // never destroyed: a thread may outlive what is static
  return last = cache->find_or_make(key);
}

}  // namespace posenc
