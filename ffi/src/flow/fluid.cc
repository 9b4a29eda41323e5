#include "fluid.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <new>
#include <vector>

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr double kEps = 1e-9;
constexpr double kPlay = 0.25;
// Events for each edge and dependency; an execution that needs more isn't getting anywhere.
constexpr size_t kMostEvents = 1000;

struct Dep {
  size_t child, parent;
  bool live = false, starved = false, tied = false;
  double gap = 0;
};

// A dependency between two flows that send, the child starved: it takes ratio of what its parent takes.
struct Feed {
  size_t child, parent;
  double ratio;
};

// Progressive filling: all rates rise together (times weight); a full resource, a cap or a feeder stops a flow.
class Filling {
 public:
  void Begin(const double* capacity, size_t resources) {
    capacity_ = capacity;
    used_.resize(resources);
    claim_.resize(resources);
    level_.resize(resources);
    full_.resize(resources);
    first_.assign(1, 0);
    hop_.clear();
    limit_of_.clear();
    feeds.clear();
  }
  // A flow over `count` resources; those from `resources` on are no limit.
  void Add(const int64_t* path, int32_t count, int64_t base, double cap) {
    for (int32_t h = 0; h < count; ++h) {
      size_t r = static_cast<size_t>(path[h] - base);
      if (r < used_.size()) hop_.push_back(r);
    }
    first_.push_back(hop_.size());
    limit_of_.push_back(cap);
  }
  size_t flows() const { return limit_of_.size(); }

  // Leaves the rates in `x`. False: a flow that nothing limits.
  bool Run(const std::vector<double>& share) {
    weight_ = share;
    Couple();
    cap_ = limit_of_;
    x.assign(flows(), 0.0);
    rising_.assign(flows(), 1);
    std::fill(full_.begin(), full_.end(), kInfinite);
    for (size_t left = flows(); left > 0;) {
      double lowest = Lowest();
      if (std::isinf(lowest)) return false;
      for (size_t r = 0; r < level_.size(); ++r)
        if (level_[r] <= lowest * (1 + kEps)) full_[r] = std::min(full_[r], level_[r]);
      for (size_t f = 0; f < flows(); ++f) {
        if (!rising_[f] || limit_[f] > lowest * (1 + kEps)) continue;
        x[f] = weight_[f] * lowest;
        rising_[f] = 0;
        --left;
      }
      left -= FreezeFed();
    }
    return true;
  }

  // What its resources would give flow f: the share at which a full one stopped, else what it has and the spare. After
  // Spare().
  double Offered(size_t f) const {
    double least = kInfinite;
    for (size_t h = first_[f]; h < first_[f + 1]; ++h) {
      size_t r = hop_[h];
      least = std::min(least, std::isinf(full_[r]) ? x[f] + level_[r] : full_[r]);
    }
    return std::max(least, 1e-300);
  }
  void Spare() {
    std::fill(used_.begin(), used_.end(), 0.0);
    for (size_t f = 0; f < flows(); ++f)
      for (size_t h = first_[f]; h < first_[f + 1]; ++h) used_[hop_[h]] += x[f];
    for (size_t r = 0; r < used_.size(); ++r) level_[r] = std::max(capacity_[r] - used_[r], 0.0);
  }

  std::vector<Feed> feeds;
  std::vector<double> x;

 private:
  // A starved flow that carries less than its feeder moves slower in proportion, down the chain.
  void Couple() {
    bool less = false;
    for (const Feed& feed : feeds) less = less || feed.ratio < 1 - 1e-12;
    for (size_t round = 0; less && round < flows(); ++round) {
      less = false;
      for (const Feed& feed : feeds) {
        double most = feed.ratio * weight_[feed.parent];
        if (most >= weight_[feed.child]) continue;
        weight_[feed.child] = most;
        less = true;
      }
    }
  }

