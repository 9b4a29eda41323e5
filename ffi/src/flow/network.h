// The residual network behind flow.cc and packer.h; not part of any interface.
#ifndef JAXCOLL_FLOW_NETWORK_H_
#define JAXCOLL_FLOW_NETWORK_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "flow.h"

namespace jaxcoll::flow {

// Dinic's algorithm on a residual graph that is kept from one target to the next. Going from target t to t', the flow
// that t absorbed is sent on from t to the new sinks. If that fails, the cut found separates the super source from t'
// just the same: a set that holds t but not the super source has at least the absorbed amount of residual capacity out
// of it (the flow that entered), so the failing cut has both on its side and the current flow crosses it nowhere.

using Amount = int64_t;
constexpr Amount kInfinite = JC_FLOW_INFINITE;

class Network {
 public:
  Network(int32_t nodes, int32_t arcs, const int32_t* tail, const int32_t* head)
      : nodes_(nodes), arcs_(arcs), tail_(tail, tail + arcs), head_(head, head + arcs) {}

  int32_t nodes() const { return nodes_; }
  int32_t source() const { return nodes_; }
  int32_t sink() const { return nodes_ + 1; }

  // Builds the residual graph. Arc layout: arcs, source arcs (one per node), sink arcs (one per node), group arcs.
  void Build(const Amount* capacity, const Amount* demand, int32_t groups, const Amount* group_amount,
             const int32_t* group_start, const int32_t* group_nodes) {
    const int32_t members = groups > 0 ? group_start[groups] : 0;
    total_nodes_ = nodes_ + 2 + groups;
    pairs_ = arcs_ + 2 * nodes_ + groups + members;
    from_.resize(pairs_);
    to_.resize(pairs_);
    initial_.resize(pairs_);
    int32_t next = 0;
    auto add = [&](int32_t from, int32_t to, Amount amount) {
      from_[next] = from;
      to_[next] = to;
      initial_[next++] = amount;
    };
    for (int32_t i = 0; i < arcs_; ++i) add(tail_[i], head_[i], capacity[i]);
    for (int32_t v = 0; v < nodes_; ++v) add(source(), v, demand[v]);
    for (int32_t v = 0; v < nodes_; ++v) add(v, sink(), 0);
    for (int32_t g = 0; g < groups; ++g) {
      add(source(), nodes_ + 2 + g, group_amount[g]);
      for (int32_t i = group_start[g]; i < group_start[g + 1]; ++i) add(nodes_ + 2 + g, group_nodes[i], kInfinite);
    }
    Link();
  }

  void OpenSource(int32_t node) { initial_[arcs_ + node] = kInfinite; }
  void OpenSink(int32_t node) { initial_[arcs_ + nodes_ + node] = kInfinite; }
  void CloseSink(int32_t node) { initial_[arcs_ + nodes_ + node] = 0; }

  // Forgets all flow.
  void Reset() {
    for (int32_t i = 0; i < pairs_; ++i) {
      residual_[slot_[2 * i]] = initial_[i];
      residual_[slot_[2 * i + 1]] = 0;
    }
  }

  // Takes the flow that `node` sends into the sink back to `node`, closes it as a sink, and says how much it was.
  Amount TakeBack(int32_t node) {
    const int32_t pair = arcs_ + nodes_ + node;
    const Amount flow = residual_[slot_[2 * pair + 1]];
    residual_[slot_[2 * pair]] = 0;
    residual_[slot_[2 * pair + 1]] = 0;
    CloseSink(node);
    return flow;
  }

  void OpenSinkNow(int32_t node) {
    OpenSink(node);
    residual_[slot_[2 * (arcs_ + nodes_ + node)]] = kInfinite;
  }

  // Sends at most `limit` from `start` into the sink; says how much arrived.
  Amount Send(int32_t start, Amount limit) {
    Amount sent = 0;
    while (sent < limit && Levels(start)) {
      std::copy(first_.begin(), first_.begin() + total_nodes_, current_.begin());
      while (sent < limit) {
        const Amount pushed = Push(start, limit - sent);
        if (pushed == 0) break;
        sent += pushed;
      }
    }
    return sent;
  }

  // Marks the two extreme minimum cuts of a finished flow from `starts`.
  void Sides(const std::vector<int32_t>& starts, uint8_t* side) {
    std::vector<char> near_sink(total_nodes_, 0), near_source(total_nodes_, 0);
    Flood({sink()}, /*backwards=*/true, &near_sink);
    Flood(starts, /*backwards=*/false, &near_source);
    for (int32_t v = 0; v < nodes_; ++v)
      side[v] = static_cast<uint8_t>((near_sink[v] ? 1 : 0) | (near_source[v] ? 0 : 2));
  }

 private:
  // Lays arcs out by tail: slot_[2i] is pair i's forward half, slot_[2i+1] its backward half.
  void Link() {
    first_.assign(total_nodes_ + 1, 0);
    for (int32_t i = 0; i < pairs_; ++i) {
      ++first_[from_[i] + 1];
      ++first_[to_[i] + 1];
    }
    for (int32_t v = 0; v < total_nodes_; ++v) first_[v + 1] += first_[v];
    current_.assign(first_.begin(), first_.end());
    const int32_t halves = 2 * pairs_;
    slot_.resize(halves);
    end_.resize(halves);
    mate_.resize(halves);
    residual_.resize(halves);
    for (int32_t i = 0; i < pairs_; ++i) {
      const int32_t forward = current_[from_[i]]++;
      const int32_t backward = current_[to_[i]]++;
      slot_[2 * i] = forward;
      slot_[2 * i + 1] = backward;
      end_[forward] = to_[i];
      end_[backward] = from_[i];
      mate_[forward] = backward;
      mate_[backward] = forward;
    }
    level_.assign(total_nodes_, -1);
    queue_.resize(total_nodes_);
    path_.resize(total_nodes_ + 1);
  }

