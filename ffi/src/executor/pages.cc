// Large pages, and freed memory that stays.
#include "executor/pages.h"

#include <sys/mman.h>

#include <climits>
#include <cstdint>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace jaxcoll {
namespace {

constexpr size_t kLargePagesFrom = size_t{4} << 20;
constexpr uintptr_t kPage = 4096;

void Advise(uintptr_t begin, uintptr_t end) {
  begin = (begin + kPage - 1) & ~(kPage - 1);
  end &= ~(kPage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace

void KeepFreedMemory() {
#ifdef __GLIBC__
  constexpr int kOwnMappingFrom = 1 << 30;
  constexpr int kGrowBy = 64 << 20;
  mallopt(M_MMAP_THRESHOLD, kOwnMappingFrom);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
  mallopt(M_TOP_PAD, kGrowBy);
#endif
}

void AdviseLargePages(const View& view, int blocks) {
  for (const View::Leaf& leaf : view.leaves) {
    size_t bytes = static_cast<size_t>(leaf.count) * static_cast<size_t>(blocks) * view.element_size;
    uintptr_t begin = reinterpret_cast<uintptr_t>(leaf.base);
    if (bytes >= kLargePagesFrom) Advise(begin, begin + bytes);
  }
}

}  // namespace jaxcoll
