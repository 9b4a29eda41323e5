// One record per edge and execution (BUILD.md section 3), and the bounded buffer that holds them until they are
// drained.
#ifndef JAXCOLL_TELEMETRY_RECORD_H_
#define JAXCOLL_TELEMETRY_RECORD_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace jaxcoll {

struct Record {
  uint64_t comm;
  int64_t launch;
  uint64_t site;
  uint64_t start_ns, transfer_ns, wait_ns, bytes;
  uint32_t index, version, program;
  uint16_t graph, step, src, dst;
  uint8_t side;  // 0 receiver, 1 sender; with the bits below
  uint8_t pad[3];
};
static_assert(sizeof(Record) == 80, "the Python side reads this layout");
constexpr uint8_t kUnsplit = 2;   // raw: transfer_ns holds the wait for the other end too
constexpr uint8_t kTogether = 4;  // beside it: the edge ran with others of its step in one call, whose span this is

// Whether an execution is recorded where one in `stride` is: the same ones on every rank.
inline bool Sampled(int64_t launch, uint32_t index, uint32_t stride) {
  if (stride <= 1) return true;
  uint64_t mixed = (static_cast<uint64_t>(launch) * 1000003 + index) * 0x9E3779B97F4A7C15ull;
  return (mixed >> 33) % stride == 0;
}

// Many writers, one drainer; when it is full new records are counted and dropped, never waited for. The ring is made
// and touched once: a buffer that grew would cost the collectives a page fault every few executions.
class RecordBuffer {
 public:
  explicit RecordBuffer(size_t capacity) : ring_(capacity) {}

  // A hint, without the lock: records made now would only be dropped.
  bool full() const { return full_.load(std::memory_order_relaxed); }

  // Returns the number of records held now.
  size_t Add(const Record* records, size_t n) {
    std::lock_guard<std::mutex> lock(mu_);
    size_t take = std::min(n, ring_.size() - count_);
    for (size_t i = 0; i < take; ++i) ring_[(first_ + count_ + i) % ring_.size()] = records[i];
    count_ += take;
    dropped_ += n - take;
    full_.store(count_ == ring_.size(), std::memory_order_relaxed);
    return count_;
  }

  void Drop(size_t n) {
    std::lock_guard<std::mutex> lock(mu_);
    dropped_ += n;
  }

  // Moves up to `max` records, oldest first, and tells how many were ever dropped.
  size_t DrainTo(Record* out, size_t max, uint64_t* dropped) {
    std::lock_guard<std::mutex> lock(mu_);
    size_t n = std::min(max, count_);
    for (size_t i = 0; i < n; ++i) out[i] = ring_[(first_ + i) % ring_.size()];
    first_ = (first_ + n) % ring_.size();
    count_ -= n;
    full_.store(false, std::memory_order_relaxed);
    *dropped = dropped_;
    return n;
  }

 private:
  std::mutex mu_;
  std::vector<Record> ring_;
  size_t first_ = 0, count_ = 0;
  std::atomic<bool> full_{false};
  uint64_t dropped_ = 0;
};

}  // namespace jaxcoll

#endif  // JAXCOLL_TELEMETRY_RECORD_H_
