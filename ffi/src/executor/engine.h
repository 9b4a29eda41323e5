// The engine runs operations of the local ranks, edge by edge, driven by events: an operation starts, a message
// arrives, a task is done.
//
// Threads. One mutex guards all state machines; bytes are moved and reduced outside it, by whichever thread is in
// RunTasks(): the handler's own thread, a transport's service thread, a helper. Nobody ever waits for a peer inside a
// handler, except for the bounded polling of Drive(). Callbacks to the caller (Completion) run without the mutex.
#ifndef JAXCOLL_EXECUTOR_ENGINE_H_
#define JAXCOLL_EXECUTOR_ENGINE_H_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/status.h"
#include "executor/completers.h"
#include "executor/early.h"
#include "executor/execution.h"
#include "telemetry/record.h"
#include "transport/link.h"

namespace jaxcoll {

struct EngineOptions {
  int64_t timeout_ns = 300 * int64_t{1000000000};
  int64_t warn_ns = 20 * int64_t{1000000000};
  int64_t mismatch_ns = int64_t{1000000000};
  int64_t spin_ns = 200 * 1000;
  int helpers = 0;  // threads that take tasks beside the callers
  bool record = true;
  bool threads = true;                      // false: a test drives everything from one thread
  size_t lane_bytes = size_t{512} << 10;    // a chunk is cut into lanes of about this size
  size_t landing_bytes = size_t{16} << 20;  // push links: memory for what has arrived and not been reduced
  size_t early_bytes = size_t{256} << 20;   // what peers may send ahead of operations that this process has not begun
  std::function<void(const std::string&)> log;  // called without the mutex: it may block
  bool quiet = false;                           // late ranks are not logged
  // Called without the mutex: by every Tick(); when a peer says that a communicator's GPU side has failed; when a
  // process is lost.
  std::function<void()> on_tick;
  std::function<void(const OpKey& team, const std::string& why)> on_team_failed;
  std::function<void(int process, const std::string& why)> on_lost;
};

class Engine : public LinkSink {
 public:
  // `links[p]` leads to process p; links[my_process] is null. Both outlive the engine's last operation.
  Engine(EngineOptions options, int my_process, std::vector<Link*> links);
  ~Engine() override;

  // Once it has its peers. Shared memory comes first: a driver sleeps on the first one that carries data.
  void AddPollable(Pollable* p);

  // Starts an operation of a local rank. Returns true if it is over already (status tells how); else `done` will be
  // called once. With `drive` it polls and works until the operation is over or nothing has happened for spin_ns.
  bool Start(OpRequest request, bool drive, Status* status, Completion done);

  // One round of work, for tests without threads: polls, runs tasks. Returns whether anything happened.
  bool Pump();
  // Deadlines, late ranks, disagreements. Called by the watch thread; by tests without threads.
  void Tick();

  struct Finished {
    Completion done;
    Status status;
  };
  // Runs completions on threads of their own (in place where the engine has no threads).
  void Complete(std::vector<Finished> finished);

  size_t open_operations();
  // A living process that has yet to take what operations have sent it, -1: there is none.
  int Sending();
  size_t failures();  // executions that have failed here
  enum class Peer { kThere = 0, kLeft = 1, kLost = 2 };
  Peer StateOf(int process);
  RecordBuffer& records() { return records_; }
  void SetRecordSink(std::function<void()> wake, size_t threshold);
  void set_record(bool on) { record_ = on; }
  // Records one execution in `stride`, the same ones on every rank.
  void set_record_stride(uint32_t stride) { record_stride_ = stride; }
  // Stops the threads; open operations fail.
  void Stop();

  void OnMessage(Link* link, const Header& header, const void* payload) override;
  std::vector<MutableSpan> OnData(Link* link, const Header& header) override;
  void OnLanded(Link* link, const Header& header, const Timed& timed) override;
  void OnSent(Link* link, uint64_t token) override;
  void OnLinkDown(Link* link, const std::string& why) override;
  void Work() override;

 private:
  friend class Execution;
  struct FullKey {
    OpKey op;
    int rank;
    bool operator==(const FullKey& o) const { return op == o.op && rank == o.rank; }
  };
  struct Hash {
    size_t operator()(const OpKey& k) const { return OpKeyHash()(k); }
    size_t operator()(const FullKey& k) const { return (*this)(k.op) * 31 + static_cast<size_t>(k.rank); }
  };
  struct Task {
    Execution* execution;
    uint32_t lane, node;
  };

