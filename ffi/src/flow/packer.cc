// Growing: which tree takes which arc.
#include "packer.h"

#include <algorithm>
#include <utility>

namespace jaxcoll::flow {
namespace {

constexpr int32_t kTickEvery = 4;

}  // namespace

Packer::Packer(int32_t ranks, int32_t arcs, const int32_t* tail, const int32_t* head, const Amount* capacity,
               int32_t max_depth)
    : ranks_(ranks),
      max_depth_(max_depth < 0 ? ranks : max_depth),
      tail_(tail, tail + arcs),
      head_(head, head + arcs),
      capacity_(capacity, capacity + arcs),
      scale_(arcs),
      out_(ranks + 1, 0),
      in_(ranks),
      pending_(ranks, 0) {
  for (int32_t a = 0; a < arcs; ++a) {
    ++out_[tail_[a] + 1];
    in_[head_[a]].push_back(a);  // rising tails, since arcs are sorted
    scale_[a] = 1.0 / static_cast<double>(std::max<Amount>(capacity_[a], 1));
  }
  for (int32_t v = 0; v < ranks; ++v) out_[v + 1] += out_[v];
}

int32_t Packer::Run(const std::vector<Order>& orders, jc_pack_tick tick) {
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

std::vector<Order> Packer::EasyFirst(const std::vector<Order>& orders) {
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

bool Packer::Ideal(const Batch& batch, const Order& order) {
  if (batch.reached != ranks_) return false;
  if (order.hints > 0) {
    for (int32_t i = 0; i < order.hints; ++i) {
      if (batch.edges[i].tail != order.hint_tail[i] || batch.edges[i].head != order.hint_head[i]) return false;
    }
    return order.hints == ranks_ - 1;
  }
  return batch.depth == Distances(order.root);
}

std::vector<int32_t> Packer::Distances(int32_t root) const {
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

bool Packer::Grow(const Order& order, bool ideal, std::vector<Tree>* trees) {
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

void Packer::Undo(const std::vector<Batch>& batches) {
  for (const Batch& batch : batches) {
    for (const Edge& edge : batch.edges) capacity_[edge.arc] += batch.count;
  }
}

void Packer::Expand(Batch* batch, const Order& order) {
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

void Packer::ExpandLayer(Batch* batch, int32_t level) {
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

Amount Packer::Room(const Batch& batch, int32_t arc) const {
  Amount room = std::min(batch.count, capacity_[arc]);
  const Words &in = inside_[head_[arc]], &out = inside_[tail_[arc]];
  for (size_t w = 0; w < in.size() && room > 0; ++w) {
    for (uint64_t crossed = in[w] & ~out[w] & batch.touched[w]; crossed != 0 && room > 0; crossed &= crossed - 1) {
      room = std::min(room, slack_[w * 64 + __builtin_ctzll(crossed)]);
    }
  }
  return std::max<Amount>(0, room);
}

void Packer::Take(Batch* batch, int32_t arc) {
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

bool Packer::Force(Batch* batch, Batch* rest) {
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

int32_t Packer::Arc(int32_t tail, int32_t head) const {
  const auto first = head_.begin() + out_[tail], last = head_.begin() + out_[tail + 1];
  const auto it = std::lower_bound(first, last, head);
  return it != last && *it == head ? static_cast<int32_t>(it - head_.begin()) : -1;
}

}  // namespace jaxcoll::flow
