#include "paths.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <new>
#include <vector>

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
// A gain below one part in 10^12 is rounding noise, and would let cycles of no weight improve for ever.
constexpr double kNoise = 1e-12;

// The arcs of one class (into switches, or into ranks) by tail, and the tails that changed since they were last looked
// at: no other can improve anything.
struct Class {
  std::vector<int32_t> first, arcs, changed;
  std::vector<char> marked;

  void Build(int32_t nodes, const std::vector<int32_t>& tail, const std::vector<char>& mine) {
    first.assign(nodes + 1, 0);
    marked.assign(nodes, 0);
    for (size_t a = 0; a < tail.size(); ++a) first[tail[a] + 1] += mine[a];
    for (int32_t v = 0; v < nodes; ++v) first[v + 1] += first[v];
    arcs.resize(first[nodes]);
    std::vector<int32_t> next(first.begin(), first.end() - 1);
    for (size_t a = 0; a < tail.size(); ++a) {
      if (mine[a]) arcs[next[tail[a]]++] = static_cast<int32_t>(a);
    }
  }

  void Mark(int32_t node) {
    if (marked[node] || first[node] == first[node + 1]) return;
    marked[node] = 1;
    changed.push_back(node);
  }

  void Forget() {
    for (int32_t node : changed) marked[node] = 0;
    changed.clear();
  }
};

// A node's distance improved: by which arc, and after which event at the arc's tail (-1: none, it is the source).
struct Event {
  int32_t arc, before;
};

struct Cost {
  const double *weight, *scale, *noise;
  double operator()(int32_t arc) const { return noise ? weight[arc] + scale[arc] * noise[arc] : weight[arc]; }
};

struct Grown {
  std::vector<Event> events;
  std::vector<int32_t> last;  // per node: its last event, or -1
  std::vector<double> dist;
};

}  // namespace

struct jc_paths {
  int32_t ranks, nodes;
  std::vector<int32_t> tail, head;
  Class switches, targets;
  // Per head, within one sweep: the best arc so far, its cost and the event at its tail.
  std::vector<double> found;
  std::vector<Event> by;
  std::vector<int32_t> heads;

  void Changed(int32_t node) {
    switches.Mark(node);
    targets.Mark(node);
  }

  // One sweep over the arcs of `mine`, all of which see the distances from before it. Nothing at `bound` or beyond is
  // of use. False when nothing improved.
  bool Relax(Class* mine, const Cost& cost, double bound, Grown* tree) {
    heads.clear();
    for (int32_t v : mine->changed) {
      const double here = tree->dist[v];
      if (here >= bound) continue;
      for (int32_t i = mine->first[v]; i < mine->first[v + 1]; ++i) {
        const int32_t a = mine->arcs[i], w = head[a];
        const double there = here + cost(a);
        if (by[w].arc < 0) {
          if (!(there < tree->dist[w] * (1 - kNoise)) || there >= bound) continue;
          heads.push_back(w);
        } else if (there > found[w] || (there == found[w] && a > by[w].arc)) {
          continue;
        }
        found[w] = there;
        by[w] = {a, tree->last[v]};
      }
    }
    mine->Forget();
    for (int32_t w : heads) {
      tree->dist[w] = found[w];
      tree->last[w] = static_cast<int32_t>(tree->events.size());
      tree->events.push_back(by[w]);
      by[w].arc = -1;
      Changed(w);
    }
    return !heads.empty();
  }

  void Grow(int32_t source, int32_t steps, const Cost& cost, const int32_t* want, const int32_t* want_end,
            Grown* tree) {
    tree->last.assign(nodes, -1);
    tree->dist.assign(nodes, kInfinite);
    tree->dist[source] = 0;
    Changed(source);
    auto bound = [&] {
      if (want == nullptr) return kInfinite;
      double most = 0;
      for (const int32_t* node = want; node < want_end; ++node) most = std::max(most, tree->dist[*node]);
      return most;
    };
    for (int32_t step = 0; step < steps; ++step) {
      while (Relax(&switches, cost, bound(), tree)) {
      }
      if (!Relax(&targets, cost, bound(), tree)) break;
    }
    switches.Forget();
    targets.Forget();
  }
};

struct jc_paths_trees {
  int32_t ranks, nodes;
  std::vector<int32_t> source;
  std::vector<Grown> trees;
  int32_t arcs;
  std::vector<int64_t> start, arc;
  std::vector<double> units;