  bool PollAll();  // whatever carries data
  void RunTasks(std::unique_lock<std::mutex>& lock);
  void Dispatch(Link* link, const Header& header, const void* payload);  // under mu_
  void Drop(Link* link, const Header& header, const void* payload);      // gives back what an unwanted message holds
  void KeepEarly(Link* link, const Header& header, const void* payload);
  // The failure of an operation for whose small messages this process keeps `bytes` already: `what`.
  std::string TooFarAhead(int rank, size_t bytes, const std::string& what) const;
  // A rank that begins takes what local ranks have ready for it. False: they call something else; the operation has
  // failed.
  bool CollectLocal(Execution* e);
  std::string Disagreement(const Execution& e, int rank, uint64_t signature) const;
  // Fails every open operation that waits for this process, and every later one with it.
  void ProcessLost(int process, const std::string& why);  // under mu_
  // An operation begins after a loss: it fails unless the lost process has served it before.
  void FailIfLost(const OpKey& key, int rank);
  void Drive(const OpKey& key, int rank, const std::atomic<bool>& over);
  // Tells every living process that an operation has failed, whether or not it takes part.
  void TellAll(const OpKey& key, const std::string& why);
  // Fails the operation on every local rank, and on the peers if `tell` (whose group then says who they are).
  void FailKey(const OpKey& key, const std::string& why, const Execution* tell);
  void Retire(Execution* e);              // under mu_: the operation is over, for better or worse
  bool Recorded(const OpKey& key) const;  // whether this execution is one of those in `record_stride_`
  void FlushFinished(std::unique_lock<std::mutex>& lock);
  Execution* Find(const OpKey& key, int rank);
  void SetBusy();
  void WatchLoop();
  void HelperLoop();
  const Early* FindDisagreement(const Execution& e, int64_t now) const;
  // The parts of Tick(), under mu_.
  void NoticeLosses(int64_t now);
  void ReportLosses(std::unique_lock<std::mutex>& lock);  // to on_lost; gives the mutex up meanwhile
  void TellWaiting(int64_t now);
  void GiveVerdicts(int64_t now, std::vector<std::string>* late);  // adds what is to be logged of late ranks
  void DropStale(int64_t now);

  const EngineOptions options_;
  const int my_process_;
  const std::vector<Link*> links_;
  std::vector<Pollable*> pollables_;
  // What drivers poll, and sleep on. A second carrier's own thread goes on; it wakes them where it ends an operation.
  Pollable* driven_ = nullptr;
  int carriers_ = 0;
  std::vector<std::string> lost_;  // [process] why it is gone, empty while it lives
  bool any_lost_ = false;
  std::vector<int> unreported_;  // lost processes that on_lost hasn't heard of
  struct Closing {
    int64_t since_ns = 0;
    std::string why;
  };
  std::vector<Closing> closing_;  // [process] its link is down; what it has sent before may still lie unread elsewhere

  std::mutex mu_;
  std::unordered_map<FullKey, std::unique_ptr<Execution>, Hash> open_;
  std::unordered_map<OpKey, std::unique_ptr<Gang>, Hash> gangs_;
  EarlyMessages early_;
  std::unordered_map<OpKey, std::string, Hash> aborted_;
  std::deque<OpKey> aborted_order_;
  size_t failures_ = 0;
  std::deque<Task> tasks_;
  std::atomic<bool> has_tasks_{false};  // a hint for those who don't hold mu_
  void AddTask(Execution* e, uint32_t lane, uint32_t node) {
    tasks_.push_back({e, lane, node});
    has_tasks_.store(true, std::memory_order_relaxed);
  }
  std::vector<Finished> finished_;
  std::vector<std::unique_ptr<Execution>> graveyard_;
  uint64_t next_token_ = 1;
  struct StreamRef {
    OpKey key;
    int rank;
    uint32_t lane, node;
  };
  std::unordered_map<uint64_t, StreamRef> streams_;
  bool busy_ = false;

  std::atomic<bool> record_;
  RecordBuffer records_;
  std::atomic<uint32_t> record_stride_{1};
  std::function<void()> record_wake_;
  size_t record_threshold_ = 0;

  std::atomic<bool> stopping_{false};
  std::condition_variable helper_cv_, watch_cv_;
  Completers completers_;
  std::vector<std::thread> threads_;
};

}  // namespace jaxcoll

#endif  // JAXCOLL_EXECUTOR_ENGINE_H_
