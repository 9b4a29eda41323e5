// One record per edge and execution (BUILD.md section 3), and the bounded buffer that holds them until they are
// drained.
#ifndef JAXCOLL_TELEMETRY_RECORD_H_
#define JAXCOLL_TELEMETRY_RECORD_H_

#include <algorithm>
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
  uint8_t side;  // 0 receiver, 1 sender
  uint8_t pad[3];
};
static_assert(sizeof(Record) == 80, "the Python side reads this layout");

// Many writers, one drainer; when it is full new records are counted and dropped, never waited for.
class RecordBuffer {
 public:
  explicit RecordBuffer(size_t capacity) : capacity_(capacity) {}

  // Returns the number of records held now.
  size_t Add(const Record* records, size_t n) {
    std::lock_guard<std::mutex> lock(mu_);
    size_t room = capacity_ - (held_.size() - drained_);
    size_t take = n < room ? n : room;
    held_.insert(held_.end(), records, records + take);
    dropped_ += n - take;
    return held_.size() - drained_;
  }

  // Moves up to `max` records, oldest first, and tells how many were ever dropped.
  size_t DrainTo(Record* out, size_t max, uint64_t* dropped) {
    std::lock_guard<std::mutex> lock(mu_);
    size_t left = held_.size() - drained_, n = left < max ? left : max;
    auto first = held_.begin() + static_cast<ptrdiff_t>(drained_);
    std::copy(first, first + static_cast<ptrdiff_t>(n), out);
    drained_ += n;
    // The rest moves to the front only now and then, so that many small drains of a full buffer stay cheap.
    if (drained_ * 2 >= held_.size()) {
      held_.erase(held_.begin(), held_.begin() + static_cast<ptrdiff_t>(drained_));
      drained_ = 0;
    }
    *dropped = dropped_;
    return n;
  }

 private:
  std::mutex mu_;
  size_t capacity_;
  std::vector<Record> held_;
  size_t drained_ = 0;  // of the front of held_
  uint64_t dropped_ = 0;
};

}  // namespace jaxcoll

#endif  // JAXCOLL_TELEMETRY_RECORD_H_
