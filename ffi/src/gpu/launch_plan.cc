#include "gpu/launch_plan.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace jaxcoll {
namespace gpu {
namespace {

class Maker {
 public:
  Maker(std::shared_ptr<const Plan> plan, int max_streams, LaunchPlan* out)
      : plan_(*plan), program_(*plan->program), max_streams_(max_streams), out_(*out) {
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
      if (node.kind == NodeKind::kVertex) step_of_[i] = program_.edges[plan_.incoming[node.first_in].edge].step;
      for (uint32_t k = node.first_next; k < node.first_next + node.num_next; ++k) before_[plan_.next[k]].push_back(i);
    }
    FindInPlace();
    MakeFlows();
    AssignStreams();
    MakeNodes();
    MakeWaits();
    Connections();
  }

 private:
  // What replaces a value lands in its place, unless something of this very step must be over first: then it would wait
  // inside its own group.
  void FindInPlace() {
    out_.in_place.assign(plan_.incoming.size(), false);
    for (uint32_t i = 0; i < plan_.nodes.size(); ++i) {
      const Node& node = plan_.nodes[i];
      if (node.kind != NodeKind::kVertex || node.reduce || node.num_in != 1) continue;
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
      if (node.kind != NodeKind::kSend) continue;
      edges[node.edge].first = true;
      edges[node.edge].second.emplace_back(node.transfer, i);
    }
    for (uint32_t k = 0; k < plan_.incoming.size(); ++k) {
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
      ++out_.num_flows;
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
  }

  uint16_t StreamOfChunk(uint32_t chunk) const {
    int32_t g = program_.chunks.empty() ? -1 : program_.chunks[chunk].graph;
    return g < 0 ? uint16_t{0} : static_cast<uint16_t>(base_[static_cast<size_t>(g)] % out_.num_streams);
  }

  uint32_t NewMark(uint16_t stream) {
    out_.mark_stream.push_back(stream);
    return static_cast<uint32_t>(out_.mark_stream.size() - 1);
  }

  void MakeNodes() {
    landed_.assign(plan_.incoming.size(), kNoMark);
    for (LaunchStep& step : out_.steps)
      for (Flow& f : step.flows) {
        f.mark = NewMark(f.stream);
        for (uint32_t part : f.parts) {
          if (f.send) {
            mark_of_[part] = f.mark;
            continue;
          }
          landed_[part] = f.mark;
          if (out_.in_place[part]) mark_of_[plan_.node_of_incoming[part]] = f.mark;
        }
      }
    for (uint32_t i = 0; i < plan_.nodes.size(); ++i) {
      const Node& node = plan_.nodes[i];
      if (node.kind == NodeKind::kSend || (node.kind == NodeKind::kVertex && Replaces(i))) continue;
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
      for (LocalNode& n : step.nodes) local(n);
    }
    for (LocalNode& n : out_.last) local(n);
  }

  void Connections() {
    for (const LaunchStep& step : out_.steps)
      for (const Flow& f : step.flows) (f.send ? out_.send_to : out_.receive_from).push_back(f.peer);
    for (auto* list : {&out_.send_to, &out_.receive_from}) {
      std::sort(list->begin(), list->end());
      list->erase(std::unique(list->begin(), list->end()), list->end());
    }
  }

  const Plan& plan_;
  const Program& program_;
  const int max_streams_;
  LaunchPlan& out_;
  std::vector<int> step_of_;                   // [node]; copies at the end: steps
  std::vector<std::vector<uint32_t>> before_;  // [node] what it depends on
  std::vector<uint32_t> mark_of_, landed_;     // [node], [incoming]
  std::vector<uint32_t> base_;                 // [graph] its first stream
};

}  // namespace

std::shared_ptr<const LaunchPlan> MakeLaunchPlan(std::shared_ptr<const Plan> plan, int max_streams) {
  auto out = std::make_shared<LaunchPlan>();
  Maker(std::move(plan), max_streams, out.get()).Run();
  return out;
}

}  // namespace gpu
}  // namespace jaxcoll