  // The level at which the next of the rising flows must stop.
  double Lowest() {
    std::fill(used_.begin(), used_.end(), 0.0);
    std::fill(claim_.begin(), claim_.end(), 0.0);
    for (size_t f = 0; f < flows(); ++f) {
      std::vector<double>& sum = rising_[f] ? claim_ : used_;
      double more = rising_[f] ? weight_[f] : x[f];
      for (size_t h = first_[f]; h < first_[f + 1]; ++h) sum[hop_[h]] += more;
    }
    for (size_t r = 0; r < used_.size(); ++r)
      level_[r] = claim_[r] > 0 ? std::max(capacity_[r] - used_[r], 0.0) / claim_[r] : kInfinite;
    limit_.resize(flows());
    double lowest = kInfinite;
    for (size_t f = 0; f < flows(); ++f) {
      if (!rising_[f]) continue;
      double limit = cap_[f] / weight_[f];
      for (size_t h = first_[f]; h < first_[f + 1]; ++h) limit = std::min(limit, level_[hop_[h]]);
      limit_[f] = limit;
      lowest = std::min(lowest, limit);
    }
    return lowest;
  }

  // Flows starved by a feeder that has just stopped stop with it, down the chain. Returns how many.
  size_t FreezeFed() {
    size_t frozen = 0;
    for (bool again = true; again;) {
      again = false;
      for (const Feed& feed : feeds) {
        if (!rising_[feed.child] || rising_[feed.parent]) continue;
        cap_[feed.child] = std::min(cap_[feed.child], feed.ratio * x[feed.parent]);
      }
      stopping_.clear();
      for (const Feed& feed : feeds) {
        if (!rising_[feed.child] || rising_[feed.parent]) continue;
        double own = cap_[feed.child] / weight_[feed.child];
        if (own <= x[feed.parent] / weight_[feed.parent] * (1 + kEps)) stopping_.push_back(feed.child);
      }
      for (size_t f : stopping_) {
        if (!rising_[f]) continue;
        x[f] = cap_[f];
        rising_[f] = 0;
        ++frozen;
        again = true;
      }
    }
    return frozen;
  }

  const double* capacity_ = nullptr;
  std::vector<size_t> first_, hop_;  // the resources of flow f: hop_[first_[f]] to hop_[first_[f + 1]]
  std::vector<double> limit_of_, cap_, weight_, limit_;
  std::vector<double> used_, claim_, level_, full_;  // [resource]
  std::vector<char> rising_;
  std::vector<size_t> stopping_;
};

// One execution, from event to event.
class Job {
 public:
  Job(const jc_fluid& in, int32_t j)
      : in_(in),
        edge0_(in.edge_start[j]),
        edges_(static_cast<size_t>(in.edge_start[j + 1] - edge0_)),
        stranger0_(in.stranger_start[j]),
        strangers_(static_cast<size_t>(in.stranger_start[j + 1] - stranger0_)),
        resource0_(in.resource_start[j]),
        resources_(static_cast<size_t>(in.resource_start[j + 1] - resource0_)),
        lag_(in.lag[j]),
        size_(in.size + edge0_),
        alpha_(in.alpha + edge0_),
        gate_(in.gate + edge0_),
        ready_(in.ready + edge0_),
        start_(in.start + edge0_),
        end_(in.end + edge0_),
        busy_(in.busy + edge0_) {
    for (int64_t d = in.dep_start[j]; d < in.dep_start[j + 1]; ++d) {
      deps_.emplace_back();
      deps_.back().child = static_cast<size_t>(in.child[d] - edge0_);
      deps_.back().parent = static_cast<size_t>(in.parent[d] - edge0_);
    }
    NumberConnections();
  }

  // False: an edge can never start, or never end.
  bool Run() {
    frac_.assign(edges_, 0.0);
    speed_.assign(edges_, 0.0);
    rate_.assign(edges_, 0.0);
    offered_.assign(edges_, 1.0);
    done_.assign(edges_, 0);
    blocked_.assign(edges_, 0);
    for (const Dep& d : deps_) blocked_[d.child] = 1;
    for (size_t e = 0; e < edges_; ++e) {
      end_[e] = busy_[e] = 0;
      start_[e] = blocked_[e] ? kInfinite : gate_[e] + alpha_[e];
    }
    left_ = edges_;
    Release();
    size_t most = kMostEvents * (edges_ + deps_.size() + 1);
    for (size_t events = 0; left_ > 0; ++events)
      if (events == most || !Event()) return false;
    return true;
  }

