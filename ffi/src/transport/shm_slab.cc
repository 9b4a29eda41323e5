#include "transport/shm_slab.h"

#include <cstring>
#include <new>

#include "transport/shm_layout.h"

namespace jaxcoll {

size_t ShmSlab::limit(uint32_t readers) const { return readers >= kManyReaders ? kSlabLimitMany : kSlabLimit; }

uint64_t ShmSlab::Put(const Span* data, size_t spans, size_t bytes) {
  size_t need = kLine + RoundUp(bytes, kLine);
  uint64_t at;
  {
    std::lock_guard<std::mutex> lock(mu_);
    while (tail_ != head_) {
      SlabHead* oldest = reinterpret_cast<SlabHead*>(base_ + tail_ % kSlabBytes);
      if (oldest->readers.load(std::memory_order_acquire) != 0) break;
      tail_ += oldest->size;
    }
    // From the beginning again, where a block of any size fits; from the middle the largest would never find room.
    if (tail_ == head_) tail_ = head_ = RoundUp(head_, kSlabBytes);
    size_t to_end = kSlabBytes - head_ % kSlabBytes, pad = need > to_end ? to_end : 0;
    if (kSlabBytes - (head_ - tail_) < need + pad) return 0;
    if (pad > 0) {
      SlabHead* filler = new (base_ + head_ % kSlabBytes) SlabHead{};
      filler->size = static_cast<uint32_t>(pad);
      head_ += pad;
    }
    at = head_ % kSlabBytes;
    SlabHead* head = new (base_ + at) SlabHead{};
    head->size = static_cast<uint32_t>(need);
    head->readers.store(1, std::memory_order_relaxed);
    head_ += need;
  }
  uint8_t* p = base_ + at + kLine;
  for (size_t i = 0; i < spans; ++i) {
    memcpy(p, data[i].data, data[i].size);
    p += data[i].size;
  }
  return at + kLine;
}

void ShmSlab::Hold(uint64_t block) { HeadOf(base_, block)->readers.fetch_add(1, std::memory_order_relaxed); }
void ShmSlab::Release(uint64_t block) { HeadOf(base_, block)->readers.fetch_sub(1, std::memory_order_release); }

}  // namespace jaxcoll
