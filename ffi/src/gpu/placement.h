// Where everything lies in one execution: values in the operand, the result and scratch memory, landing buffers for
// what is reduced, and, for calls inside a host, whether NCCL can work on the values where they are.
#ifndef JAXCOLL_GPU_PLACEMENT_H_
#define JAXCOLL_GPU_PLACEMENT_H_

#include <cstdint>
#include <map>
#include <vector>

#include "executor/execution.h"
#include "gpu/launch_plan.h"

namespace jaxcoll {
namespace gpu {

// A value at rest.
struct Site {
  Slot slot;
  uint32_t chunk = 0;
  bool wide = false;
  int32_t landing = -1;  // >= 0: the landing buffer of this incoming value, in place of the slot
};

// One row of a call in one lane. NCCL wants equal blocks side by side; where the values don't lie so, they are packed
// before, and unpacked after.
struct RowPlace {
  size_t block = 0;  // bytes of a rank's share, the same on every rank; 0: nothing to do
  bool pack = false, unpack = false;
  size_t pack_at = 0, unpack_at = 0;  // in the execution's memory
  Site from, to;                      // else where the first share begins
  int64_t from_element = 0, to_element = 0;
};

class Placement {
 public:
  Placement(const OpRequest& request, const LaunchPlan& launch, uint32_t lanes);

  // Bytes of memory that the execution needs; `Use` comes before anything is located.
  size_t bytes() const { return bytes_; }
  void Use(void* memory) { memory_ = static_cast<uint8_t*>(memory); }
  uint8_t* memory() const { return memory_; }

  size_t Wire(bool wide) const { return wide ? sizeof(float) : element_; }
  Range LaneOf(uint32_t chunk, uint32_t lane) const {
    return Program::LaneRange(ranges_[chunk], static_cast<int>(lane), static_cast<int>(lanes_));
  }
  uint32_t ChunkOf(uint32_t incoming) const { return plan_.nodes[plan_.node_of_incoming[incoming]].chunk; }
  size_t EdgeBytes(uint32_t edge, bool send) const;  // what a rank's end of an edge carries in all lanes

  // Calls f(first element of the block, elements) for the pieces of a lane that lie in one leaf each: the same cuts on
  // every rank.
  template <typename F>
  Status ForEachPiece(uint32_t chunk, uint32_t lane, F&& f) const {
    Range range = LaneOf(chunk, lane);
    Status status;
    r_.output.ForEach(0, range.begin, range.end, [&](uint8_t*, int64_t begin, int64_t n) {
      if (status.ok()) status = f(begin, n);
    });
    return status;
  }

  uint8_t* Locate(const Slot& slot, uint32_t chunk, int64_t element) const;
  uint8_t* Landing(uint32_t incoming, int64_t element) const;
  uint8_t* Target(uint32_t incoming, int64_t element) const;  // where an incoming value is put
  uint8_t* Find(const Site& site, int64_t element) const {
    return site.landing < 0 ? Locate(site.slot, site.chunk, element)
                            : Landing(static_cast<uint32_t>(site.landing), element);
  }

  const RowPlace& Row(const LaunchCall& call, size_t row, uint32_t lane) const {
    return rows_[first_row_.at(&call) + row * lanes_ + lane];
  }
  // What is handed to NCCL (ReduceScatter: a share for every rank; AllGather: one's own), and what it gives, by shares.
  std::vector<std::vector<Site>> Sources(const LaunchCall& call, size_t row) const;
  std::vector<std::vector<Site>> Sinks(const LaunchCall& call, size_t row) const;

 private:
  void LayOut(const LaunchCall& call, size_t row, uint32_t lane);
  bool Contiguous(const std::vector<std::vector<Site>>& shares, uint32_t lane, size_t block, Site* first,
                  int64_t* element) const;
  size_t Take(size_t bytes);

  const OpRequest& r_;
  const LaunchPlan& launch_;
  const Plan& plan_;
  const Program& program_;
  const uint32_t lanes_;
  const size_t element_;
  std::vector<Range> ranges_;  // [chunk]
  std::vector<size_t> scratch_at_, landing_at_;
  std::map<const LaunchCall*, size_t> first_row_;
  std::vector<RowPlace> rows_;  // by call, row, lane
  uint8_t* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace gpu
}  // namespace jaxcoll

#endif  // JAXCOLL_GPU_PLACEMENT_H_