  // Distances from `start`, stopping at the sink's layer; false when the sink is out of reach.
  bool Levels(int32_t start) {
    std::fill(level_.begin(), level_.end(), -1);
    int32_t head = 0, tail = 0;
    queue_[tail++] = start;
    level_[start] = 0;
    while (head < tail) {
      const int32_t v = queue_[head++];
      if (level_[sink()] >= 0 && level_[v] + 1 >= level_[sink()]) break;
      for (int32_t a = first_[v]; a < first_[v + 1]; ++a) {
        const int32_t w = end_[a];
        if (residual_[a] > 0 && level_[w] < 0) {
          level_[w] = level_[v] + 1;
          queue_[tail++] = w;
        }
      }
    }
    return level_[sink()] >= 0;
  }

  // One path along the levels, found without recursion (paths can be as long as the network).
  Amount Push(int32_t start, Amount limit) {
    int32_t depth = 0, v = start;
    for (;;) {
      if (v == sink()) return Augment(depth, limit);
      bool advanced = false;
      for (int32_t& a = current_[v]; a < first_[v + 1]; ++a) {
        const int32_t w = end_[a];
        if (residual_[a] > 0 && level_[w] == level_[v] + 1) {
          path_[depth++] = a;
          v = w;
          advanced = true;
          break;
        }
      }
      if (advanced) continue;
      if (depth == 0) return 0;
      const int32_t back = path_[--depth];
      v = end_[mate_[back]];
      ++current_[v];
    }
  }

  Amount Augment(int32_t depth, Amount limit) {
    Amount amount = limit;
    for (int32_t i = 0; i < depth; ++i) amount = std::min(amount, residual_[path_[i]]);
    for (int32_t i = 0; i < depth; ++i) {
      residual_[path_[i]] -= amount;
      residual_[mate_[path_[i]]] += amount;
    }
    return amount;
  }

  void Flood(const std::vector<int32_t>& starts, bool backwards, std::vector<char>* seen) {
    int32_t head = 0, tail = 0;
    for (int32_t v : starts) {
      if (!(*seen)[v]) {
        (*seen)[v] = 1;
        queue_[tail++] = v;
      }
    }
    while (head < tail) {
      const int32_t v = queue_[head++];
      for (int32_t a = first_[v]; a < first_[v + 1]; ++a) {
        const int32_t half = backwards ? mate_[a] : a;
        if (residual_[half] > 0 && !(*seen)[end_[a]]) {
          (*seen)[end_[a]] = 1;
          queue_[tail++] = end_[a];
        }
      }
    }
  }

  int32_t nodes_, arcs_, total_nodes_ = 0, pairs_ = 0;
  std::vector<int32_t> tail_, head_, from_, to_, first_, current_, slot_, end_, mate_, level_, queue_, path_;
  std::vector<Amount> initial_, residual_;
};

// A set of targets that can't receive `limit`, as found by FindCuts.
struct Shortage {
  Amount value;
  int32_t target;
  std::vector<uint8_t> side;  // per node, as in jc_flow_cuts
};

// What jc_flow_cuts answers, on a network that is built and has its extra sources open. `fixed` are the extra sinks.
inline std::vector<Shortage> FindCuts(Network* net, const std::vector<int32_t>& fixed,
                                      const std::vector<int32_t>& targets, Amount limit, int32_t max_cuts) {
  std::vector<char> always(net->nodes(), 0);
  for (int32_t node : fixed) {
    net->OpenSink(node);
    always[node] = 1;
  }
  std::vector<Shortage> found;
  int32_t previous = -1;  // the target whose full flow the network holds; -1: it holds none
  const size_t rounds = targets.empty() ? 1 : targets.size();
  for (size_t i = 0; i < rounds && static_cast<int32_t>(found.size()) < max_cuts; ++i) {
    const int32_t t = targets.empty() ? -1 : targets[i];
    std::vector<int32_t> starts{net->source()};
    Amount reached;
    if (previous >= 0) {
      const Amount absorbed = always[previous] ? 0 : net->TakeBack(previous);
      net->OpenSinkNow(t);
      reached = limit - absorbed + net->Send(previous, absorbed);
      starts.push_back(previous);
    } else {
      if (t >= 0) net->OpenSink(t);
      net->Reset();
      reached = net->Send(net->source(), limit);
    }
    if (reached >= limit) {
      previous = t;
      continue;
    }
    found.push_back({reached, t, std::vector<uint8_t>(net->nodes())});
    net->Sides(starts, found.back().side.data());
    if (t >= 0 && !always[t]) net->CloseSink(t);
    previous = -1;
  }
  return found;
}

}  // namespace jaxcoll::flow

#endif  // JAXCOLL_FLOW_NETWORK_H_
