#include "gpu/launch_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

namespace jaxcoll {
namespace gpu {
namespace {

constexpr uint32_t kNoNode = UINT32_MAX;

class Maker {
 public:
  Maker(std::shared_ptr<const Plan> plan, int max_streams, const std::vector<HostCall>& calls, LaunchPlan* out)
      : plan_(*plan), program_(*plan->program), max_streams_(max_streams), calls_(calls), out_(*out) {
    out_.plan = std::move(plan);
  }

  void Run() {
    out_.steps.resize(static_cast<size_t>(program_.steps));
    step_of_.assign(plan_.nodes.size(), program_.steps);
    before_.resize(plan_.nodes.size());
    mark_of_.assign(plan_.nodes.size(), kNoMark);
    for (uint32_t i = 0; i < plan_.nodes.size(); ++i) {
      const Node& node = plan_.nodes[i];
      if (node.kind == NodeKind::kSend) step_of_[i] = program_.edges[node.edge].step;
      if (node.kind == NodeKind::kVertex)
        changed_[node.chunk] = step_of_[i] = program_.edges[plan_.incoming[node.first_in].edge].step;
      if (node.kind == NodeKind::kCopy) copy_of_[node.chunk] = i;
      for (uint32_t k = node.first_next; k < node.first_next + node.num_next; ++k) before_[plan_.next[k]].push_back(i);
    }
    in_call_.assign(program_.edges.size(), false);
    for (const HostCall& c : calls_)
      for (uint32_t e : c.edges) in_call_[e] = true;
    FindInPlace();
    MakeFlows();
    for (const HostCall& c : calls_)
      if (std::binary_search(c.ranks.begin(), c.ranks.end(), plan_.rank)) MakeCall(c);
    AssignStreams();
    MakeMarks();
    MakeNodes();
    MakeWaits();
  }

 private:
  // What replaces a value lands in its place, unless something of this very step must be over first: then it would wait
  // inside its own group.
  void FindInPlace() {
    out_.in_place.assign(plan_.incoming.size(), false);
    for (uint32_t i = 0; i < plan_.nodes.size(); ++i) {
      const Node& node = plan_.nodes[i];
      if (node.kind != NodeKind::kVertex) continue;
      if (node.reduce && in_call_[plan_.incoming[node.first_in].edge]) {
        // A ReduceScatter brings what is reduced already, one's own value included: none of these comes by itself.
        for (uint32_t k = node.first_in; k < node.first_in + node.num_in; ++k) out_.in_place[k] = true;
        continue;
      }
      if (node.reduce || node.num_in != 1) continue;
      bool free = plan_.incoming[node.first_in].wide == node.dst.wide;
      for (uint32_t b : before_[i]) free = free && step_of_[b] < step_of_[i];
      out_.in_place[node.first_in] = free;
    }
  }

  bool Replaces(uint32_t node) const { return out_.in_place[plan_.nodes[node].first_in]; }

  void MakeFlows() {
    std::map<uint32_t, std::pair<bool, std::vector<std::pair<uint32_t, uint32_t>>>>
        edges;  // edge -> send?, (transfer, part)
    for (uint32_t i = 0; i < plan_.nodes.size(); ++i) {
      const Node& node = plan_.nodes[i];
      if (node.kind != NodeKind::kSend || in_call_[node.edge]) continue;
      edges[node.edge].first = true;
      edges[node.edge].second.emplace_back(node.transfer, i);
    }
    for (uint32_t k = 0; k < plan_.incoming.size(); ++k) {
      if (in_call_[plan_.incoming[k].edge]) continue;
      edges[plan_.incoming[k].edge].first = false;
      edges[plan_.incoming[k].edge].second.emplace_back(plan_.incoming[k].transfer, k);
    }
    for (auto& [edge, list] : edges) {
      std::sort(list.second.begin(), list.second.end());
      Flow flow{};
      flow.edge = edge;
      flow.send = list.first;
      for (auto [transfer, part] : list.second) flow.parts.push_back(part);
      flow.peer = flow.send ? plan_.nodes[flow.parts[0]].peer : plan_.incoming[flow.parts[0]].peer;
      out_.steps[program_.edges[edge].step].flows.push_back(std::move(flow));  // edges are sorted by graph, then step
    }
  }