  void Loads() {
    start.assign(1, 0);
    arc.clear();
    units.clear();
    std::vector<double> load(arcs, 0.0), left;
    std::vector<int32_t> used;
    for (size_t i = 0; i < trees.size(); ++i) {
      const Grown& tree = trees[i];
      left.assign(tree.events.size(), 0.0);
      for (int32_t v = 0; v < ranks; ++v) {
        if (v != source[i] && tree.last[v] >= 0) left[tree.last[v]] = 1;
      }
      used.clear();
      for (size_t e = tree.events.size(); e-- > 0;) {
        if (left[e] == 0) continue;
        const Event& event = tree.events[e];
        if (load[event.arc] == 0) used.push_back(event.arc);
        load[event.arc] += left[e];
        if (event.before >= 0) left[event.before] += left[e];
      }
      std::sort(used.begin(), used.end());
      for (int32_t a : used) {
        arc.push_back(a);
        units.push_back(load[a]);
        load[a] = 0;
      }
      start.push_back(static_cast<int64_t>(arc.size()));
    }
  }
};

namespace {

bool InRange(int64_t count, const int32_t* values, int32_t limit) {
  return std::all_of(values, values + count, [=](int32_t value) { return value >= 0 && value < limit; });
}

}  // namespace

extern "C" {

jc_paths* jc_paths_new(int32_t ranks, int32_t nodes, int32_t arcs, const int32_t* tail, const int32_t* head) {
  if (ranks < 1 || nodes < ranks || arcs < 0 || !InRange(arcs, tail, nodes) || !InRange(arcs, head, nodes))
    return nullptr;
  try {
    auto* paths = new jc_paths{ranks, nodes, {tail, tail + arcs}, {head, head + arcs}, {}, {}, {}, {}, {}};
    std::vector<char> to_switch(arcs), to_rank(arcs);
    for (int32_t a = 0; a < arcs; ++a) {
      to_switch[a] = head[a] >= ranks;
      to_rank[a] = head[a] < ranks;
    }
    paths->switches.Build(nodes, paths->tail, to_switch);
    paths->targets.Build(nodes, paths->tail, to_rank);
    paths->found.assign(nodes, 0);
    paths->by.assign(nodes, {-1, -1});
    return paths;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void jc_paths_free(jc_paths* paths) { delete paths; }

jc_paths_trees* jc_paths_grow(jc_paths* paths, int32_t steps, const double* weight, int32_t count,
                              const int32_t* source, const double* scale, const double* noise, const int64_t* offset,
                              const int64_t* want_start, const int32_t* want) {
  if (count < 0 || !InRange(count, source, paths->ranks)) return nullptr;
  if (want != nullptr && !InRange(want_start[count], want, paths->nodes)) return nullptr;
  try {
    const auto arcs = static_cast<int32_t>(paths->head.size());
    auto* grown = new jc_paths_trees{paths->ranks, paths->nodes, {source, source + count}, {}, arcs, {}, {}, {}};
    try {
      grown->trees.resize(count);
      for (int32_t i = 0; i < count; ++i) {
        const Cost cost{weight, scale, offset == nullptr ? nullptr : noise + offset[i]};
        const int32_t* first = want == nullptr ? nullptr : want + want_start[i];
        const int32_t* end = want == nullptr ? nullptr : want + want_start[i + 1];
        paths->Grow(source[i], steps, cost, first, end, &grown->trees[i]);
      }
    } catch (const std::bad_alloc&) {
      delete grown;
      return nullptr;
    }
    return grown;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void jc_paths_trees_free(jc_paths_trees* trees) { delete trees; }

void jc_paths_dist(const jc_paths_trees* trees, double* dist) {
  for (const Grown& tree : trees->trees) dist = std::copy(tree.dist.begin(), tree.dist.end(), dist);
}

int64_t jc_paths_loads(jc_paths_trees* trees) {
  try {
    trees->Loads();
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return static_cast<int64_t>(trees->arc.size());
}

void jc_paths_loads_take(const jc_paths_trees* trees, int64_t* start, int64_t* arc, double* units) {
  std::copy(trees->start.begin(), trees->start.end(), start);
  std::copy(trees->arc.begin(), trees->arc.end(), arc);
  std::copy(trees->units.begin(), trees->units.end(), units);
}

int32_t jc_paths_longest(const jc_paths_trees* trees, int64_t count, const int64_t* tree, const int64_t* dest) {
  int32_t longest = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (tree[i] < 0 || tree[i] >= static_cast<int64_t>(trees->trees.size()) || dest[i] < 0 || dest[i] >= trees->nodes)
      return -1;
    const Grown& grown = trees->trees[tree[i]];
    int32_t hops = 0;
    for (int32_t e = grown.last[dest[i]]; e >= 0; e = grown.events[e].before) ++hops;
    longest = std::max(longest, hops);
  }
  return longest;
}

void jc_paths_take(const jc_paths_trees* trees, int64_t count, const int64_t* tree, const int64_t* dest, int32_t width,
                   int32_t* path) {
  for (int64_t i = 0; i < count; ++i, path += width) {
    const Grown& grown = trees->trees[tree[i]];
    int32_t hops = 0;
    for (int32_t e = grown.last[dest[i]]; e >= 0; e = grown.events[e].before) ++hops;
    for (int32_t e = grown.last[dest[i]]; e >= 0; e = grown.events[e].before) path[--hops] = grown.events[e].arc;
  }
}

}  // extern "C"
