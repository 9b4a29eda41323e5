#include "program/plan.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>

namespace jaxcoll {
namespace {

class Compiler {
 public:
  Compiler(const Program& program, const Table& table, int rank, bool wide, Plan* plan)
      : p_(program), t_(table), rank_(rank), wide_(wide), plan_(plan), n_(static_cast<size_t>(program.nranks)) {}

  void Run() {
    InitCounts();
    InitOwn();
    for (const GraphPart& part : Parts(p_)) GraphStep(part.graph, part.step, part.first, part.last);
    Finish();
    Link();
  }

 private:
  // What the rank knows of a chunk's value at the current step.
  struct Own {
    Slot slot;
    int writer = -1;                // node that wrote it, -1: the operand itself
    int value = -1;                 // its number, once a send reads it
    std::vector<uint32_t> readers;  // sends that read this version
  };

  void InitCounts() {
    counts_.assign(p_.chunks.size() * n_, 0);
    sources_.resize(p_.chunks.size());
    for (size_t c = 0; c < p_.chunks.size(); ++c)
      for (size_t r = 0; r < n_; ++r)
        if (IsSource(p_, t_, p_.chunks[c], static_cast<int>(r))) {
          counts_[c * n_ + r] = 1;
          ++sources_[c];
        }
  }

  // The block of the operand or result in which a chunk lies on this rank.
  uint16_t InputBlock(const Chunk& c) const {
    return p_.input_blocks() == 1 ? uint16_t{0} : static_cast<uint16_t>(t_.home[static_cast<size_t>(c.dst)]);
  }
  uint16_t OutputBlock(const Chunk& c) const {
    return p_.output_blocks() == 1 ? uint16_t{0} : static_cast<uint16_t>(t_.home[static_cast<size_t>(c.src)]);
  }

  void InitOwn() {
    own_.resize(p_.chunks.size());
    spare_.assign(p_.chunks.size() * 2, {-1, -1});
    for (size_t c = 0; c < p_.chunks.size(); ++c)
      if (counts_[c * n_ + static_cast<size_t>(rank_)] != 0) {
        own_[c].slot.kind = SlotKind::kInput;
        own_[c].slot.block = InputBlock(p_.chunks[c]);
      }
  }

  bool Partial(uint32_t chunk, uint32_t count) const { return wide_ && count > 1 && count < sources_[chunk]; }

  void GraphStep(uint32_t g, int step, uint32_t first, uint32_t last) {
    struct Arrival {
      uint32_t chunk, edge, transfer;
    };
    std::vector<Arrival> arrivals;
    std::vector<std::pair<size_t, uint32_t>> updates;  // (chunk * n + rank, new count)
    const int16_t* from = t_.At(g, step);
    const int16_t* to = t_.At(g, step + 1);
    for (uint32_t e = first; e < last; ++e) {
      const Edge& edge = p_.edges[e];
      int src = from[edge.src], dst = to[edge.dst];
      for (uint32_t k = 0; k < edge.ref_count; ++k) {
        uint32_t chunk = p_.refs[edge.first_ref + k];
        size_t base = size_t{chunk} * n_;
        uint32_t sent = counts_[base + static_cast<size_t>(src)];
        updates.emplace_back(base + static_cast<size_t>(dst), edge.op == EdgeOp::kCopy ? sent | kReplace : sent);
        if (src == rank_) AddSend(chunk, e, edge.first_transfer + k, dst, Partial(chunk, sent));
        if (dst == rank_) arrivals.push_back({chunk, e, edge.first_transfer + k});
      }
    }
    std::stable_sort(arrivals.begin(), arrivals.end(),
                     [](const Arrival& a, const Arrival& b) { return a.chunk < b.chunk; });
    for (size_t i = 0; i < arrivals.size();) {
      size_t j = i;
      std::vector<std::pair<uint32_t, uint32_t>> in;  // (edge, transfer)
      for (; j < arrivals.size() && arrivals[j].chunk == arrivals[i].chunk; ++j)
        in.emplace_back(arrivals[j].edge, arrivals[j].transfer);
      AddVertex(arrivals[i].chunk, from, to, in);
      i = j;
    }
    for (auto [where, count] : updates)
      counts_[where] = (count & kReplace) ? count & ~kReplace : counts_[where] + count;
  }

  void AddSend(uint32_t chunk, uint32_t edge, uint32_t transfer, int peer, bool wide) {
    Node node{};
    node.kind = NodeKind::kSend;
    node.chunk = chunk;
    node.edge = edge;
    node.transfer = transfer;
    node.peer = static_cast<uint16_t>(peer);
    node.wide = wide;
    node.src = own_[chunk].slot;
    if (own_[chunk].value < 0) {
      own_[chunk].value = static_cast<int>(plan_->value_readers.size());
      plan_->value_readers.push_back(0);
    }
    node.value = static_cast<uint32_t>(own_[chunk].value);
    ++plan_->value_readers[node.value];
    uint32_t id = Add(node);
    if (own_[chunk].writer >= 0) Depend(id, static_cast<uint32_t>(own_[chunk].writer));
    own_[chunk].readers.push_back(id);
  }

