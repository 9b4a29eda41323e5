// Cuts: their index and slack, how new ones are learnt, and what is undone for them.
#include <algorithm>

#include "packer.h"

namespace jaxcoll::flow {
namespace {

constexpr int32_t kMaxCuts = 16;

}  // namespace

bool Packer::AddCut(const Words& cut) {
  int32_t inside = 0;
  for (int32_t v = 0; v < ranks_; ++v) inside += Has(cut, v);
  if (inside == 0 || inside == ranks_ || !known_.insert(cut).second) return false;
  cuts_.push_back(cut);
  return true;
}

Amount Packer::Slack(const Words& cut) const {
  Amount slack = 0;
  for (size_t a = 0; a < capacity_.size(); ++a) {
    if (Crosses(cut, static_cast<int32_t>(a))) slack += capacity_[a];
  }
  for (int32_t v = 0; v < ranks_; ++v) {
    if (!Has(cut, v)) slack -= pending_[v];
  }
  return slack;
}

void Packer::Index(size_t count) {
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

void Packer::Refund(const Tree& tree) {
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

void Packer::Diagnose(const std::vector<Batch>& open) {
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

std::vector<int32_t> Packer::Targets() const {
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

bool Packer::RollBack(const std::vector<Order>& orders) {
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

size_t Packer::LastGood(const Words& cut) const {
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

}  // namespace jaxcoll::flow
