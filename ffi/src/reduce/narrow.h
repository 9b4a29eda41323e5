// Narrow floating types: to and from float, round to nearest even, as ml_dtypes and XLA define them.
#ifndef JAXCOLL_REDUCE_NARROW_H_
#define JAXCOLL_REDUCE_NARROW_H_

#include <cmath>
#include <cstdint>
#include <cstring>

namespace jaxcoll {
namespace JAXCOLL_KERNEL_NAMESPACE {

inline float BitsToFloat(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline uint32_t FloatToBits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

struct BF16 {
  using Storage = uint16_t;
  static float Load(Storage s) { return BitsToFloat(uint32_t{s} << 16); }
  static Storage Store(float f) {
    uint32_t u = FloatToBits(f);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return static_cast<Storage>((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
  }
};

// A small float with kExp exponent and kMan mantissa bits. kInf: has infinities (else, fn: only the all-ones pattern is
// NaN); kFnuz: no infinities, no negative zero, NaN is 0x80.
template <typename S, int kExp, int kMan, int kBias, bool kInf, bool kFnuz>
struct Small {
  using Storage = S;
  static constexpr int kBits = 1 + kExp + kMan;
  static constexpr uint32_t kSign = 1u << (kBits - 1);
  static constexpr uint32_t kExpMask = (1u << kExp) - 1;
  static constexpr uint32_t kManMask = (1u << kMan) - 1;
  // The largest finite value and the NaN, as bit patterns without sign.
  static constexpr uint32_t kMaxFinite = kInf ? ((kExpMask - 1) << kMan) | kManMask : kFnuz ? kSign - 1 : kSign - 2;
  static constexpr uint32_t kNan = kFnuz ? kSign : kInf ? (kExpMask << kMan) | (1u << (kMan - 1)) : kSign - 1;

  static float Decode(uint32_t s) {
    uint32_t sign = s & kSign, exp = (s >> kMan) & kExpMask, man = s & kManMask;
    if (kFnuz && s == kSign) return BitsToFloat(0x7fc00000u);
    if (kInf && exp == kExpMask) return BitsToFloat((sign ? 0x80000000u : 0u) | 0x7f800000u | (man ? 0x400000u : 0u));
    if (!kInf && !kFnuz && (s & (kSign - 1)) == kSign - 1) return BitsToFloat((sign ? 0x80000000u : 0u) | 0x7fc00000u);
    float v = exp == 0 ? std::ldexp(static_cast<float>(man), 1 - kBias - kMan)
                       : std::ldexp(static_cast<float>(man | (1u << kMan)), static_cast<int>(exp) - kBias - kMan);
    return sign ? -v : v;
  }

  static Storage Encode(float f) {
    uint32_t u = FloatToBits(f), sign = (u >> 31) ? kSign : 0, mag = u & 0x7fffffffu;
    uint32_t overflow = kInf ? (kExpMask << kMan) : kNan;  // infinity, or NaN where there is none
    if (mag > 0x7f800000u) return static_cast<Storage>(kFnuz ? kSign : sign | kNan);
    if (mag == 0x7f800000u) return static_cast<Storage>(kFnuz ? kSign : sign | overflow);
    int exp = static_cast<int>(mag >> 23) - 127;                // of the float
    int lsb = exp < 1 - kBias ? 1 - kBias - kMan : exp - kMan;  // weight of the last kept bit
    uint64_t man = (mag >> 23) == 0 ? (mag & 0x7fffffu) : (mag & 0x7fffffu) | 0x800000u;
    int shift = lsb - ((mag >> 23) == 0 ? -149 : exp - 23);
    uint64_t q = 0;
    if (shift <= 0) {
      q = man << -shift;
    } else if (shift < 40) {
      uint64_t half = uint64_t{1} << (shift - 1), rest = man & ((uint64_t{1} << shift) - 1);
      q = man >> shift;
      q += rest > half || (rest == half && (q & 1)) ? 1 : 0;
    }
    uint64_t pattern = exp < 1 - kBias ? q : (static_cast<uint64_t>(exp + kBias) << kMan) + (q - (uint64_t{1} << kMan));
    if (pattern > kMaxFinite) return static_cast<Storage>(kFnuz ? kSign : sign | overflow);
    if (kFnuz && pattern == 0) return 0;
    return static_cast<Storage>(sign | static_cast<uint32_t>(pattern));
  }
};

// Eight-bit types decode through a table.
template <typename F>
struct Table8 {
  using Storage = uint8_t;
  static float Load(Storage s) {
    static const struct Values {
      float v[256];
      Values() {
        for (uint32_t i = 0; i < 256; ++i) v[i] = F::Decode(i);
      }
    } values;
    return values.v[s];
  }
  static Storage Store(float f) { return F::Encode(f); }
};

using E5M2 = Table8<Small<uint8_t, 5, 2, 15, true, false>>;
using E4M3 = Table8<Small<uint8_t, 4, 3, 7, true, false>>;
using E3M4 = Table8<Small<uint8_t, 3, 4, 3, true, false>>;
using E4M3FN = Table8<Small<uint8_t, 4, 3, 7, false, false>>;
using E5M2FNUZ = Table8<Small<uint8_t, 5, 2, 16, false, true>>;
using E4M3FNUZ = Table8<Small<uint8_t, 4, 3, 8, false, true>>;
using E4M3B11FNUZ = Table8<Small<uint8_t, 4, 3, 11, false, true>>;

struct F16 {
  using Storage = uint16_t;
#if defined(__F16C__)
  static float Load(Storage s) {
    _Float16 h;
    memcpy(&h, &s, 2);
    return static_cast<float>(h);
  }
  static Storage Store(float f) {
    auto h = static_cast<_Float16>(f);
    Storage s;
    memcpy(&s, &h, 2);
    return s;
  }
#else
  using Soft = Small<uint16_t, 5, 10, 15, true, false>;
  static float Load(Storage s) { return Soft::Decode(s); }
  static Storage Store(float f) { return Soft::Encode(f); }
#endif
};

}  // namespace JAXCOLL_KERNEL_NAMESPACE
}  // namespace jaxcoll

#endif  // JAXCOLL_REDUCE_NARROW_H_
