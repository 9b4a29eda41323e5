#include "pack.h"

#include <algorithm>
#include <new>
#include <set>
#include <utility>
#include <vector>

#include "network.h"

namespace {

using jaxcoll::flow::Amount;
using jaxcoll::flow::FindCuts;
using jaxcoll::flow::Network;
using jaxcoll::flow::Shortage;

constexpr int32_t kMaxCuts = 16;
constexpr int32_t kTickEvery = 4;

using Words = std::vector<uint64_t>;  // a bit set: of cuts, or of ranks

inline bool Has(const Words& set, int32_t i) { return set[i >> 6] >> (i & 63) & 1; }
inline void Put(Words* set, int32_t i) { (*set)[i >> 6] |= uint64_t{1} << (i & 63); }

struct Edge {
  int32_t tail, head, arc;
};

struct Tree {
  int32_t root;
  Amount count;
  std::vector<Edge> edges;
};

struct Order {
  int32_t root;
  Amount count;
  const int32_t *hint_tail, *hint_head;
  int32_t hints;
};

// `count` equal trees while they grow.
struct Batch {
  Amount count;
  Words touched;  // the known cuts that they have entered
  std::vector<Edge> edges;
  std::vector<int32_t> depth;  // -1: not reached
  int32_t reached;
};

class Packer {
 public:
  Packer(int32_t ranks, int32_t arcs, const int32_t* tail, const int32_t* head, const Amount* capacity, int32_t max_depth)
      : ranks_(ranks), max_depth_(max_depth < 0 ? ranks : max_depth), tail_(tail, tail + arcs), head_(head, head + arcs),
        capacity_(capacity, capacity + arcs), scale_(arcs), out_(ranks + 1, 0), in_(ranks), pending_(ranks, 0) {
    for (int32_t a = 0; a < arcs; ++a) {
      ++out_[tail_[a] + 1];
      in_[head_[a]].push_back(a);  // rising tails, since arcs are sorted
      scale_[a] = 1.0 / static_cast<double>(std::max<Amount>(capacity_[a], 1));
    }
    for (int32_t v = 0; v < ranks; ++v) out_[v + 1] += out_[v];
  }

  // Adds a cut of ranks; false when it is known or separates nothing.
  bool AddCut(const Words& cut) {
    int32_t inside = 0;
    for (int32_t v = 0; v < ranks_; ++v) inside += Has(cut, v);
    if (inside == 0 || inside == ranks_ || !known_.insert(cut).second) return false;
    cuts_.push_back(cut);
    return true;
  }

  int32_t Run(const std::vector<Order>& orders, jc_pack_tick tick) {
    for (const Order& order : orders) pending_[order.root] += order.count;
    inside_.assign(ranks_, Words());
    Index(cuts_.size());
    for (Amount slack : slack_) {
      if (slack < 0) return JC_PACK_STUCK;
    }
    const std::vector<Order> sequence = EasyFirst(orders);
    int32_t steps = 0;
    while (grown_.size() < sequence.size()) {
      if (tick != nullptr && ++steps % kTickEvery == 0 &&
          tick(static_cast<double>(grown_.size()) / static_cast<double>(sequence.size())) != 0) {
        return JC_PACK_CANCELLED;
      }
      std::vector<Tree> trees;
      if (Grow(sequence[grown_.size()], /*ideal=*/false, &trees)) {
        grown_.push_back(std::move(trees));
      } else if (fresh_.empty() || !RollBack(sequence)) {
        return JC_PACK_STUCK;
      }
    }
    return JC_PACK_DONE;
  }

  const std::vector<std::vector<Tree>>& grown() const { return grown_; }
  const std::vector<Words>& cuts() const { return cuts_; }
  int32_t ranks() const { return ranks_; }
  int64_t checks() const { return checks_; }
  int64_t rollbacks() const { return rollbacks_; }
  int64_t regrown() const { return regrown_; }
  size_t words() const { return (ranks_ + 63) / 64; }

 private:
  bool Crosses(const Words& cut, int32_t arc) const { return Has(cut, head_[arc]) && !Has(cut, tail_[arc]); }

  // Capacity into a cut less the pending trees of the ranks outside.
  Amount Slack(const Words& cut) const {
    Amount slack = 0;
    for (size_t a = 0; a < capacity_.size(); ++a) {
      if (Crosses(cut, static_cast<int32_t>(a))) slack += capacity_[a];
    }
    for (int32_t v = 0; v < ranks_; ++v) {
      if (!Has(cut, v)) slack -= pending_[v];
    }
    return slack;
  }

