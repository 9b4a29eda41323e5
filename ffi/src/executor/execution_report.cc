// What an operation says about itself: what it still expects and from whom, its name in messages, its records.
#include <algorithm>
#include <utility>

#include "executor/engine.h"

namespace jaxcoll {
namespace {

constexpr uint64_t kLeastTimed = 4;  // an edge is timed where this part of its bytes is, one in so many

}  // namespace

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

// "step 2, edge 1->3 of graph 0 (schedule ring)"; the ends are ranks, so the table's.
std::string Execution::EdgeText(uint32_t edge, int from, int to) const {
  const Edge& e = program_.edges[edge];
  return Format("step %u, edge %d->%d of graph %u (schedule %s)", e.step, from, to, e.graph, program_.name.c_str());
}

void Execution::OnWaiting(const Header& h) {
  heard_[h.src] = true;
  if (h.transfer < waits_for_.size()) waits_for_[h.src] = static_cast<int>(h.transfer);
}

bool Execution::Begun(int rank) const {
  return rank == request.rank || heard_[static_cast<size_t>(rank)] ||
         (Local(rank) && engine_->Find(request.key, rank) != nullptr);
}

// Whom the chain of waiting ranks ends at: the one that has not come, or that doesn't know whom it waits for.
int Execution::Culprit(int rank) const {
  for (size_t i = 0; i < waits_for_.size(); ++i) {
    int next = waits_for_[static_cast<size_t>(rank)];
    if (next < 0 || next == rank || next == request.rank) break;
    rank = next;
  }
  return rank;
}

std::string Execution::Missing(int* rank) const {
  *rank = -1;
  const int me = request.rank;
  auto report = [&](uint32_t peer, const std::string& what) {
    *rank = static_cast<int>(peer);
    int culprit = Culprit(*rank);
    if (culprit != *rank)
      return Format("rank %d has %s; %s, which waits for it", culprit,
                    Begun(culprit) ? "begun but its data are late" : "not arrived", what.c_str());
    return Format("rank %u has %s; %s", peer, Begun(*rank) ? "begun but its data are late" : "not arrived",
                  what.c_str());
  };
  for (uint32_t lane = 0; lane < next_lane_; ++lane) {
    for (uint32_t k = 0; k < plan_.incoming.size(); ++k) {
      const InState& s = in(lane, k);
      if (s.state != In::kNone && s.state != In::kLanding) continue;
      const Incoming& i = plan_.incoming[k];
      return report(i.peer, Format("waiting for rank %u at %s", i.peer, EdgeText(i.edge, i.peer, me).c_str()));
    }
    for (uint32_t id = 0; id < plan_.nodes.size(); ++id) {
      if (plan_.nodes[id].kind != NodeKind::kSend) continue;
      const OutState& o = out_[size_t{lane} * num_sends_ + send_index_[id]];
      if (!o.data_ready || o.done) continue;
      const Node& node = plan_.nodes[id];
      return report(node.peer, Format("waiting for rank %u to take its data at %s", node.peer,
                                      EdgeText(node.edge, me, node.peer).c_str()));
    }
  }
  return "its own work is not done";
}

bool Execution::WaitsFor(int rank) const {
  for (uint32_t lane = 0; lane < next_lane_; ++lane) {
    for (uint32_t k = 0; k < plan_.incoming.size(); ++k)
      if (plan_.incoming[k].peer == rank && in(lane, k).state == In::kNone) return true;
    for (uint32_t id = 0; id < plan_.nodes.size(); ++id) {
      if (plan_.nodes[id].kind != NodeKind::kSend || plan_.nodes[id].peer != rank) continue;
      const OutState& o = out_[size_t{lane} * num_sends_ + send_index_[id]];
      if (o.data_ready && !o.done) return true;
    }
  }
  return false;
}

std::string Execution::Needs(int process) const {
  const std::vector<int>& processes = request.group->process;
  const int me = request.rank;
  auto there = [&](uint16_t rank) { return processes[rank] == process; };
  for (uint32_t lane = 0; lane < lanes_; ++lane) {
    for (uint32_t k = 0; k < plan_.incoming.size(); ++k) {
      const InState& s = in(lane, k);
      const Incoming& i = plan_.incoming[k];
      bool unread = s.state == In::kNone || s.state == In::kLanding || (s.state == In::kOffered && !s.direct);
      if (!there(i.peer) || !unread || Skipped(IncomingBytes(lane, k))) continue;
      return Format("waiting for rank %u at %s", i.peer, EdgeText(i.edge, i.peer, me).c_str());
    }
    for (uint32_t id = 0; id < plan_.nodes.size(); ++id) {
      const Node& node = plan_.nodes[id];
      if (node.kind != NodeKind::kSend || !there(node.peer) || out_[size_t{lane} * num_sends_ + send_index_[id]].done)
        continue;
      if (Skipped(TransferBytes(lane, node.chunk, node.wide))) continue;
      return Format("rank %u still has to take data at %s", node.peer, EdgeText(node.edge, me, node.peer).c_str());
    }
  }
  return {};
}

std::string Execution::Where(uint32_t incoming) const {
  const Incoming& i = plan_.incoming[incoming];
  return " at " + EdgeText(i.edge, i.peer, request.rank);
}

void Execution::AddRecords(RecordBuffer* buffer, size_t* held) const {
  if (buffer->full()) return buffer->Drop(plan_.record_edges.size());  // nobody drains: not worth the time
  static thread_local std::vector<Record> records;
  struct Sum {
    uint64_t timed = 0;
    int64_t transfer = 0, begin = 0, end = 0, done = 0;
  };
  static thread_local std::vector<Sum> sums;
  records.assign(plan_.record_edges.size(), Record{});
  sums.assign(records.size(), Sum{});
  for (size_t k = 0; k < records.size(); ++k) {
    const Edge& e = program_.edges[plan_.record_edges[k]];
    Record& r = records[k];
    r.comm = request.key.comm;
    r.launch = request.key.launch;
    r.site = request.key.site;
    r.index = request.key.index;
    r.start_ns = static_cast<uint64_t>(started_ns + WallOffsetNs());
    r.version = static_cast<uint32_t>(plan_.table->version);
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
      r.bytes += IncomingBytes(lane, k);
      Sum& sum = sums[i.record];
      sum.done = std::max({sum.done, s.arrive_ns, s.done_ns});
      if (s.timed == 0) continue;
      sum.begin = sum.timed == 0 ? s.begin_ns : std::min(sum.begin, s.begin_ns);
      sum.end = std::max(sum.end, s.end_ns);
      sum.timed += s.timed;
      sum.transfer += s.transfer_ns;
    }
  }
  // Lanes overlap: an edge can't have been moving for longer than from its first byte to its last. Bytes without a time
  // are taken to be as quick as the others; where too few have one, transfer_ns stays 0. What is left of the time until
  // the last byte was waiting, so that start + wait + transfer is when this end had everything.
  for (size_t k = 0; k < records.size(); ++k) {
    const Sum& sum = sums[k];
    if (sum.done == 0) continue;
    Record& r = records[k];
    int64_t all = std::max<int64_t>(0, sum.done - started_ns), transfer = 0;
    if (sum.timed * kLeastTimed >= r.bytes && sum.timed > 0) {
      double scale = static_cast<double>(r.bytes) / static_cast<double>(sum.timed);
      transfer = static_cast<int64_t>(static_cast<double>(std::min(sum.transfer, sum.end - sum.begin)) * scale);
      transfer = std::clamp<int64_t>(transfer, std::min<int64_t>(1, all), all);
    }
    r.transfer_ns = static_cast<uint64_t>(transfer);
    r.wait_ns = static_cast<uint64_t>(all - transfer);
  }
  *held = buffer->Add(records.data(), records.size());
}

}  // namespace jaxcoll
