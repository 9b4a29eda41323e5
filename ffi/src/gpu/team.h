// The GPU side of a communicator: its local ranks, their NCCL communicators, streams and events, and how all of it
// fails together.
//
// Two ways to lay TEN edges on NCCL (BUILD.md, section "GPU"):
//   pairs: every directed pair of ranks has a communicator of its own, cut from a control communicator that never
//   carries data. Edges
//          progress and are timed independently, and a staged table's pairs are connected in the background.
//   groups: one communicator, one NCCL group per logical step. One launch for all edges of a step; they share its end.
#ifndef JAXCOLL_GPU_TEAM_H_
#define JAXCOLL_GPU_TEAM_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "executor/execution.h"
#include "gpu/api.h"
#include "gpu/kernels.h"
#include "gpu/launch_plan.h"
#include "telemetry/record.h"

namespace jaxcoll {
namespace gpu {

struct Options {
  bool pairs = true;
  bool record = true;
  int max_streams = 32;  // a rank
  int max_ctas = 0;      // SMs that one communicator may take; 0: 1 for pairs, NCCL's choice for groups
  // [rank] a number for its host: steps that are a collective of whole hosts run as NCCL's own. Empty: edge by edge.
  std::vector<int> hosts;
  int64_t timeout_ns = 300 * int64_t{1000000000};
};

class Team;
class Monitor;

// Events of one execution, made once and reused when the monitor has read them.
struct EventSet {
  std::vector<Event> events;
};

// One execution on its way through the GPU, as the monitor sees it.
struct InFlight {
  Team* team = nullptr;
  int rank = 0;
  OpKey key;
  std::shared_ptr<const LaunchPlan> plan;
  std::unique_ptr<EventSet> events;
  uint32_t lanes = 1;
  std::vector<uint64_t> bytes;  // [timed]
  int64_t enqueued_ns = 0, begun_ns = 0;
  bool record = false;

  // Where in the set an event lies.
  size_t per_lane() const { return plan->num_spans + plan->mark_stream.size(); }
  size_t before(uint32_t lane, uint32_t m) const { return 2 + lane * per_lane() + m; }
  size_t mark(uint32_t lane, uint32_t m) const { return before(lane, plan->num_spans) + m; }
  size_t end(uint32_t stream) const { return 2 + lanes * per_lane() + stream; }
  size_t count() const { return end(plan->num_streams); }
  static constexpr size_t kBegin = 0, kOver = 1;
  Event at(size_t i) const { return events->events[i]; }
};

// One local rank.
struct Member {
  int rank = 0, device = 0;
  std::mutex mu;                              // held while an execution is enqueued
  std::mutex connect_mu;                      // held while pairs are connected; order: connect_mu, mu
  Comm control = nullptr, data = nullptr;     // data: groups mode
  Comm inside = nullptr;                      // the ranks of this rank's host
  std::map<std::pair<int, int>, Comm> pairs;  // (sender, receiver) -> communicator; those that this rank is part of
  std::vector<Stream> streams;
  Stream connect_stream = nullptr;
  std::mutex events_mu;
  std::vector<std::unique_ptr<EventSet>> free_events;
};

class Team {
 public:
  Team(std::shared_ptr<const Api> api, Kernels* kernels, Monitor* monitor, Options options, uint64_t id,
       std::string name, int ranks);
  ~Team();

  // Makes the communicators of the local ranks, all at once. Every process of the communicator calls it, with one id.
  // Bounded by the time-out.
  Status Join(const std::vector<int>& ranks, const std::vector<int>& devices, const UniqueId& id);

  // Connects what a program needs under a table; every rank of the communicator does so, in one order. Off the data
  // path: executions under other tables go on meanwhile. Returns how many communicators were made for this process's
  // ranks.
  Status Connect(const Program& program, const Table& table, int* made);

  // Where XLA's scratch memory comes from; must live until the work enqueued on the main stream so far is over.
  using Allocate = std::function<Status(size_t bytes, void** out)>;
  // Enqueues one rank's execution behind `main` and lets `main` wait for it. Never waits for the device. Without
  // `allocate` memory comes from cudaMallocAsync.
  Status Enqueue(const OpRequest& request, std::shared_ptr<const LaunchPlan> plan, Stream main,
                 const Allocate& allocate);

  // The first failure wins; all communicators of local ranks are aborted by the monitor. `tell` hears of it, unless
  // it came from there.
  void Fail(const std::string& why, bool tell = true);
  void OnFailure(std::function<void(const std::string&, bool tell)> tell) { tell_ = std::move(tell); }
  // A process of this communicator is gone: what is under way fails, with the place where it waits, and so does what
  // comes later.
  void Lose(const std::string& why);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::string failure();
  Status FailureStatus(int rank);
  void AbortAll();           // the monitor's
  Status PollAsyncErrors();  // the monitor's
  std::string lost();        // what Lose() has said; empty: nothing

  std::shared_ptr<const LaunchPlan> PlanFor(const OpRequest& request);
  void ReturnEvents(int rank, std::unique_ptr<EventSet> set);

  const Api& api() const { return *api_; }
  const Options& options() const { return options_; }
  const std::string& name() const { return name_; }
  uint64_t id() const { return id_; }
  Member* member(int rank);
  int device() const { return members_.front()->device; }  // of one of the local ranks
  std::atomic<int> under_way{0};                           // executions enqueued and not known to be over

 private:
  friend class Enqueuer;
  Status JoinOne(Member* m, const UniqueId& id);
  // What a table needs and is not there yet; whether its calls inside hosts need their communicators.
  std::vector<std::pair<int, int>> Missing(const Program& program, const Table& table, bool* hosts) const;
  Status ConnectOne(Member* m, const std::vector<std::vector<std::pair<int, int>>>& rounds, bool hosts,
                    std::atomic<int>* made);
  Status ConnectHost(Member* m, std::atomic<int>* made);
  // A child of the control communicator, with kNoColor none; `keep` puts it where whoever aborts the rank finds it.
  Status Split(Member* m, int color, int key, bool one_pair, const std::function<void(Comm)>& keep);
  Status Warm(Member* m, Comm comm, bool send);
  Status WarmHost(Member* m, int ranks);
  Status AwaitConnected(Member* m);
  Status StillWhole();  // for waits: the failure, or whose loss ends them
  // Waits, on a set-up path, until a call that NCCL does in the background is through.
  Status Settle(Comm comm, int code, const char* call);
  Status OnAll(const std::function<Status(Member*)>& f);  // a thread for each local rank
  Config CommConfig(bool one_pair) const;
  void DestroyMember(Member* m);

  const std::shared_ptr<const Api> api_;
  Kernels* const kernels_;
  Monitor* const monitor_;
  const Options options_;
  const uint64_t id_;
  const std::string name_;
  const int ranks_;
  std::vector<std::unique_ptr<Member>> members_;
  std::vector<std::pair<int, int>> connected_;  // sorted: pairs of the whole communicator, the same list on every rank
  bool hosts_connected_ = false;
  std::mutex connecting_;  // one Connect at a time: splits come in one order on every rank

  std::atomic<bool> failed_{false};
  std::mutex failure_mu_;
  std::string failure_, lost_;
  std::function<void(const std::string&, bool)> tell_;

  std::mutex plans_mu_;
  std::map<std::pair<const Plan*, bool>, std::shared_ptr<const LaunchPlan>> plans_;  // and whether NCCL reduces
};

}  // namespace gpu
}  // namespace jaxcoll

#endif  // JAXCOLL_GPU_TEAM_H_
