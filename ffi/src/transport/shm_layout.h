// What lies in the shared memory of a process: a head, one ring of messages per peer, then the slab of posted blocks.
// Both ends of a link map it, so a change here needs a new kLayout.
#ifndef JAXCOLL_TRANSPORT_SHM_LAYOUT_H_
#define JAXCOLL_TRANSPORT_SHM_LAYOUT_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transport/link.h"

namespace jaxcoll {

inline constexpr uint32_t kSegmentMagic = 0x4d48534a;  // "JSHM"
inline constexpr uint32_t kLayout = 4;
inline constexpr size_t kRingBytes = size_t{512} << 10;
inline constexpr uint32_t kMessage = 1, kPadding = 2;
inline constexpr size_t kSlabBytes = size_t{2} << 20;
inline constexpr size_t kSlabLimit = size_t{256} << 10;
// One copy more, and all those readers take it at the speed of memory.
inline constexpr uint32_t kManyReaders = 4;
inline constexpr size_t kSlabLimitMany = size_t{1} << 20;
inline constexpr size_t kLine = 64;

inline size_t RoundUp(size_t n, size_t a) { return (n + a - 1) / a * a; }

struct RecordHead {
  uint32_t size;  // bytes in the ring, this head included, a multiple of 16
  uint32_t kind;
  uint64_t reserved;
};

// Before every block of a slab. Each place counts for itself, the owner of the slab too, so that what a lost process
// holds can be told from the rest.
struct SlabHead {
  uint32_t size;    // of the block with its head, a multiple of kLine
  uint32_t filler;  // not 0: nothing but a gap up to the end of the slab, too small for the rest of a head
  std::atomic<uint16_t> held[1];  // [places]: reads of the block that this process has still to do
};

inline size_t SlabHeadBytes(int places) {
  return RoundUp(offsetof(SlabHead, held) + sizeof(std::atomic<uint16_t>) * static_cast<size_t>(places), kLine);
}

// Positions only grow; the writer owns head, the reader owns tail.
struct ShmRing {
  alignas(64) std::atomic<uint64_t> head;
  alignas(64) std::atomic<uint64_t> tail;
  alignas(64) std::atomic<uint32_t> writer_waits;
  std::atomic<uint32_t> reads;  // the writer of this ring can read the memory of its reader
  alignas(64) uint8_t data[kRingBytes];
};

// The operations that have failed in a process: what they offered is to be read no more. Written by its owner alone.
class Withdrawals {
 public:
  static constexpr uint64_t kKept = 1023;
  uint64_t count() const { return count_.load(std::memory_order_acquire); }
  void Add(const OpKey& key) {
    uint64_t n = count_.load(std::memory_order_relaxed);
    keys_[n % kKept].store(OpKeyHash()(key), std::memory_order_seq_cst);
    count_.store(n + 1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // before the memory is written again
  }
  // Whether it is one of those after the first `since`, or so many have come since then that nobody knows.
  bool Has(const OpKey& key, uint64_t since) const {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // after the memory has been read
    uint64_t now = count_.load(std::memory_order_seq_cst);
    if (now == since) return false;
    if (now - since >= kKept) return true;
    for (uint64_t n = since; n < now; ++n)
      if (keys_[n % kKept].load(std::memory_order_seq_cst) == OpKeyHash()(key)) return true;
    return count_.load(std::memory_order_seq_cst) - since >= kKept;  // overwritten meanwhile
  }

 private:
  std::atomic<uint64_t> count_;
  std::atomic<uint64_t> keys_[kKept];
};

struct ShmSegment {
  uint32_t magic, layout;
  uint32_t places, ring_bytes;
  uint64_t probe_address, probe_value;
  alignas(64) std::atomic<uint32_t> bell;
  // The owner sleeps until the bell reaches `wake_at`; `sleeping` counts its sleepers.
  alignas(64) std::atomic<uint32_t> sleeping;
  std::atomic<uint32_t> wake_at;
  alignas(64) Withdrawals withdrawals;  // the owner's
  alignas(64) ShmRing rings[1];         // [places]: messages from that place to the owner of this segment
};

inline size_t RingsBytes(int places) {
  return sizeof(ShmSegment) + sizeof(ShmRing) * static_cast<size_t>(std::max(0, places - 1));
}

inline uint8_t* SlabBase(ShmSegment* segment) {
  return reinterpret_cast<uint8_t*>(segment) + RingsBytes(static_cast<int>(segment->places));
}

inline SlabHead* HeadOf(uint8_t* slab, uint64_t block, int places) {
  return reinterpret_cast<SlabHead*>(slab + block - SlabHeadBytes(places));
}

}  // namespace jaxcoll

#endif  // JAXCOLL_TRANSPORT_SHM_LAYOUT_H_