  // Makes the last `count` cuts part of the index: their bit at every rank they hold, and their slack.
  void Index(size_t count) {
    const size_t first = cuts_.size() - count, width = (cuts_.size() + 63) / 64;
    for (Words& row : inside_) row.resize(width, 0);
    slack_.resize(cuts_.size());
    for (size_t c = first; c < cuts_.size(); ++c) {
      slack_[c] = 0;
      for (int32_t v = 0; v < ranks_; ++v) {
        if (Has(cuts_[c], v)) {
          Put(&inside_[v], static_cast<int32_t>(c));
        } else {
          slack_[c] -= pending_[v];
        }
      }
    }
    for (size_t a = 0; a < capacity_.size(); ++a) {
      if (capacity_[a] == 0) continue;
      const Words &in = inside_[head_[a]], &out = inside_[tail_[a]];
      for (size_t w = first / 64; w < width; ++w) {
        uint64_t crossed = in[w] & ~out[w];
        if (w == first / 64) crossed &= ~uint64_t{0} << (first % 64);
        for (; crossed != 0; crossed &= crossed - 1) slack_[w * 64 + __builtin_ctzll(crossed)] += capacity_[a];
      }
    }
  }

  // The trees are pending again: every cut gets back what they took from it, and owes them again if the root is outside.
  void Refund(const Tree& tree) {
    for (const Edge& edge : tree.edges) {
      capacity_[edge.arc] += tree.count;
      const Words &in = inside_[edge.head], &out = inside_[edge.tail];
      for (size_t w = 0; w < in.size(); ++w) {
        for (uint64_t crossed = in[w] & ~out[w]; crossed != 0; crossed &= crossed - 1) {
          slack_[w * 64 + __builtin_ctzll(crossed)] += tree.count;
        }
      }
    }
    const Words& home = inside_[tree.root];
    for (size_t c = 0; c < slack_.size(); ++c) {
      if (!Has(home, static_cast<int32_t>(c))) slack_[c] -= tree.count;
    }
  }

  // Grows the orders that get their ideal tree at once: the old one whole, or one of shortest paths. Returns all orders,
  // those first. The others need what the easy ones leave over anyway, and would spoil their trees if they came first.
  std::vector<Order> EasyFirst(const std::vector<Order>& orders) {
    std::vector<Order> easy, hard;
    for (const Order& order : orders) {
      std::vector<Tree> trees;
      if (Grow(order, /*ideal=*/true, &trees)) {
        grown_.push_back(std::move(trees));
        easy.push_back(order);
      } else {
        hard.push_back(order);
      }
    }
    easy.insert(easy.end(), hard.begin(), hard.end());
    return easy;
  }

  // True when the batch is the order's old tree, or without one, a tree of shortest paths.
  bool Ideal(const Batch& batch, const Order& order) {
    if (batch.reached != ranks_) return false;
    if (order.hints > 0) {
      for (int32_t i = 0; i < order.hints; ++i) {
        if (batch.edges[i].tail != order.hint_tail[i] || batch.edges[i].head != order.hint_head[i]) return false;
      }
      return order.hints == ranks_ - 1;
    }
    return batch.depth == Distances(order.root);
  }

  // Hops from `root` over all arcs that there were at the start.
  std::vector<int32_t> Distances(int32_t root) const {
    std::vector<int32_t> distance(ranks_, -1), queue{root};
    distance[root] = 0;
    for (size_t i = 0; i < queue.size(); ++i) {
      for (int32_t arc = out_[queue[i]]; arc < out_[queue[i] + 1]; ++arc) {
        if (distance[head_[arc]] < 0) {
          distance[head_[arc]] = distance[queue[i]] + 1;
          queue.push_back(head_[arc]);
        }
      }
    }
    return distance;
  }

  // The trees of one order, taken from the capacities. False when stuck: nothing is taken, and cuts are learnt. With
  // `ideal`, one batch that must come out ideal; nothing is learnt when it doesn't.
  bool Grow(const Order& order, bool ideal, std::vector<Tree>* trees) {
    pending_[order.root] -= order.count;
    const std::vector<Amount> slack = slack_;
    std::vector<Batch> open, done;
    open.push_back({order.count, inside_[order.root], {}, std::vector<int32_t>(ranks_, -1), 1});
    open.back().depth[order.root] = 0;
    while (!open.empty()) {
      Batch batch = std::move(open.back());
      open.pop_back();
      Expand(&batch, order);
      if (ideal && !Ideal(batch, order)) {
        open.push_back(std::move(batch));
        Undo(open);
        slack_ = slack;
        pending_[order.root] += order.count;
        return false;
      }
      while (batch.reached != ranks_) {
        Batch rest{0, {}, {}, {}, 0};
        if (!Force(&batch, &rest)) {
          open.push_back(std::move(batch));
          Diagnose(open);
          Undo(open);
          Undo(done);
          slack_ = slack;
          pending_[order.root] += order.count;
          return false;
        }
        if (rest.count > 0) open.push_back(std::move(rest));
        Expand(&batch, order);
      }
      done.push_back(std::move(batch));
    }
    for (Batch& batch : done) trees->push_back({order.root, batch.count, std::move(batch.edges)});
    return true;
  }

