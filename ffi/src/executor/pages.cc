// Large pages, and freed memory that stays.
#include "executor/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace jaxcoll {
namespace {

constexpr size_t kLargePagesFrom = size_t{4} << 20;
constexpr uintptr_t kPage = 4096;

// Where malloc's heap ended when it was last advised; 0: freed memory isn't kept.
std::atomic<uintptr_t> heap_advised{0};

void Advise(uintptr_t begin, uintptr_t end) {
  begin = (begin + kPage - 1) & ~(kPage - 1);
  end &= ~(kPage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

uintptr_t HeapEnd() { return reinterpret_cast<uintptr_t>(sbrk(0)); }

}  // namespace

void KeepFreedMemory() {
#ifdef __GLIBC__
  constexpr int kOwnMappingFrom = 1 << 30;
  constexpr int kGrowBy = 64 << 20;
  // One after the other: setting any of them also ends glibc's own adjusting of the first.
  if (heap_advised.load() == 0 && mallopt(M_MMAP_THRESHOLD, kOwnMappingFrom) == 1 &&
      mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1 && mallopt(M_TOP_PAD, kGrowBy) == 1)
    heap_advised = HeapEnd();
#endif
}

void AdviseLargePages(const View& view, int blocks) {
  for (const View::Leaf& leaf : view.leaves) {
    size_t bytes = static_cast<size_t>(leaf.count) * static_cast<size_t>(blocks) * view.element_size;
    uintptr_t begin = reinterpret_cast<uintptr_t>(leaf.base);
    if (bytes >= kLargePagesFrom) Advise(begin, begin + bytes);
  }
  uintptr_t advised = heap_advised.load(std::memory_order_relaxed);
  if (advised == 0) return;
  uintptr_t end = HeapEnd();
  if (end > advised && heap_advised.compare_exchange_strong(advised, end)) Advise(advised, end);
}

}  // namespace jaxcoll
