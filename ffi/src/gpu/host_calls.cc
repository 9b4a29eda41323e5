#include "gpu/host_calls.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "program/plan.h"

namespace jaxcoll {
namespace gpu {
namespace {

using Chunks = std::vector<uint32_t>;

struct RankEdge {
  uint32_t edge;
  int from, to;  // ranks
};

class Finder {
 public:
  Finder(const Program& program, const Table& table, const std::vector<int>& hosts)
      : p_(program), t_(table), hosts_(hosts), n_(static_cast<size_t>(program.nranks)) {
    for (int r = 0; r < p_.nranks; ++r) ranks_of_[hosts_[static_cast<size_t>(r)]].push_back(r);
  }

  std::vector<HostCall> Run() {
    if (ranks_of_.size() < 2 || ranks_of_.size() == n_) return {};
    holds_.resize(p_.chunks.size() * n_);
    for (size_t c = 0; c < p_.chunks.size(); ++c)
      for (size_t r = 0; r < n_; ++r) holds_[c * n_ + r] = IsSource(p_, t_, p_.chunks[c], static_cast<int>(r));
    const std::vector<GraphPart> parts = Parts(p_);
    for (auto part = parts.begin(); part != parts.end();) {
      step_ = part->step;
      std::vector<RankEdge> edges;
      for (; part != parts.end() && part->step == step_; ++part)
        for (uint32_t e = part->first; e < part->last; ++e) {
          const Edge& edge = p_.edges[e];
          edges.push_back({e, t_.At(part->graph, step_)[edge.src], t_.At(part->graph, step_ + 1)[edge.dst]});
        }
      Step(edges);
    }
    return std::move(found_);
  }

 private:
  template <typename F>
  void ForEachChunk(const RankEdge& e, F&& f) const {
    const Edge& edge = p_.edges[e.edge];
    for (uint32_t k = edge.first_ref; k < edge.first_ref + edge.ref_count; ++k) f(p_.refs[k]);
  }
  size_t At(uint32_t chunk, int rank) const { return size_t{chunk} * n_ + static_cast<size_t>(rank); }

  void Step(const std::vector<RankEdge>& edges) {
    arrivals_.clear();
    std::map<int, std::vector<RankEdge>> inside;
    for (const RankEdge& e : edges) {
      ForEachChunk(e, [&](uint32_t c) { ++arrivals_[At(c, e.to)]; });
      int host = hosts_[static_cast<size_t>(e.from)];
      if (host == hosts_[static_cast<size_t>(e.to)]) inside[host].push_back(e);
    }
    for (const auto& [host, list] : inside) Recognise(ranks_of_.at(host), list);
    for (const RankEdge& e : edges) ForEachChunk(e, [&](uint32_t c) { holds_[At(c, e.to)] = true; });
  }

  void Recognise(const std::vector<int>& ranks, const std::vector<RankEdge>& edges) {
    EdgeOp op = p_.edges[edges[0].edge].op;
    bool reduce = op == EdgeOp::kReduce;
    if (reduce && p_.canonical) return;  // its order of adding up is promised
    std::map<std::pair<int, int>, Chunks> carried;
    for (const RankEdge& e : edges) {
      if (p_.edges[e.edge].op != op) return;
      ForEachChunk(e, [&](uint32_t c) { carried[{e.from, e.to}].push_back(c); });
    }
    if (carried.size() != ranks.size() * (ranks.size() - 1)) return;
    std::map<int, Chunks> owned;
    for (auto& [pair, chunks] : carried) {
      std::sort(chunks.begin(), chunks.end());
      int owner = reduce ? pair.second : pair.first;
      if (!owned.emplace(owner, chunks).second && owned[owner] != chunks) return;
    }
    if (!Whole(owned, ranks, reduce)) return;
    HostCall call;
    call.step = step_;
    call.reduce = reduce;
    call.ranks = ranks;
    for (const RankEdge& e : edges) call.edges.push_back(e.edge);
    MakeRows(owned, &call);
    found_.push_back(std::move(call));
  }