  // Gives the capacity back.
  void Undo(const std::vector<Batch>& batches) {
    for (const Batch& batch : batches) {
      for (const Edge& edge : batch.edges) capacity_[edge.arc] += batch.count;
    }
  }

  void Expand(Batch* batch, const Order& order) {
    for (int32_t i = 0; i < order.hints; ++i) {
      const int32_t tail = order.hint_tail[i], head = order.hint_head[i];
      if (batch->depth[tail] < 0 || batch->depth[head] >= 0 || batch->depth[tail] >= max_depth_) continue;
      const int32_t arc = Arc(tail, head);
      if (arc >= 0 && Room(*batch, arc) >= batch->count) Take(batch, arc);
    }
    for (int32_t level = 0; batch->reached != ranks_ && level < max_depth_; ++level) {
      bool any = false;
      int32_t deepest = 0;
      for (int32_t v = 0; v < ranks_; ++v) {
        any |= batch->depth[v] == level;
        deepest = std::max(deepest, batch->depth[v]);
      }
      if (any) {
        ExpandLayer(batch, level);
      } else if (level > deepest) {
        break;
      }
    }
  }

  void ExpandLayer(Batch* batch, int32_t level) {
    for (int32_t head = 0; head < ranks_; ++head) {
      if (batch->depth[head] >= 0) continue;
      choices_.clear();
      for (int32_t arc : in_[head]) {
        if (batch->depth[tail_[arc]] == level && capacity_[arc] >= batch->count) {
          choices_.push_back({-(static_cast<double>(capacity_[arc]) * scale_[arc]), arc});
        }
      }
      if (choices_.empty()) continue;
      std::sort(choices_.begin(), choices_.end());  // arcs into one head rise with their tails: ties go to the lower
      for (const auto& [score, arc] : choices_) {
        if (Room(*batch, arc) >= batch->count) {
          Take(batch, arc);
          break;
        }
      }
    }
  }

  // How many trees of the batch may take the arc, by its capacity and the known cuts.
  Amount Room(const Batch& batch, int32_t arc) const {
    Amount room = std::min(batch.count, capacity_[arc]);
    const Words &in = inside_[head_[arc]], &out = inside_[tail_[arc]];
    for (size_t w = 0; w < in.size() && room > 0; ++w) {
      for (uint64_t crossed = in[w] & ~out[w] & batch.touched[w]; crossed != 0 && room > 0; crossed &= crossed - 1) {
        room = std::min(room, slack_[w * 64 + __builtin_ctzll(crossed)]);
      }
    }
    return std::max<Amount>(0, room);
  }

  void Take(Batch* batch, int32_t arc) {
    const int32_t tail = tail_[arc], head = head_[arc];
    capacity_[arc] -= batch->count;
    const Words &in = inside_[head], &out = inside_[tail];
    for (size_t w = 0; w < in.size(); ++w) {
      for (uint64_t crossed = in[w] & ~out[w] & batch->touched[w]; crossed != 0; crossed &= crossed - 1) {
        slack_[w * 64 + __builtin_ctzll(crossed)] -= batch->count;
      }
      batch->touched[w] |= in[w];
    }
    batch->edges.push_back({tail, head, arc});
    batch->depth[head] = batch->depth[tail] + 1;
    ++batch->reached;
  }

  // No arc carries the whole batch: splits it. `rest` has count 0 when nothing is left over.
  bool Force(Batch* batch, Batch* rest) {
    Amount best = 0;
    int32_t chosen = -1;
    int32_t deepest = *std::max_element(batch->depth.begin(), batch->depth.end());
    for (int32_t level = 0; level <= std::min(deepest, max_depth_ - 1) && 2 * best < batch->count; ++level) {
      for (int32_t tail = 0; tail < ranks_; ++tail) {
        if (batch->depth[tail] != level) continue;
        for (int32_t arc = out_[tail]; arc < out_[tail + 1]; ++arc) {
          if (capacity_[arc] <= best || batch->depth[head_[arc]] >= 0) continue;
          const Amount room = Room(*batch, arc);
          if (room > best) {
            best = room;
            chosen = arc;
          }
        }
      }
    }
    if (best == 0) return false;
    if (best < batch->count) {
      *rest = *batch;
      rest->count = batch->count - best;
    }
    batch->count = best;
    Take(batch, chosen);
    return true;
  }

