// What an operation says about itself: what it still expects, its name in messages, its records.
#include <algorithm>
#include <utility>

#include "executor/execution.h"

namespace jaxcoll {

// Messages of the earliest unfinished step of a lane can't depend on anything that this rank has yet to do, so all of
// them may be waited for together; those of later steps may.
uint32_t Execution::Expecting() const {
  uint32_t fewest = 0, acks = 0;
  for (uint32_t lane = 0; lane < next_lane_; ++lane) {
    if (lane_left_[lane] == 0) continue;
    uint32_t count = 0;
    int first_step = -1;
    for (uint32_t id = 0; id < plan_.nodes.size(); ++id) {
      const Node& node = plan_.nodes[id];
      if (node.kind == NodeKind::kSend) {
        const OutState& o = out_[size_t{lane} * num_sends_ + send_index_[id]];
        acks += o.data_ready && !o.done ? 1 : 0;
        continue;
      }
      uint32_t left = node.kind == NodeKind::kVertex ? missing_[size_t{lane} * plan_.nodes.size() + id] : 0;
      if (left == 0) continue;
      int step = program_.edges[plan_.incoming[node.first_in].edge].step;
      if (first_step < 0 || step < first_step) {
        first_step = step;
        count = 0;
      }
      if (step == first_step) count += left;
    }
    if (count > 0 && (fewest == 0 || count < fewest)) fewest = count;
  }
  return std::max(1u, fewest > 0 ? fewest : acks);
}

std::string Execution::DescribeSignature(uint64_t s) {
  return Format("%s %s %s[%llu]", KindName(static_cast<Kind>(s >> 60)),
                ReductionName(static_cast<Reduction>((s >> 56) & 15)), DTypeName(static_cast<DType>((s >> 48) & 255)),
                static_cast<unsigned long long>((s >> 8) & 0xffffffffffull));
}

std::string Execution::Describe() const {
  return Format("%s (call %u of its program) of rank %d in %s", DescribeSignature(signature_).c_str(),
                static_cast<unsigned>(request.key.site & 0xffffffffu), request.rank, request.group->name.c_str());
}

void Execution::AddRecords(RecordBuffer* buffer, size_t* held) const {
  if (buffer->full()) return buffer->Drop(plan_.record_edges.size());  // nobody drains: not worth the time
  static thread_local std::vector<Record> records;
  static thread_local std::vector<std::pair<int64_t, int64_t>> spans;  // first byte, last byte
  records.assign(plan_.record_edges.size(), Record{});
  spans.assign(records.size(), {0, 0});
  for (size_t k = 0; k < records.size(); ++k) {
    const Edge& e = program_.edges[plan_.record_edges[k]];
    Record& r = records[k];
    r.comm = request.key.comm;
    r.launch = request.key.launch;
    r.site = request.key.site;
    r.index = request.key.index;
    r.start_ns = static_cast<uint64_t>(started_ns + WallOffsetNs());
    r.version = static_cast<uint32_t>(plan_.table_version);
    r.program = program_.id;
    r.graph = static_cast<uint16_t>(e.graph);
    r.step = e.step;
    r.dst = static_cast<uint16_t>(request.rank);
  }
  for (uint32_t lane = 0; lane < lanes_; ++lane) {
    for (uint32_t k = 0; k < plan_.incoming.size(); ++k) {
      const Incoming& i = plan_.incoming[k];
      const InState& s = in(lane, k);
      Record& r = records[i.record];
      r.src = i.peer;
      r.bytes += TransferBytes(lane, plan_.nodes[plan_.node_of_incoming[k]].chunk, i.wide);
      r.transfer_ns += static_cast<uint64_t>(std::max<int64_t>(0, s.transfer_ns));
      if (s.arrive_ns == 0) continue;  // nothing to move
      int64_t& first = spans[i.record].first;
      first = first == 0 ? s.arrive_ns : std::min(first, s.arrive_ns);
      spans[i.record].second = std::max(spans[i.record].second, std::max(s.done_ns, s.arrive_ns + s.transfer_ns));
    }
  }
  // Lanes overlap: an edge can't have been moving for longer than from its first byte to its last. What is left of the
  // time until the last byte was waiting, so that start + wait + transfer is when this end had everything.
  for (size_t k = 0; k < records.size(); ++k) {
    auto [first, last] = spans[k];
    if (last == 0) continue;
    Record& r = records[k];
    r.transfer_ns = std::min(r.transfer_ns, static_cast<uint64_t>(last - first));
    r.wait_ns = static_cast<uint64_t>(std::max<int64_t>(0, last - started_ns)) -
                std::min(r.transfer_ns, static_cast<uint64_t>(std::max<int64_t>(0, last - started_ns)));
  }
  *held = buffer->Add(records.data(), records.size());
}

}  // namespace jaxcoll
