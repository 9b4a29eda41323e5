// The schedule set of one (communicator, collective, size class): programs, the table in force, and how a new one comes
// into force.
//
// Executions of a call site in one executable have an order that is the same on every rank: (launch, index). A commit
// names, per call site and executable, the first execution that uses the new version; before that point ranks may run
// ahead or behind as they like. One call site stands in several executables where a jitted function was compiled more
// than once (another batch size, another static argument). A commit comes in two steps:
//   Propose: the rank promises not to begin an execution at or after the points until the verdict is known (it refuses
//   if it already
//            has); executions before the points go on, so with a margin nothing pauses;
//   Decide:  the points come into force, or are forgotten.
#ifndef JAXCOLL_COMMUNICATOR_SCHEDULE_SET_H_
#define JAXCOLL_COMMUNICATOR_SCHEDULE_SET_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/status.h"
#include "program/plan.h"

namespace jaxcoll {

struct Place {
  int64_t launch = 0;
  uint32_t index = 0;
  // Launch numbers may wrap around: their difference decides.
  bool Before(const Place& o) const {
    auto d = static_cast<int64_t>(static_cast<uint64_t>(launch) - static_cast<uint64_t>(o.launch));
    return d != 0 ? d < 0 : index < o.index;
  }
  // Whether both are of one executable: each numbers its launches from a hash of its own, far from all others.
  bool Near(const Place& o) const {
    uint64_t d = static_cast<uint64_t>(launch) - static_cast<uint64_t>(o.launch);
    return std::min(d, 0 - d) < kNear;
  }
  // Four times the largest margin of a commit; telemetry/launches.py has the same number.
  static constexpr uint64_t kNear = 1 << 18;
};

// By call site: one place for each executable.
using Places = std::map<uint64_t, std::vector<Place>>;

class ScheduleSet {
 public:
  ScheduleSet(std::vector<std::shared_ptr<const Program>> programs, size_t chosen);

  // The plan for an execution of a local rank, or null: it must wait for a verdict, and `start` will be called after
  // it. Without a plan if no verdict comes (Expire).
  std::shared_ptr<const Plan> Resolve(uint64_t site, Place place, int rank, bool wide,
                                      std::function<void(std::shared_ptr<const Plan>)> start);

  // Checks a table, makes its plans for these ranks. Nothing is in force yet.
  Status Stage(uint64_t version, std::shared_ptr<const Program> program, Table table, const std::vector<int>& ranks,
               bool wide);
  // The last executions begun.
  Places Started();
  Status Propose(uint64_t version, Places points);
  // Brings the proposal into force, or drops it; starts what waited. Deciding twice is an error.
  Status Decide(uint64_t version, bool commit);
  // Ends the waiting of executions that wait for a verdict since before `since_ns`: they get no plan. The proposal
  // stands.
  void Expire(int64_t since_ns);

  uint64_t version();  // newest in force
  std::pair<std::shared_ptr<const Program>, std::shared_ptr<const Table>> InForce();
  size_t waiting();
  // For how long the last proposal and its verdict have held the lock that a beginning execution takes, nanoseconds.
  int64_t held_ns();
  const std::vector<std::shared_ptr<const Program>>& programs() const { return programs_; }

 private:
  struct Version {
    uint64_t number;
    std::shared_ptr<const Program> program;
    std::shared_ptr<const Table> table;
    std::map<std::pair<int, bool>, std::shared_ptr<const Plan>> plans;
  };
  struct Commit {
    std::shared_ptr<Version> version;
    Places points;  // what isn't named uses the version from its first execution on
  };
  struct Waiting {
    uint64_t site;
    Place place;
    int rank;
    bool wide;
    int64_t since_ns;
    std::function<void(std::shared_ptr<const Plan>)> start;
  };
  std::shared_ptr<const Plan> PlanOf(Version& v, int rank, bool wide);
  static bool Covers(const Commit& c, uint64_t site, const Place& place);
  void Begin(uint64_t site, const Place& place);
  std::shared_ptr<const Plan> Find(uint64_t site, const Place& place, int rank, bool wide);

  const std::vector<std::shared_ptr<const Program>> programs_;
  std::mutex mu_;
  std::vector<Commit> commits_;  // in force, oldest first; [0] holds the initial version
  std::optional<Commit> proposal_;
  std::map<uint64_t, std::shared_ptr<Version>> staged_;
  Places started_;
  std::vector<Waiting> waiting_;
  int64_t held_ns_ = 0;
};

}  // namespace jaxcoll

#endif  // JAXCOLL_COMMUNICATOR_SCHEDULE_SET_H_