  // Learns the overdrawn cuts of the present state.
  void Diagnose(const std::vector<Batch>& open) {
    std::vector<Amount> amount;
    std::vector<int32_t> start{0}, members;
    Amount total = 0;
    for (const Batch& batch : open) {
      amount.push_back(batch.count);
      total += batch.count;
      for (int32_t v = 0; v < ranks_; ++v) {
        if (batch.depth[v] >= 0) members.push_back(v);
      }
      start.push_back(static_cast<int32_t>(members.size()));
    }
    for (Amount count : pending_) total += count;
    // Towards the end most arcs are used up; leaving them out makes the search several times shorter.
    std::vector<int32_t> tails, heads;
    std::vector<Amount> left;
    for (size_t a = 0; a < capacity_.size(); ++a) {
      if (capacity_[a] == 0) continue;
      tails.push_back(tail_[a]);
      heads.push_back(head_[a]);
      left.push_back(capacity_[a]);
    }
    Network network(ranks_, static_cast<int32_t>(left.size()), tails.data(), heads.data());
    network.Build(left.data(), pending_.data(), static_cast<int32_t>(open.size()), amount.data(), start.data(),
                  members.data());
    ++checks_;
    const std::vector<Shortage> found = FindCuts(&network, {}, Targets(), total, kMaxCuts);
    fresh_.clear();
    for (const Shortage& shortage : found) {
      first_.push_back(shortage.target);
      for (uint8_t bit : {1, 2}) {
        Words cut(words(), 0);
        for (int32_t v = 0; v < ranks_; ++v) {
          if (shortage.side[v] & bit) Put(&cut, v);
        }
        if (AddCut(cut)) fresh_.push_back(cut);
      }
    }
  }

  // All ranks, those that fell short before first.
  std::vector<int32_t> Targets() const {
    std::vector<int32_t> order;
    std::vector<char> seen(ranks_, 0);
    for (auto it = first_.rbegin(); it != first_.rend(); ++it) {
      if (!seen[*it]) order.push_back(*it);
      seen[*it] = 1;
    }
    for (int32_t v = 0; v < ranks_; ++v) {
      if (!seen[v]) order.push_back(v);
    }
    return order;
  }

  // Undoes trees until none of the fresh cuts is overdrawn. False when one is even then: the orders don't fit.
  bool RollBack(const std::vector<Order>& orders) {
    ++rollbacks_;
    size_t keep = grown_.size();
    for (const Words& cut : fresh_) keep = std::min(keep, LastGood(cut));
    while (grown_.size() > keep) {
      ++regrown_;
      for (const Tree& tree : grown_.back()) Refund(tree);
      grown_.pop_back();
      pending_[orders[grown_.size()].root] += orders[grown_.size()].count;
    }
    Index(fresh_.size());
    return *std::min_element(slack_.end() - fresh_.size(), slack_.end()) >= 0;
  }

  // How many of the grown orders can stay for this cut not to be overdrawn.
  size_t LastGood(const Words& cut) const {
    Amount slack = Slack(cut);
    size_t keep = grown_.size();
    while (slack < 0 && keep > 0) {
      --keep;
      for (const Tree& tree : grown_[keep]) {
        int64_t entries = Has(cut, tree.root) ? 0 : -1;
        for (const Edge& edge : tree.edges) entries += Crosses(cut, edge.arc);
        slack += tree.count * entries;
      }
    }
    return keep;
  }

  int32_t Arc(int32_t tail, int32_t head) const {
    const auto first = head_.begin() + out_[tail], last = head_.begin() + out_[tail + 1];
    const auto it = std::lower_bound(first, last, head);
    return it != last && *it == head ? static_cast<int32_t>(it - head_.begin()) : -1;
  }

