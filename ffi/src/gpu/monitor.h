// One thread a process that looks after everything on its way through the GPUs: reads the times of finished executions
// into the record buffer, polls for failures, keeps deadlines, aborts. Nothing it does is on the path of an execution.
#ifndef JAXCOLL_GPU_MONITOR_H_
#define JAXCOLL_GPU_MONITOR_H_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "gpu/team.h"
#include "telemetry/record.h"

namespace jaxcoll {
namespace gpu {

class Monitor {
 public:
  // `drained` is called when records have been added (it must only wake somebody); may be empty.
  Monitor(std::shared_ptr<const Api> api, RecordBuffer* records, std::function<void(size_t held)> added);
  ~Monitor();

  void Add(Team* team);
  // Afterwards nothing here knows the team; its executions still under way are forgotten.
  void Remove(Team* team);
  void Track(InFlight execution);
  // Records one execution in `stride`, the same ones on every rank.
  void set_record_stride(uint32_t stride) { record_stride_ = stride; }
  bool Recorded(const OpKey& key) const { return Sampled(key.launch, key.index, record_stride_); }
  void Wake();

 private:
  void Loop();
  // The thread's device is one of ours: on device 0, its default, CUDA would make a context that nobody else needs.
  void TakeDevice();
  void CheckExecutions(int64_t now);
  void CheckTeams(int64_t now);
  bool Over(InFlight* e, int64_t now, Status* status);
  void AddRecords(const InFlight& e);
  Status TimedOut(const InFlight& e) const;
  // What an execution waits at: the first flow, in the order of enqueueing, that is not over.
  std::string Place(const InFlight& e) const;
  // The same of a team's oldest execution of `rank` (-1: of any), for messages; empty: none is under way.
  std::string PlaceOf(const Team* team, int rank);

  const std::shared_ptr<const Api> api_;
  RecordBuffer* const records_;
  const std::function<void(size_t)> added_;
  std::mutex mu_;
  std::mutex round_mu_;  // held through a round: Remove() waits for it. Order: round_mu_, mu_
  std::condition_variable cv_;
  std::vector<Team*> teams_, aborted_;
  std::list<InFlight> under_way_;
  std::atomic<uint32_t> record_stride_{1};
  bool woken_ = false, stopping_ = false;
  bool has_device_ = false;
  int64_t polled_ns_ = 0;
  std::thread thread_;
};

}  // namespace gpu
}  // namespace jaxcoll

#endif  // JAXCOLL_GPU_MONITOR_H_
