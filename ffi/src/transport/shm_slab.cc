#include "transport/shm_slab.h"

#include <cstring>
#include <new>

#include "transport/shm_layout.h"

namespace jaxcoll {

size_t ShmSlab::limit(uint32_t readers) const { return readers >= kManyReaders ? kSlabLimitMany : kSlabLimit; }

uint64_t ShmSlab::Put(const Span* data, size_t spans, size_t bytes) {
  const size_t head_bytes = SlabHeadBytes(places_);
  size_t need = head_bytes + RoundUp(bytes, kLine);
  uint64_t at;
  {
    std::lock_guard<std::mutex> lock(mu_);
    while (tail_ != head_) {
      auto* oldest = reinterpret_cast<SlabHead*>(base_ + tail_ % kSlabBytes);
      if (Held(*oldest)) break;
      tail_ += oldest->size;
    }
    // From the beginning again, where a block of any size fits; from the middle the largest would never find room.
    if (tail_ == head_) tail_ = head_ = RoundUp(head_, kSlabBytes);
    size_t to_end = kSlabBytes - head_ % kSlabBytes, pad = need > to_end ? to_end : 0;
    if (kSlabBytes - (head_ - tail_) < need + pad) return 0;
    if (pad > 0) {
      auto* gap = reinterpret_cast<SlabHead*>(base_ + head_ % kSlabBytes);
      gap->size = static_cast<uint32_t>(pad);
      gap->filler = 1;
      head_ += pad;
    }
    at = head_ % kSlabBytes;
    auto* head = reinterpret_cast<SlabHead*>(base_ + at);
    head->size = static_cast<uint32_t>(need);
    head->filler = 0;
    for (int p = 0; p < places_; ++p) new (&head->held[p]) std::atomic<uint16_t>(p == place_ ? 1 : 0);
    head_ += need;
  }
  uint8_t* p = base_ + at + head_bytes;
  for (size_t i = 0; i < spans; ++i) {
    memcpy(p, data[i].data, data[i].size);
    p += data[i].size;
  }
  return at + head_bytes;
}

bool ShmSlab::Held(const SlabHead& block) const {
  if (block.filler != 0) return false;
  for (int p = 0; p < places_; ++p)
    if (block.held[p].load(std::memory_order_acquire) != 0 && !gone_[static_cast<size_t>(p)]) return true;
  return false;
}

void ShmSlab::Lend(uint64_t block, int place) {
  HeadOf(base_, block, places_)->held[place].fetch_add(1, std::memory_order_relaxed);
}

void ShmSlab::Release(uint64_t block) {
  HeadOf(base_, block, places_)->held[place_].fetch_sub(1, std::memory_order_release);
}

void ShmSlab::Gone(int place) {
  std::lock_guard<std::mutex> lock(mu_);
  gone_[static_cast<size_t>(place)] = true;
}

}  // namespace jaxcoll
