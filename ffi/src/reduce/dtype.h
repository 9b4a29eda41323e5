// Element types (XLA's FFI numbers, so that the handler passes them through) and reductions.
#ifndef JAXCOLL_REDUCE_DTYPE_H_
#define JAXCOLL_REDUCE_DTYPE_H_

#include <cstddef>
#include <cstdint>

namespace jaxcoll {

enum class DType : uint8_t {
  kInvalid = 0,
  kPred = 1,
  kS8 = 2,
  kS16 = 3,
  kS32 = 4,
  kS64 = 5,
  kU8 = 6,
  kU16 = 7,
  kU32 = 8,
  kU64 = 9,
  kF16 = 10,
  kF32 = 11,
  kF64 = 12,
  kC64 = 15,
  kBF16 = 16,
  kC128 = 18,
  kF8E5M2 = 19,
  kF8E4M3FN = 20,
  kF8E4M3B11FNUZ = 23,
  kF8E5M2FNUZ = 24,
  kF8E4M3FNUZ = 25,
  kF8E4M3 = 28,
  kF8E3M4 = 29,
  kF8E8M0FNU = 33,
};

enum class Reduction : uint8_t { kSum = 0, kMax = 1, kMin = 2, kProd = 3, kNone = 4 };

size_t ElementSize(DType t);             // bytes; 0 for types this library doesn't move
const char* DTypeName(DType t);          // "f32"
const char* ReductionName(Reduction r);  // "sum"
bool IsNarrow(DType t);                  // float types whose sums are kept in f32
bool CanReduce(DType t, Reduction r);    // whether Combine() knows the pair

}  // namespace jaxcoll

#endif  // JAXCOLL_REDUCE_DTYPE_H_