  void MakeCall(const HostCall& c) {
    LaunchCall out{};
    out.call = c;
    out.place = static_cast<uint32_t>(std::lower_bound(c.ranks.begin(), c.ranks.end(), plan_.rank) - c.ranks.begin());
    std::map<uint32_t, uint32_t> sends, arrivals;  // chunk -> node; incoming
    ForEachTransfer(c, [&](uint32_t chunk, int32_t send, int32_t incoming) {
      if (send >= 0) sends[chunk] = static_cast<uint32_t>(send);
      if (incoming >= 0) arrivals[chunk] = static_cast<uint32_t>(incoming);
    });
    if (!c.reduce)
      for (auto& [chunk, send] : sends)
        if (uint32_t copy = CopyOf(chunk, c.step); copy != kNoNode) out.copies.push_back(send = copy);
    for (const auto& row : c.rows) {
      out.parts.emplace_back(row.size());
      for (uint32_t m = 0; m < row.size(); ++m)
        for (uint32_t chunk : row[m]) {
          bool sent = c.reduce != (m == out.place);
          uint32_t part = sent ? sends.at(chunk) : arrivals.at(chunk);
          out.parts.back()[m].push_back(sent || !c.reduce ? part : plan_.node_of_incoming[part]);
        }
    }
    out_.steps[static_cast<size_t>(c.step)].calls.push_back(std::move(out));
  }

  // The node that copies the chunk into the result, if its value changes no more from `step` on.
  uint32_t CopyOf(uint32_t chunk, int step) {
    auto copy = copy_of_.find(chunk);
    if (copy == copy_of_.end()) return kNoNode;
    if (auto changed = changed_.find(chunk); changed != changed_.end() && changed->second >= step) return kNoNode;
    in_call_node_.insert(copy->second);
    return copy->second;
  }

  // Calls f(chunk, node that sends it, incoming) for what this rank sends (incoming: -1) or receives (node: -1).
  template <typename F>
  void ForEachTransfer(const HostCall& c, F&& f) const {
    for (uint32_t e : c.edges)
      for (uint32_t k = 0; k < program_.edges[e].ref_count; ++k) {
        uint32_t transfer = program_.edges[e].first_transfer + k;
        int32_t send = plan_.send_of_transfer[transfer], incoming = plan_.recv_of_transfer[transfer];
        if (send >= 0 || incoming >= 0) f(program_.refs[program_.edges[e].first_ref + k], send, incoming);
      }
  }

  void AssignStreams() {
    size_t graphs = std::max<size_t>(1, program_.graphs.size());
    std::vector<uint32_t> most(graphs, 0);
    for (LaunchStep& step : out_.steps) {
      std::vector<uint32_t> slots(graphs, 0);
      for (Flow& f : step.flows) f.stream = static_cast<uint16_t>(slots[program_.edges[f.edge].graph]++);
      for (size_t g = 0; g < graphs; ++g) most[g] = std::max(most[g], slots[g]);
    }
    base_.resize(graphs);
    uint32_t total = 0;
    for (size_t g = 0; g < graphs; ++g) {
      base_[g] = total;
      total += most[g];
    }
    total = std::max(1u, total);
    out_.num_streams = static_cast<uint16_t>(std::min<uint32_t>(total, static_cast<uint32_t>(max_streams_)));
    for (LaunchStep& step : out_.steps)
      for (Flow& f : step.flows)
        f.stream = static_cast<uint16_t>((base_[program_.edges[f.edge].graph] + f.stream) % out_.num_streams);
    // The stream of what this rank's own share goes on with.
    for (LaunchStep& step : out_.steps)
      for (LaunchCall& c : step.calls) c.stream = StreamOfChunk(c.call.rows[0][c.place][0]);
  }

  uint16_t StreamOfChunk(uint32_t chunk) const {
    int32_t g = program_.chunks.empty() ? -1 : program_.chunks[chunk].graph;
    return g < 0 ? uint16_t{0} : static_cast<uint16_t>(base_[static_cast<size_t>(g)] % out_.num_streams);
  }

  uint32_t NewMark(uint16_t stream) {
    out_.mark_stream.push_back(stream);
    return static_cast<uint32_t>(out_.mark_stream.size() - 1);
  }

  void Landed(uint32_t incoming, uint32_t mark) {
    landed_[incoming] = mark;
    if (out_.in_place[incoming]) mark_of_[plan_.node_of_incoming[incoming]] = mark;
  }