  int32_t ranks_, max_depth_;
  std::vector<int32_t> tail_, head_;
  std::vector<Amount> capacity_;
  std::vector<double> scale_;
  std::vector<int32_t> out_;  // arcs of tail v: out_[v] .. out_[v + 1]
  std::vector<std::vector<int32_t>> in_;
  std::vector<Amount> pending_;
  std::vector<Words> cuts_;
  std::set<Words> known_;
  std::vector<Words> inside_;  // per rank: the known cuts that hold it
  std::vector<Amount> slack_;
  std::vector<Words> fresh_;
  std::vector<int32_t> first_;
  std::vector<std::vector<Tree>> grown_;
  std::vector<std::pair<double, int32_t>> choices_;
  int64_t checks_ = 0, rollbacks_ = 0, regrown_ = 0;
};

bool Sorted(int32_t ranks, int32_t arcs, const int32_t* tail, const int32_t* head) {
  for (int32_t a = 0; a < arcs; ++a) {
    if (tail[a] < 0 || tail[a] >= ranks || head[a] < 0 || head[a] >= ranks || tail[a] == head[a]) return false;
    if (a > 0 && (tail[a] < tail[a - 1] || (tail[a] == tail[a - 1] && head[a] <= head[a - 1]))) return false;
  }
  return true;
}

}  // namespace

struct jc_pack {
  Packer packer;
};

extern "C" {

jc_pack* jc_pack_new(int32_t ranks, int32_t arcs, const int32_t* tail, const int32_t* head, const int64_t* capacity,
                     int32_t ncuts, const uint8_t* cuts, int32_t max_depth) {
  if (ranks < 1 || arcs < 0 || ncuts < 0 || !Sorted(ranks, arcs, tail, head)) return nullptr;
  try {
    auto* pack = new jc_pack{Packer(ranks, arcs, tail, head, capacity, max_depth)};
    const int32_t bytes = (ranks + 7) / 8;
    for (int32_t c = 0; c < ncuts; ++c) {
      Words cut(pack->packer.words(), 0);
      for (int32_t v = 0; v < ranks; ++v) {
        if (cuts[static_cast<int64_t>(c) * bytes + v / 8] >> (v % 8) & 1) Put(&cut, v);
      }
      pack->packer.AddCut(cut);
    }
    return pack;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void jc_pack_free(jc_pack* pack) { delete pack; }

int32_t jc_pack_run(jc_pack* pack, int32_t orders, const int32_t* root, const int64_t* count, const int32_t* hint_start,
                    const int32_t* hint_tail, const int32_t* hint_head, jc_pack_tick tick) {
  const int32_t ranks = pack->packer.ranks();
  std::vector<Order> list;
  try {
    for (int32_t i = 0; i < orders; ++i) {
      if (root[i] < 0 || root[i] >= ranks || count[i] < 1 || hint_start[i + 1] < hint_start[i]) return JC_PACK_BAD;
      for (int32_t h = hint_start[i]; h < hint_start[i + 1]; ++h) {
        if (hint_tail[h] < 0 || hint_tail[h] >= ranks || hint_head[h] < 0 || hint_head[h] >= ranks) return JC_PACK_BAD;
      }
      list.push_back({root[i], count[i], hint_tail + hint_start[i], hint_head + hint_start[i],
                      hint_start[i + 1] - hint_start[i]});
    }
    return pack->packer.Run(list, tick);
  } catch (const std::bad_alloc&) {
    return JC_PACK_BAD;
  }
}

void jc_pack_stats(const jc_pack* pack, int64_t stats[6]) {
  const Packer& packer = pack->packer;
  stats[0] = 0;
  for (const auto& trees : packer.grown()) stats[0] += static_cast<int64_t>(trees.size());
  stats[1] = static_cast<int64_t>(packer.cuts().size());
  stats[2] = packer.checks();
  stats[3] = packer.rollbacks();
  stats[4] = packer.regrown();
  stats[5] = static_cast<int64_t>(packer.grown().size());
}

void jc_pack_take(const jc_pack* pack, int32_t* root, int64_t* count, int32_t* tail, int32_t* head, uint8_t* cuts) {
  const Packer& packer = pack->packer;
  for (const auto& trees : packer.grown()) {
    for (const Tree& tree : trees) {
      *root++ = tree.root;
      *count++ = tree.count;
      for (const Edge& edge : tree.edges) {
        *tail++ = edge.tail;
        *head++ = edge.head;
      }
    }
  }
  const int32_t bytes = (packer.ranks() + 7) / 8;
  std::fill(cuts, cuts + static_cast<int64_t>(packer.cuts().size()) * bytes, uint8_t{0});
  for (const Words& cut : packer.cuts()) {
    for (int32_t v = 0; v < packer.ranks(); ++v) {
      if (Has(cut, v)) cuts[v / 8] |= static_cast<uint8_t>(1u << (v % 8));
    }
    cuts += bytes;
  }
}

}  // extern "C"
