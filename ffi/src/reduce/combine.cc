#include "reduce/combine.h"

#include "reduce/denormals.h"

namespace jaxcoll {

#define JAXCOLL_DECLARE_KERNELS(ns)                                                                             \
  namespace ns {                                                                                                \
  void Combine(DType type, Reduction op, void* dst, bool dst_wide, const Source* sources, int count, size_t n); \
  void Convert(DType type, void* dst, bool dst_wide, const void* src, bool src_wide, size_t n);                 \
  void CopyAround(void* dst, const void* src, size_t bytes);                                                    \
  }
JAXCOLL_DECLARE_KERNELS(kernels_base)
#if defined(JAXCOLL_X86_KERNELS)
JAXCOLL_DECLARE_KERNELS(kernels_avx2)
JAXCOLL_DECLARE_KERNELS(kernels_avx512)
#endif

namespace {

struct Kernels {
  decltype(&kernels_base::Combine) combine = kernels_base::Combine;
  decltype(&kernels_base::Convert) convert = kernels_base::Convert;
  decltype(&kernels_base::CopyAround) copy_around = kernels_base::CopyAround;
  Kernels() {
#if defined(JAXCOLL_X86_KERNELS)
    // Chosen at run time: the same library serves every x86-64 machine.
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      combine = kernels_avx512::Combine;
      convert = kernels_avx512::Convert;
      copy_around = kernels_avx512::CopyAround;
    } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
      combine = kernels_avx2::Combine;
      convert = kernels_avx2::Convert;
      copy_around = kernels_avx2::CopyAround;
    }
#endif
  }
};

const Kernels& Best() {
  static const Kernels kernels;
  return kernels;
}

struct TypeRow {
  DType type;
  const char* name;
  uint8_t size;
  bool narrow;
};

constexpr TypeRow kTypes[] = {
    {DType::kPred, "bool", 1, false},
    {DType::kS8, "s8", 1, false},
    {DType::kS16, "s16", 2, false},
    {DType::kS32, "s32", 4, false},
    {DType::kS64, "s64", 8, false},
    {DType::kU8, "u8", 1, false},
    {DType::kU16, "u16", 2, false},
    {DType::kU32, "u32", 4, false},
    {DType::kU64, "u64", 8, false},
    {DType::kF16, "f16", 2, true},
    {DType::kF32, "f32", 4, false},
    {DType::kF64, "f64", 8, false},
    {DType::kBF16, "bf16", 2, true},
    {DType::kC64, "c64", 8, false},
    {DType::kC128, "c128", 16, false},
    {DType::kF8E5M2, "f8e5m2", 1, true},
    {DType::kF8E4M3FN, "f8e4m3fn", 1, true},
    {DType::kF8E4M3B11FNUZ, "f8e4m3b11fnuz", 1, true},
    {DType::kF8E5M2FNUZ, "f8e5m2fnuz", 1, true},
    {DType::kF8E4M3FNUZ, "f8e4m3fnuz", 1, true},
    {DType::kF8E4M3, "f8e4m3", 1, true},
    {DType::kF8E3M4, "f8e3m4", 1, true},
    {DType::kF8E8M0FNU, "f8e8m0fnu", 1, false},
};

const TypeRow* Row(DType t) {
  for (const TypeRow& row : kTypes)
    if (row.type == t) return &row;
  return nullptr;
}

}  // namespace

size_t ElementSize(DType t) {
  const TypeRow* row = Row(t);
  return row ? row->size : 0;
}

const char* DTypeName(DType t) {
  const TypeRow* row = Row(t);
  return row ? row->name : "unsupported";
}

const char* ReductionName(Reduction r) {
  static const char* const names[] = {"sum", "max", "min", "prod", "none"};
  return static_cast<size_t>(r) < 5 ? names[static_cast<size_t>(r)] : "unknown";
}

bool IsNarrow(DType t) {
  const TypeRow* row = Row(t);
  return row && row->narrow;
}

bool CanReduce(DType t, Reduction r) {
  if (Row(t) == nullptr || t == DType::kF8E8M0FNU) return false;
  bool ordered = t != DType::kC64 && t != DType::kC128;
  switch (r) {
    case Reduction::kSum:
    case Reduction::kProd:
      return true;
    case Reduction::kMax:
    case Reduction::kMin:
      return ordered;
    default:
      return false;
  }
}

void Combine(DType type, Reduction op, void* dst, bool dst_wide, const Source* sources, int count, size_t n) {
  if (n == 0) return;
  KeepDenormals keep;
  Best().combine(type, op, dst, dst_wide, sources, count, n);
}

void Convert(DType type, void* dst, bool dst_wide, const void* src, bool src_wide, size_t n) {
  if (n == 0) return;
  KeepDenormals keep;
  Best().convert(type, dst, dst_wide, src, src_wide, n);
}

void CopyAround(void* dst, const void* src, size_t bytes) { Best().copy_around(dst, src, bytes); }

}  // namespace jaxcoll
