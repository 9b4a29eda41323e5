// A world: this process, its peers, the links between them, the communicators and schedule sets, and the engine that
// runs operations.
#ifndef JAXCOLL_COMMUNICATOR_WORLD_H_
#define JAXCOLL_COMMUNICATOR_WORLD_H_

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "communicator/schedule_set.h"
#include "executor/engine.h"
#include "gpu/runtime.h"
#include "transport/fake.h"
#include "transport/shm.h"
#include "transport/tcp.h"

namespace jaxcoll {

// What a compiled program says of a call, with the buffers of one execution. Rows of `devices` are the groups; -1 pads
// a shorter one.
struct Call {
  Kind kind;
  Reduction reduce;
  DType dtype;
  uint64_t site;
  int64_t set_key;
  int64_t device;
  int64_t launch;
  const int64_t* devices;
  size_t group_size, groups;
  std::vector<void*> inputs, outputs;
  std::vector<int64_t> counts;  // elements a block of each leaf
};

uint64_t GroupId(const int64_t* devices, size_t count);

class World {
 public:
  World(EngineOptions options, int processes, int me);
  ~World();

  Status AddDevices(int process, const int64_t* devices, size_t count);
  Status CreateShm(int fd, int places, int place);
  Status AddShmPeer(int process, int fd, int place, int pid, bool allow_read);
  Status AddTcpPeer(int process, const std::vector<int>& fds, bool carries_data);
  Status AddFakePeer(FakeNetwork* net, int process);
  Status Start();
  void Stop();

  Status LoadProgram(const uint8_t* bytes, size_t size, int64_t* handle);
  // The schedule set of one communicator, named by its devices in the order of ranks. Defining it again changes
  // nothing.
  Status DefineSet(int64_t set_key, const int64_t* devices, size_t ranks, const std::vector<int64_t>& programs,
                   size_t chosen);

  // Starts a call's execution. True: it is over, with `status`; else `done` comes later.
  bool Execute(Call call, Status* status, Completion done);

  // GPUs. The local ranks of a communicator join its NCCL side; `ordinals` are the CUDA devices of the local ranks, in
  // the order of ranks. Every process of the communicator does so, with one unique id, and then connects its sets'
  // first tables in one order.
  Status JoinGpu(const std::shared_ptr<gpu::Runtime>& runtime, const gpu::Options& options, const int64_t* devices,
                 size_t ranks, const std::vector<int>& ordinals, const gpu::UniqueId& id);
  Status ConnectGpu(uint64_t group, int64_t set_key, int* made);
  // Whether a communicator's GPU side has failed, and why; false also where it has none.
  bool GpuFailed(uint64_t group, std::string* why);
  // Enqueues a call behind `stream`; returns when it is enqueued. It waits only for the verdict on a proposed table,
  // which is the host's.
  Status ExecuteGpu(Call call, gpu::Stream stream, const gpu::Team::Allocate& allocate);

  Status Stage(uint64_t group, int64_t set_key, uint64_t version, int64_t program, const uint8_t* table, size_t size);
  std::shared_ptr<ScheduleSet> FindSet(uint64_t group, int64_t set_key);

  const char* LinkName(int process) const;
  Engine* engine() { return engine_.get(); }

 private:
  struct Member {
    std::shared_ptr<const Group> group;
    std::vector<int> local_ranks;
  };
  // Executions of a call site that a rank has begun in one launch.
  struct Begun {
    int64_t launch;
    uint32_t next;
  };
  // A call with its place in the world.
  struct Prepared {
    OpRequest request;
    std::shared_ptr<ScheduleSet> set;
    std::shared_ptr<gpu::Team> team;  // null: no GPU has joined
    size_t local_ranks = 0;
    bool wide = false;
    bool alone = false;  // in its group: what it has is the result; nothing else is set
  };
  // The GPU side of a communicator; `generation` tells those apart that followed each other, in all processes alike.
  struct Joined {
    std::shared_ptr<gpu::Team> team;
    std::shared_ptr<const Group> group;
    int64_t generation = 0;
  };
  void TellTeamFailed(const Group& group, int64_t generation, const std::string& why);
  void TeamFailed(const OpKey& key, const std::string& why);  // another process says so
  void ProcessLost(int process, const std::string& why);
  Status Prepare(const Call& call, Prepared* out);
  std::string NoVerdict(const OpRequest& request) const;
  void ExpireWaiting(int64_t since_ns);
  // All under mu_.
  Status GetMember(const int64_t* devices, size_t count, Member* out);
  uint32_t NextIndex(uint64_t group, int rank, uint64_t site, int64_t launch);
  Status CheckPeer(int process) const;

  const EngineOptions options_;
  const int processes_, me_;
  bool started_ = false;
  std::unordered_map<int64_t, int> process_of_device_;
  std::unique_ptr<ShmTransport> shm_;
  std::unique_ptr<TcpTransport> tcp_;
  std::vector<std::unique_ptr<Link>> owned_links_;
  std::vector<Link*> links_, life_lines_;  // [process]; life lines are read whatever the engine does
  FakeNetwork* fake_ = nullptr;
  std::unique_ptr<Engine> engine_;

  std::mutex mu_;
  std::vector<std::shared_ptr<const Program>> programs_;
  std::unordered_map<uint64_t, Member> members_;
  std::map<std::pair<uint64_t, int64_t>, std::shared_ptr<ScheduleSet>> sets_;
  // By call site and rank: the launches used last, the newest at the end.
  std::unordered_map<uint64_t, std::vector<Begun>> begun_;
  std::vector<std::shared_ptr<gpu::Runtime>> runtimes_;  // outlive the teams
  std::unordered_map<uint64_t, std::shared_ptr<gpu::Team>> teams_;
  std::vector<Joined> joined_;       // all that are in use or being made
  std::map<int, std::string> gone_;  // processes that were lost, and why
  // Failures that were heard of before this process came to join, by generation.
  std::unordered_map<int64_t, std::string> failed_before_;
  std::unordered_map<int, int64_t> device_of_ordinal_;
};

}  // namespace jaxcoll

#endif  // JAXCOLL_COMMUNICATOR_WORLD_H_
