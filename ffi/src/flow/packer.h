// Packs trees into capacities: every order asks for `count` trees out of its root. Trees are grown in batches of equal
// ones; where growth gets stuck, the cuts that are overdrawn are learnt, and trees undone until all known cuts hold.
#ifndef JAXCOLL_FLOW_PACKER_H_
#define JAXCOLL_FLOW_PACKER_H_

#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "network.h"
#include "pack.h"

namespace jaxcoll::flow {

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
  Packer(int32_t ranks, int32_t arcs, const int32_t* tail, const int32_t* head, const Amount* capacity,
         int32_t max_depth);
  // Adds a cut of ranks; false when it is known or separates nothing.
  bool AddCut(const Words& cut);
  int32_t Run(const std::vector<Order>& orders, jc_pack_tick tick);
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
  Amount Slack(const Words& cut) const;
  // Makes the last `count` cuts part of the index: their bit at every rank they hold, and their slack.
  void Index(size_t count);
  // The trees are pending again: every cut gets back what they took from it, and owes them again if the root is
  // outside.
  void Refund(const Tree& tree);
  // Grows the orders that get their ideal tree at once: the old one whole, or one of shortest paths. Returns all
  // orders, those first. The others need what the easy ones leave over anyway, and would spoil their trees if they came
  // first.
  std::vector<Order> EasyFirst(const std::vector<Order>& orders);
  // True when the batch is the order's old tree, or without one, a tree of shortest paths.
  bool Ideal(const Batch& batch, const Order& order);
  // Hops from `root` over all arcs that there were at the start.
  std::vector<int32_t> Distances(int32_t root) const;
  // The trees of one order, taken from the capacities. False when stuck: nothing is taken, and cuts are learnt. With
  // `ideal`, one batch that must come out ideal; nothing is learnt when it doesn't.
  bool Grow(const Order& order, bool ideal, std::vector<Tree>* trees);
  // Gives the capacity back.
  void Undo(const std::vector<Batch>& batches);
  void Expand(Batch* batch, const Order& order);
  void ExpandLayer(Batch* batch, int32_t level);
  // How many trees of the batch may take the arc, by its capacity and the known cuts.
  Amount Room(const Batch& batch, int32_t arc) const;
  void Take(Batch* batch, int32_t arc);
  // No arc carries the whole batch: splits it. `rest` has count 0 when nothing is left over.
  bool Force(Batch* batch, Batch* rest);
  // Learns the overdrawn cuts of the present state.
  void Diagnose(const std::vector<Batch>& open);
  // All ranks, those that fell short before first.
  std::vector<int32_t> Targets() const;
  // Undoes trees until none of the fresh cuts is overdrawn. False when one is even then: the orders don't fit.
  bool RollBack(const std::vector<Order>& orders);
  // How many of the grown orders can stay for this cut not to be overdrawn.
  size_t LastGood(const Words& cut) const;
  int32_t Arc(int32_t tail, int32_t head) const;

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

}  // namespace jaxcoll::flow

#endif  // JAXCOLL_FLOW_PACKER_H_