  void AddVertex(uint32_t chunk, const int16_t* from, const int16_t* to,
                 std::vector<std::pair<uint32_t, uint32_t>> in) {
    const Chunk& c = p_.chunks[chunk];
    Own& own = own_[chunk];
    bool reduce = p_.edges[in[0].first].op == EdgeOp::kReduce;
    uint32_t count = reduce ? counts_[size_t{chunk} * n_ + static_cast<size_t>(rank_)] : 0;
    bool has_own = count != 0;
    auto sender = [&](uint32_t edge) { return p_.edges[edge].src; };
    if (p_.canonical)
      std::stable_sort(in.begin(), in.end(), [&](auto a, auto b) { return sender(a.first) < sender(b.first); });
    Node node{};
    node.kind = NodeKind::kVertex;
    node.reduce = reduce && (has_own || in.size() > 1);
    node.chunk = chunk;
    node.first_in = static_cast<uint32_t>(plan_->incoming.size());
    node.num_in = static_cast<uint32_t>(in.size());
    if (p_.canonical) {
      int position = static_cast<int>(std::find(to, to + n_, rank_) -
                                      to);  // of the vertex, which may be another than that of its own sends
      while (node.own_place < in.size() && sender(in[node.own_place].first) < position) ++node.own_place;
    }
    for (auto [edge, transfer] : in) {
      const Edge& e = p_.edges[edge];
      int peer = from[e.src];
      uint32_t sent = counts_[size_t{chunk} * n_ + static_cast<size_t>(peer)];
      count += sent;
      plan_->incoming.push_back({transfer, edge, static_cast<uint16_t>(peer), Partial(chunk, sent), 0});
    }
    if (has_own) node.src = own.slot;
    std::vector<uint32_t> wait;  // what must be over before this node may write
    node.dst = PickSlot(chunk, c, Partial(chunk, count), own, &wait);
    uint32_t id = Add(node);
    for (uint32_t w : wait) Depend(id, w);
    // A copy over a value that nobody reads must still come after it.
    if (own.writer >= 0 && (has_own || own.slot == node.dst)) Depend(id, static_cast<uint32_t>(own.writer));
    auto& past = past_[chunk_key(chunk, own.slot)];
    past.insert(past.end(), own.readers.begin(), own.readers.end());
    if (has_own)
      past.push_back(id);
    else if (own.writer >= 0)
      past.push_back(static_cast<uint32_t>(own.writer));
    own.slot = node.dst;
    own.writer = static_cast<int>(id);
    own.value = -1;
    own.readers.clear();
  }

  // The slot for a chunk's new value: the result itself when the value may lie there, unless a send of this very step
  // still reads that slot (an exchange in place): then a spare one, so that two partners never wait for each other.
  Slot PickSlot(uint32_t chunk, const Chunk& c, bool wide, const Own& own, std::vector<uint32_t>* wait) {
    Slot out;
    out.kind = SlotKind::kOutput;
    out.block = OutputBlock(c);
    bool result = IsDest(p_, t_, c, rank_) || p_.kind == Kind::kReduce;
    auto busy = [&](const Slot& s) { return s == own.slot && !own.readers.empty(); };
    if (result && !wide && !busy(out)) return WaitFor(chunk, out, wait);
    for (int i = 0; i < 2; ++i) {
      int32_t& spare = spare_[size_t{chunk} * 2 + static_cast<size_t>(i)][wide ? 1 : 0];
      Slot s;
      s.kind = SlotKind::kScratch;
      s.wide = wide;
      if (spare < 0) {
        spare = static_cast<int32_t>(plan_->scratch.size());
        plan_->scratch.push_back({chunk, wide});
      }
      s.scratch = static_cast<uint32_t>(spare);
      if (!busy(s)) return WaitFor(chunk, s, wait);
    }
    return out;  // unreachable: at most one slot holds the current value
  }

  // Everything that read or wrote an older value in this slot comes before.
  Slot WaitFor(uint32_t chunk, const Slot& s, std::vector<uint32_t>* wait) {
    auto& past = past_[chunk_key(chunk, s)];
    *wait = past;
    past.clear();
    return s;
  }