  void MakeMarks() {
    landed_.assign(plan_.incoming.size(), kNoMark);
    for (LaunchStep& step : out_.steps) {
      for (Flow& f : step.flows) {
        f.mark = NewMark(f.stream);
        f.timed = static_cast<uint32_t>(out_.timed.size());
        out_.timed.push_back({f.edge, f.send, false, f.peer, f.mark});
        for (uint32_t part : f.parts) {
          if (f.send)
            mark_of_[part] = f.mark;
          else
            Landed(part, f.mark);
        }
      }
      for (LaunchCall& c : step.calls) c.mark = NewMark(c.stream);
    }
    out_.num_spans = static_cast<uint32_t>(out_.mark_stream.size());
    for (LaunchStep& step : out_.steps)
      for (LaunchCall& c : step.calls) {
        c.done = NewMark(c.stream);
        std::set<uint32_t> timed;
        ForEachTransfer(c.call, [&](uint32_t, int32_t send, int32_t incoming) {
          bool sends = send >= 0;
          uint32_t edge =
              sends ? plan_.nodes[static_cast<size_t>(send)].edge : plan_.incoming[static_cast<size_t>(incoming)].edge;
          uint16_t peer =
              sends ? plan_.nodes[static_cast<size_t>(send)].peer : plan_.incoming[static_cast<size_t>(incoming)].peer;
          if (timed.insert(edge).second) out_.timed.push_back({edge, sends, true, peer, c.mark});
          if (sends)
            mark_of_[static_cast<size_t>(send)] = c.mark;
          else
            Landed(static_cast<uint32_t>(incoming), c.done);
        });
      }
  }

  void MakeNodes() {
    for (uint32_t i = 0; i < plan_.nodes.size(); ++i) {
      const Node& node = plan_.nodes[i];
      if (node.kind == NodeKind::kSend || (node.kind == NodeKind::kVertex && Replaces(i))) continue;
      if (in_call_node_.count(i) != 0) continue;
      LocalNode local{i, StreamOfChunk(node.chunk), {}, kNoMark};
      if (node.num_next > 0) mark_of_[i] = local.mark = NewMark(local.stream);
      if (node.kind == NodeKind::kVertex)
        out_.steps[static_cast<size_t>(step_of_[i])].nodes.push_back(std::move(local));
      else
        out_.last.push_back(std::move(local));
    }
  }

  // A stream runs in order, so a mark on the waiter's own stream needs no wait: it was recorded before.
  void Wait(uint32_t mark, uint16_t stream, std::vector<uint32_t>* after) const {
    if (mark == kNoMark || out_.mark_stream[mark] == stream) return;
    if (std::find(after->begin(), after->end(), mark) == after->end()) after->push_back(mark);
  }

  void MakeWaits() {
    auto of_node = [&](uint32_t node, uint16_t stream, std::vector<uint32_t>* after) {
      for (uint32_t b : before_[node]) Wait(mark_of_[b], stream, after);
    };
    auto local = [&](LocalNode& n) {
      of_node(n.node, n.stream, &n.after);
      const Node& node = plan_.nodes[n.node];
      for (uint32_t k = node.first_in; k < node.first_in + node.num_in; ++k) Wait(landed_[k], n.stream, &n.after);
    };
    for (LaunchStep& step : out_.steps) {
      for (Flow& f : step.flows)
        for (uint32_t part : f.parts) {
          if (f.send)
            of_node(part, f.stream, &f.after);
          else if (out_.in_place[part])
            of_node(plan_.node_of_incoming[part], f.stream, &f.after);
        }
      for (LaunchCall& c : step.calls) {
        for (uint32_t copy : c.copies) of_node(copy, c.stream, &c.after);
        ForEachTransfer(c.call, [&](uint32_t, int32_t send, int32_t incoming) {
          if (send >= 0)
            of_node(static_cast<uint32_t>(send), c.stream, &c.after);
          else if (out_.in_place[static_cast<size_t>(incoming)])
            of_node(plan_.node_of_incoming[static_cast<size_t>(incoming)], c.stream, &c.after);
        });
      }
      for (LocalNode& n : step.nodes) local(n);
    }
    for (LocalNode& n : out_.last) local(n);
  }

  const Plan& plan_;
  const Program& program_;
  const int max_streams_;
  const std::vector<HostCall>& calls_;
  LaunchPlan& out_;
  std::vector<bool> in_call_;                  // [edge]
  std::map<uint32_t, uint32_t> copy_of_;       // chunk -> node that copies it into the result at the end
  std::map<uint32_t, int> changed_;            // chunk -> the last step at which this rank gets another value of it
  std::set<uint32_t> in_call_node_;            // copies that a call has taken over
  std::vector<int> step_of_;                   // [node]; copies at the end: steps
  std::vector<std::vector<uint32_t>> before_;  // [node] what it depends on
  std::vector<uint32_t> mark_of_, landed_;     // [node], [incoming]
  std::vector<uint32_t> base_;                 // [graph] its first stream
};

}  // namespace

std::shared_ptr<const LaunchPlan> MakeLaunchPlan(std::shared_ptr<const Plan> plan, int max_streams,
                                                 const std::vector<HostCall>& calls) {
  auto out = std::make_shared<LaunchPlan>();
  Maker(std::move(plan), max_streams, calls, out.get()).Run();
  return out;
}

}  // namespace gpu
}  // namespace jaxcoll