 private:
  void NumberConnections() {
    std::vector<int64_t> names(in_.connection + edge0_, in_.connection + edge0_ + edges_);
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    for (size_t e = 0; e < edges_; ++e) {
      int64_t name = in_.connection[static_cast<size_t>(edge0_) + e];
      connection_.push_back(static_cast<size_t>(std::lower_bound(names.begin(), names.end(), name) - names.begin()));
    }
    senders_.resize(names.size());
    first_.resize(names.size());
    most_.resize(names.size());
    taken_.resize(names.size());
  }

  // Starts what has its first lanes and finishes what carries nothing, until nothing changes.
  void Release() {
    for (bool again = true; again;) {
      again = false;
      for (size_t e = 0; e < edges_; ++e) {
        if (done_[e] || blocked_[e] || size_[e] > 0 || start_[e] > now_ + kEps * (1 + now_)) continue;
        end_[e] = now_;
        frac_[e] = 1.0;
        done_[e] = 1;
        --left_;
        again = true;
      }
      still_.assign(edges_, 0);
      for (const Dep& d : deps_)
        if (!done_[d.parent] && frac_[d.parent] < lag_ * (1 - 1e-7)) still_[d.child] = 1;
      for (size_t e = 0; e < edges_; ++e) {
        if (!blocked_[e] || still_[e]) continue;
        ready_[e] = std::max(ready_[e], now_);
        start_[e] = std::max(gate_[e], now_) + alpha_[e];
        blocked_[e] = 0;
        again = true;
      }
    }
  }

  bool Event() {
    active_.assign(edges_, 0);
    for (size_t e = 0; e < edges_; ++e)
      active_[e] = !done_[e] && !blocked_[e] && start_[e] <= now_ * (1 + kEps) + 1e-15;
    for (Dep& d : deps_) {
      d.live = !done_[d.parent] && active_[d.child];
      d.starved = false;
      if (!d.live) continue;
      d.gap = frac_[d.parent] - lag_ - frac_[d.child];
      // A starved edge stays so until it has fallen behind by a part of a lane: its share of a connection depends on
      // whether it is starved, and without this play it would change sides at every instant.
      d.starved = d.tied = d.gap <= kEps || (d.tied && d.gap <= kPlay * lag_);
    }
    Queue();
    if (!Rates()) return false;
    double step = Next();
    if (!std::isfinite(step)) return false;
    for (size_t e = 0; e < edges_; ++e) {
      if (!sending_[e] || !(rate_[e] > 0)) continue;
      frac_[e] += speed_[e] * step;
      if (in_.timed) busy_[e] += step * rate_[e] / offered_[e];
      if (frac_[e] < 1 - 1e-9) continue;
      frac_[e] = 1.0;
      end_[e] = now_ + step;
      done_[e] = 1;
      --left_;
    }
    now_ += step;
    Release();
    return true;
  }

  // The active edges that send: a connection serves its edges in the order in which they became ready. A starved edge
  // is served as it comes, since its lanes are ready one by one. What hangs on a waiting edge waits.
  void Queue() {
    hungry_.assign(edges_, 0);
    for (const Dep& d : deps_)
      if (d.starved) hungry_[d.child] = 1;
    std::fill(first_.begin(), first_.end(), kInfinite);
    for (size_t e = 0; e < edges_; ++e)
      if (active_[e] && !hungry_[e]) first_[connection_[e]] = std::min(first_[connection_[e]], ready_[e]);
    sending_ = active_;
    for (size_t e = 0; e < edges_; ++e)
      if (active_[e] && !hungry_[e] && ready_[e] > first_[connection_[e]] * (1 + kEps) + 1e-12) sending_[e] = 0;
    for (bool again = true; again;) {
      again = false;
      for (const Dep& d : deps_) {
        if (!d.starved || !sending_[d.child] || sending_[d.parent]) continue;
        sending_[d.child] = 0;
        again = true;
      }
    }
  }