  void Finish() {
    bool has_output_of_no_source = p_.kind == Kind::kPermute;
    for (uint32_t c = 0; c < p_.chunks.size(); ++c) {
      const Chunk& chunk = p_.chunks[c];
      if (!IsDest(p_, t_, chunk, rank_)) continue;
      has_output_of_no_source = false;
      Slot out;
      out.kind = SlotKind::kOutput;
      out.block = OutputBlock(chunk);
      if (own_[c].slot == out || own_[c].slot.kind == SlotKind::kNone) continue;
      Node node{};
      node.kind = NodeKind::kCopy;
      node.chunk = c;
      node.src = own_[c].slot;
      node.dst = out;
      uint32_t id = Add(node);
      if (own_[c].writer >= 0) Depend(id, static_cast<uint32_t>(own_[c].writer));
      for (uint32_t w : past_[chunk_key(c, out)]) Depend(id, w);
    }
    if (has_output_of_no_source) {
      Node node{};
      node.kind = NodeKind::kZero;
      node.dst.kind = SlotKind::kOutput;
      Add(node);
    }
  }

  uint32_t Add(const Node& node) {
    plan_->nodes.push_back(node);
    edges_.emplace_back();
    return static_cast<uint32_t>(plan_->nodes.size() - 1);
  }

  void Depend(uint32_t node, uint32_t on) {
    if (node == on) return;
    auto& list = edges_[on];
    if (std::find(list.begin(), list.end(), node) != list.end()) return;
    list.push_back(node);
    ++plan_->nodes[node].num_deps;
  }

  void Link() {
    Plan& plan = *plan_;
    plan.recv_of_transfer.assign(p_.num_transfers, -1);
    plan.send_of_transfer.assign(p_.num_transfers, -1);
    plan.node_of_incoming.resize(plan.incoming.size());
    std::unordered_map<uint32_t, uint32_t> record_of_edge;
    for (Incoming& in : plan.incoming) {
      auto [it, fresh] = record_of_edge.emplace(in.edge, static_cast<uint32_t>(plan.record_edges.size()));
      if (fresh) plan.record_edges.push_back(in.edge);
      in.record = it->second;
    }
    for (uint32_t i = 0; i < plan.nodes.size(); ++i) {
      Node& node = plan.nodes[i];
      node.first_next = static_cast<uint32_t>(plan.next.size());
      node.num_next = static_cast<uint32_t>(edges_[i].size());
      plan.next.insert(plan.next.end(), edges_[i].begin(), edges_[i].end());
      if (node.num_deps == 0) plan.roots.push_back(i);
      if (node.kind == NodeKind::kSend) plan.send_of_transfer[node.transfer] = static_cast<int32_t>(i);
      if (node.kind != NodeKind::kVertex) continue;
      plan.max_fan_in = std::max(plan.max_fan_in, node.num_in);
      for (uint32_t k = node.first_in; k < node.first_in + node.num_in; ++k) {
        plan.recv_of_transfer[plan.incoming[k].transfer] = static_cast<int32_t>(k);
        plan.node_of_incoming[k] = i;
      }
    }
  }

  struct KeyHash {
    size_t operator()(uint64_t k) const { return k * 0x9e3779b97f4a7c15ull; }
  };
  static uint64_t chunk_key(uint32_t chunk, const Slot& s) {
    return (uint64_t{chunk} << 32) | (uint64_t{static_cast<uint8_t>(s.kind)} << 28) |
           (s.kind == SlotKind::kScratch ? s.scratch & 0xfffffffu : 0u);
  }

  static constexpr uint32_t kReplace = 1u << 31;
  const Program& p_;
  const Table& t_;
  int rank_;
  bool wide_;
  Plan* plan_;
  size_t n_;
  std::vector<uint32_t> counts_, sources_;
  std::vector<Own> own_;
  std::vector<std::array<int32_t, 2>> spare_;  // [chunk * 2 + i][wide]: scratch slots made so far
  std::unordered_map<uint64_t, std::vector<uint32_t>, KeyHash>
      past_;  // (chunk, slot) -> nodes to wait for before rewriting it
  std::vector<std::vector<uint32_t>> edges_;
};

}  // namespace

std::vector<GraphPart> Parts(const Program& program) {
  std::vector<GraphPart> parts;
  for (uint32_t g = 0; g < program.graphs.size(); ++g) {
    uint32_t first = program.graphs[g].first_edge, end = first + program.graphs[g].edge_count;
    for (uint32_t e = first; e < end; ++e) {
      int step = program.edges[e].step;
      if (e == first || parts.back().step != step) parts.push_back({g, step, e, e});
      parts.back().last = e + 1;
    }
  }
  std::stable_sort(parts.begin(), parts.end(), [](const GraphPart& a, const GraphPart& b) { return a.step < b.step; });
  return parts;
}

std::shared_ptr<const Plan> CompilePlan(std::shared_ptr<const Program> program, std::shared_ptr<const Table> table,
                                        int rank, bool wide) {
  auto plan = std::make_shared<Plan>();
  plan->program = std::move(program);
  plan->table = std::move(table);
  plan->rank = rank;
  plan->wide = wide;
  Compiler(*plan->program, *plan->table, rank, wide, plan.get()).Run();
  return plan;
}

}  // namespace jaxcoll