  // Every chunk has one owner; nothing else comes to it in this step; all shares are equal.
  bool Whole(const std::map<int, Chunks>& owned, const std::vector<int>& ranks, bool reduce) const {
    std::set<uint32_t> seen;
    uint64_t share = 0, block = 0;
    for (const auto& [owner, chunks] : owned) {
      uint64_t mine = 0;
      for (uint32_t c : chunks) {
        const Chunk& chunk = p_.chunks[c];
        if (!seen.insert(c).second) return false;
        if (block == 0) block = chunk.block_weight;
        if (chunk.block_weight != block) return false;
        mine += chunk.weight;
        if (!holds_[At(c, owner)]) return false;
        for (int r : ranks) {
          uint32_t want = (r == owner) == reduce ? (reduce ? static_cast<uint32_t>(ranks.size()) - 1 : 1) : 0;
          auto it = arrivals_.find(At(c, r));
          if ((it == arrivals_.end() ? 0 : it->second) != want) return false;
        }
      }
      if (share == 0) share = mine;
      if (mine != share || mine == 0) return false;
    }
    return true;
  }

  // Chunks that are whole blocks, a row for each: then a row lies in one piece where the owners' blocks are neighbours.
  void MakeRows(const std::map<int, Chunks>& owned, HostCall* call) const {
    bool blocks = (call->reduce ? p_.input_blocks() : p_.output_blocks()) > 1;
    size_t count = owned.begin()->second.size();
    for (const auto& [owner, chunks] : owned) {
      blocks = blocks && chunks.size() == count;
      for (uint32_t c : chunks) blocks = blocks && p_.chunks[c].chunks_in_block == 1;
    }
    call->rows.resize(blocks ? count : 1);
    for (size_t i = 0; i < call->rows.size(); ++i)
      for (const auto& [owner, chunks] : owned) call->rows[i].push_back(blocks ? Chunks{chunks[i]} : chunks);
  }

  const Program& p_;
  const Table& t_;
  const std::vector<int>& hosts_;
  const size_t n_;
  std::map<int, std::vector<int>> ranks_of_;  // [host]
  std::vector<bool> holds_;                   // [chunk * n + rank] before the step
  std::unordered_map<size_t, uint32_t> arrivals_;
  std::vector<HostCall> found_;
  int step_ = 0;
};

}  // namespace

std::vector<HostCall> FindHostCalls(const Program& program, const Table& table, const std::vector<int>& hosts) {
  if (hosts.empty()) return {};
  return Finder(program, table, hosts).Run();
}

std::string CallName(const HostCall& call) {
  std::string text = call.reduce ? "ncclReduceScatter among ranks " : "ncclAllGather among ranks ";
  for (size_t i = 0; i < call.ranks.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(call.ranks[i]);
  return text + " of a host";
}

bool FindNcclReduction(DType type, Reduction reduction, NcclReduction* out) {
  struct Row {
    DType type;
    int nccl, per_element;
    bool exact;  // integers: no NaN, no order
  };
  static constexpr Row kRows[] = {
      {DType::kS8, 0, 1, true},   {DType::kU8, 1, 1, true},    {DType::kS32, 2, 1, true},  {DType::kU32, 3, 1, true},
      {DType::kS64, 4, 1, true},  {DType::kU64, 5, 1, true},   {DType::kF32, 7, 1, false}, {DType::kF64, 8, 1, false},
      {DType::kC64, 7, 2, false}, {DType::kC128, 8, 2, false},
  };
  static constexpr int kOps[] = {0, 2, 3, 1};  // [Reduction] ncclSum, ncclMax, ncclMin, ncclProd
  if (reduction == Reduction::kNone) return false;
  bool ordered = reduction == Reduction::kMax || reduction == Reduction::kMin;
  for (const Row& row : kRows) {
    if (row.type != type) continue;
    if (!row.exact && (ordered || (row.per_element > 1 && reduction != Reduction::kSum))) return false;
    *out = {row.nccl, kOps[static_cast<size_t>(reduction)], row.per_element};
    return true;
  }
  return false;
}

}  // namespace gpu
}  // namespace jaxcoll