  // Max-min rates of the edges that send (0 elsewhere), and the rate that each one's links would offer it.
  bool Rates() {
    Gather();
    bool shared = false;
    for (const Feed& feed : fill_.feeds) shared = shared || share_[feed.child] < 1;
    if (!fill_.Run(share_)) return false;
    // What a starved edge leaves of its connection's share goes to the other edges of that connection.
    for (int round = 0; shared && round < 3; ++round) {
      Lend();
      if (!fill_.Run(share_)) return false;
    }
    if (in_.timed) fill_.Spare();
    std::fill(rate_.begin(), rate_.end(), 0.0);
    for (size_t f = 0; f < edge_of_.size(); ++f) {
      rate_[edge_of_[f]] = fill_.x[f];
      if (in_.timed) offered_[edge_of_[f]] = fill_.Offered(f);
    }
    for (size_t e = 0; e < edges_; ++e) speed_[e] = rate_[e] / std::max(size_[e], 1e-300);
    return true;
  }

  // Edges that send, then strangers, into the filling; edges of one connection have equal shares of it.
  void Gather() {
    fill_.Begin(in_.capacity + resource0_, resources_);
    edge_of_.clear();
    flow_of_.assign(edges_, 0);
    std::fill(senders_.begin(), senders_.end(), 0);
    const size_t hops = static_cast<size_t>(in_.hops);
    for (size_t e = 0; e < edges_; ++e) {
      if (!sending_[e]) continue;
      flow_of_[e] = edge_of_.size();
      edge_of_.push_back(e);
      ++senders_[connection_[e]];
      fill_.Add(in_.path + (static_cast<size_t>(edge0_) + e) * hops, in_.hops, resource0_, kInfinite);
    }
    share_.clear();
    for (size_t e : edge_of_) share_.push_back(1.0 / static_cast<double>(senders_[connection_[e]]));
    const size_t all = static_cast<size_t>(in_.edge_start[in_.jobs]) + static_cast<size_t>(stranger0_);
    for (size_t s = 0; s < strangers_; ++s) {
      size_t at = static_cast<size_t>(stranger0_) + s;
      fill_.Add(in_.path + (all + s) * hops, in_.hops, resource0_, in_.stranger_cap[at]);
      share_.push_back(in_.stranger_weight[at]);
    }
    for (const Dep& d : deps_)
      if (d.starved && sending_[d.child] && sending_[d.parent])
        fill_.feeds.push_back({flow_of_[d.child], flow_of_[d.parent], size_[d.child] / size_[d.parent]});
  }

  // Shares by connection once more: starved edges claim what they use, the others split the rest.
  void Lend() {
    fed_.assign(edge_of_.size(), 0);
    for (const Feed& feed : fill_.feeds) fed_[feed.child] = 1;
    std::fill(most_.begin(), most_.end(), 0.0);
    std::fill(taken_.begin(), taken_.end(), 0.0);
    std::fill(senders_.begin(), senders_.end(), 0);
    for (size_t f = 0; f < edge_of_.size(); ++f)
      if (!fed_[f]) most_[Line(f)] = std::max(most_[Line(f)], fill_.x[f] / share_[f]);
    for (size_t f = 0; f < edge_of_.size(); ++f) {
      if (!fed_[f]) {
        ++senders_[Line(f)];
        continue;
      }
      double level = most_[Line(f)], used = level > 0 ? std::min(fill_.x[f] / level, share_[f]) : 0.0;
      taken_[Line(f)] += used > 0 ? used : share_[f];  // a connection with starved edges alone stays as it is
    }
    for (size_t f = 0; f < edge_of_.size(); ++f)
      if (!fed_[f]) share_[f] = std::max((1.0 - taken_[Line(f)]) / static_cast<double>(senders_[Line(f)]), share_[f]);
  }
  size_t Line(size_t flow) const { return connection_[edge_of_[flow]]; }

  // Seconds until the next event; infinite: there will be none.
  double Next() const {
    double step = kInfinite;
    for (size_t e = 0; e < edges_; ++e) {
      if (active_[e] && speed_[e] > 0) step = std::min(step, (1 - frac_[e]) / speed_[e]);
      if (!done_[e] && !blocked_[e] && !active_[e]) step = std::min(step, start_[e] - now_);
    }
    for (const Dep& d : deps_) {
      if (d.live && !d.starved) {
        double closing = speed_[d.child] - speed_[d.parent];
        if (closing > 1e-12 * std::max(speed_[d.child], 1e-300)) step = std::min(step, d.gap / closing);
      }
      if (!blocked_[d.child] || done_[d.parent] || !(speed_[d.parent] > 0)) continue;
      double wanted = lag_ - frac_[d.parent];
      if (wanted > 0) step = std::min(step, wanted / speed_[d.parent]);
    }
    return step;
  }

  const jc_fluid& in_;
  const int64_t edge0_;
  const size_t edges_;
  const int64_t stranger0_;
  const size_t strangers_;
  const int64_t resource0_;
  const size_t resources_;
  const double lag_;
  const double *size_, *alpha_, *gate_;
  double *ready_, *start_, *end_, *busy_;
  std::vector<Dep> deps_;
  std::vector<size_t> connection_;  // [edge], numbered from 0
  double now_ = 0;
  size_t left_ = 0;
  std::vector<double> frac_, speed_, rate_, offered_;
  std::vector<char> done_, blocked_, still_, active_, sending_, hungry_;
  Filling fill_;
  std::vector<size_t> edge_of_, flow_of_;  // flow to edge and back
  std::vector<double> share_;              // [flow]
  std::vector<char> fed_;
  std::vector<size_t> senders_;               // [connection]
  std::vector<double> first_, most_, taken_;  // [connection]
};

bool Rising(const int64_t* start, int32_t count) {
  if (start[0] != 0) return false;
  for (int32_t j = 0; j < count; ++j)
    if (start[j + 1] < start[j]) return false;
  return true;
}

bool Within(const int64_t* values, int64_t begin, int64_t end, int64_t least, int64_t below) {
  for (int64_t i = begin; i < end; ++i)
    if (values[i] < least || values[i] >= below) return false;
  return true;
}

// The resources of flows [begin, end): of this job, or no limit.
bool PathsWithin(const jc_fluid& in, int32_t j, int64_t begin, int64_t end) {
  for (int64_t i = begin * in.hops; i < end * in.hops; ++i) {
    int64_t r = in.path[i];
    bool own = r >= in.resource_start[j] && r < in.resource_start[j + 1];
    if (!own && r < in.resource_start[in.jobs]) return false;
  }
  return true;
}

bool Valid(const jc_fluid& in) {
  if (in.jobs < 0 || in.hops < 1) return false;
  for (const int64_t* start : {in.edge_start, in.dep_start, in.stranger_start, in.resource_start})
    if (!Rising(start, in.jobs)) return false;
  const int64_t all = in.edge_start[in.jobs];
  for (int32_t j = 0; j < in.jobs; ++j) {
    int64_t begin = in.edge_start[j], end = in.edge_start[j + 1];
    for (const int64_t* ends : {in.child, in.parent})
      if (!Within(ends, in.dep_start[j], in.dep_start[j + 1], begin, end)) return false;
    if (!PathsWithin(in, j, begin, end)) return false;
    if (!PathsWithin(in, j, all + in.stranger_start[j], all + in.stranger_start[j + 1])) return false;
  }
  return true;
}

}  // namespace

extern "C" int32_t jc_fluid_run(const jc_fluid* jobs) {
  if (jobs == nullptr || !Valid(*jobs)) return -1;
  try {
    for (int32_t j = 0; j < jobs->jobs; ++j)
      if (!Job(*jobs, j).Run()) return 1;
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
