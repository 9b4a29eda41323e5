// The world's GPU side: which communicators have joined NCCL, and how a call is enqueued.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <utility>

#include "communicator/world.h"

namespace jaxcoll {
namespace {

constexpr int kDeviceToDevice = 3;
constexpr size_t kFailuresKept = 256;
constexpr auto kVerdictGrace = std::chrono::seconds(5);

// Equal in all processes of a communicator, and another one each time that it is made anew.
int64_t Generation(const gpu::UniqueId& id) {
  uint64_t h = 0;
  for (size_t i = 0; i < sizeof(id.bytes); i += sizeof(h)) {
    uint64_t part = 0;
    memcpy(&part, id.bytes + i, sizeof(part));
    h = Mix64(h ^ part);
  }
  return static_cast<int64_t>(h);
}

int FirstRankIn(const Group& group, int process) {
  auto rank = std::find(group.process.begin(), group.process.end(), process);
  return rank == group.process.end() ? -1 : static_cast<int>(rank - group.process.begin());
}

std::string LostRank(int rank, const std::string& why) { return Format("rank %d is lost (%s)", rank, why.c_str()); }

}  // namespace

Status World::JoinGpu(const std::shared_ptr<gpu::Runtime>& runtime, const gpu::Options& options, const int64_t* devices,
                      size_t ranks, const std::vector<int>& ordinals, const gpu::UniqueId& id) {
  Member member;
  {
    std::lock_guard<std::mutex> lock(mu_);
    JC_RETURN_IF_ERROR(GetMember(devices, ranks, &member));
    if (member.local_ranks.size() != ordinals.size())
      return Status::Error(Format("%s has %zu ranks in this process, %zu CUDA devices were given",
                                  member.group->name.c_str(), member.local_ranks.size(), ordinals.size()));
    auto it = teams_.find(member.group->id);
    if (it != teams_.end() && !it->second->failed()) return {};
  }
  // Without the lock: this waits for the other processes.
  auto team = std::make_shared<gpu::Team>(runtime->api, &runtime->kernels, &runtime->monitor, options, member.group->id,
                                          member.group->name, static_cast<int>(ranks));
  Joined joined{team, member.group, Generation(id)};
  team->OnFailure([this, group = member.group, generation = joined.generation](const std::string& why, bool tell) {
    if (options_.log) options_.log("the GPU side of " + group->name + " has failed: " + why);
    if (tell) TellTeamFailed(*group, generation, why);
  });
  std::string failed;
  {
    std::lock_guard<std::mutex> lock(mu_);
    runtimes_.push_back(runtime);  // outlives the team
    joined_.push_back(joined);
    if (auto it = failed_before_.find(joined.generation); it != failed_before_.end()) failed = it->second;
    // Whoever is lost later, ProcessLost() tells.
    for (const auto& [process, why] : gone_)
      if (int rank = FirstRankIn(*member.group, process); rank >= 0) team->Lose(LostRank(rank, why));
  }
  if (!failed.empty()) team->Fail(failed, false);
  Status status = team->Join(member.local_ranks, ordinals, id);
  std::shared_ptr<gpu::Team> old;  // ends outside the lock
  std::lock_guard<std::mutex> lock(mu_);
  auto gone = [&](const Joined& j) {
    return j.group->id == member.group->id && (j.team == team ? !status.ok() : j.team->failed());
  };
  joined_.erase(std::remove_if(joined_.begin(), joined_.end(), gone), joined_.end());
  if (!status.ok()) return status;
  for (size_t i = 0; i < ordinals.size(); ++i) device_of_ordinal_[ordinals[i]] = devices[member.local_ranks[i]];
  old = std::exchange(teams_[member.group->id], std::move(team));
  return {};
}

void World::TellTeamFailed(const Group& group, int64_t generation, const std::string& why) {
  std::vector<int> told{me_};
  for (int p : group.process) {
    if (std::find(told.begin(), told.end(), p) != told.end()) continue;
    told.push_back(p);
    Link* link = life_lines_[static_cast<size_t>(p)] != nullptr ? life_lines_[static_cast<size_t>(p)]
                                                                : links_[static_cast<size_t>(p)];
    Header h;
    h.type = MessageType::kTeamFailed;
    h.key.comm = group.id;
    h.key.launch = generation;
    Span text{why.data(), std::min<size_t>(why.size(), kMaxReason)};
    if (link != nullptr) link->Send(h, &text, 1);
  }
}

void World::TeamFailed(const OpKey& key, const std::string& why) {
  std::shared_ptr<gpu::Team> team;
  {
    std::lock_guard<std::mutex> lock(mu_);
    for (const Joined& j : joined_)
      if (j.generation == key.launch) team = j.team;
    if (team == nullptr && failed_before_.size() < kFailuresKept) failed_before_[key.launch] = why;
  }
  if (team != nullptr) team->Fail(why, false);
}

void World::ProcessLost(int process, const std::string& why) {
  std::vector<std::pair<std::shared_ptr<gpu::Team>, int>> losers;
  {
    std::lock_guard<std::mutex> lock(mu_);
    gone_.emplace(process, why);
    for (const Joined& j : joined_)
      if (int rank = FirstRankIn(*j.group, process); rank >= 0) losers.emplace_back(j.team, rank);
  }
  for (const auto& [team, rank] : losers) team->Lose(LostRank(rank, why));
}

bool World::GpuFailed(uint64_t group, std::string* why) {
  std::lock_guard<std::mutex> lock(mu_);
  auto it = teams_.find(group);
  if (it == teams_.end() || !it->second->failed()) return false;
  *why = it->second->failure();
  return true;
}

Status World::ConnectGpu(uint64_t group, int64_t set_key, int* made) {
  std::shared_ptr<ScheduleSet> set = FindSet(group, set_key);
  std::shared_ptr<gpu::Team> team;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (auto it = teams_.find(group); it != teams_.end()) team = it->second;
  }
  if (set == nullptr || team == nullptr)
    return Status::Error("define the schedule set and join the GPU communicator first");
  auto [program, table] = set->InForce();
  return team->Connect(*program, *table, made);
}

Status World::ExecuteGpu(Call call, gpu::Stream stream, const gpu::Team::Allocate& allocate) {
  {
    // On a GPU, XLA counts the devices of the process.
    std::lock_guard<std::mutex> lock(mu_);
    auto it = device_of_ordinal_.find(static_cast<int>(call.device));
    if (it == device_of_ordinal_.end())
      return Status::Error(Format("CUDA device %lld has not joined a communicator; call jaxcoll.init()",
                                  static_cast<long long>(call.device)));
    call.device = it->second;
  }
  Prepared prepared;
  JC_RETURN_IF_ERROR(Prepare(call, &prepared));
  if (prepared.alone) {
    std::shared_ptr<gpu::Runtime> runtime;
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (!runtimes_.empty()) runtime = runtimes_.front();
    }
    if (runtime == nullptr) return Status::Error("no GPU has joined jaxcoll in this process; call jaxcoll.init()");
    for (size_t i = 0; i < call.counts.size(); ++i) {
      size_t bytes = static_cast<size_t>(call.counts[i]) * ElementSize(call.dtype);
      if (bytes == 0) continue;
      JC_CUDA(*runtime->api, cudaMemcpyAsync(call.outputs[i], call.inputs[i], bytes, kDeviceToDevice, stream));
    }
    return {};
  }
  OpRequest& request = prepared.request;
  if (request.input.block_elements == 0) return {};  // NCCL has no message of nothing
  if (prepared.team == nullptr)
    return Status::Error(Format("the GPUs of %s have not joined; call jaxcoll.init()", request.group->name.c_str()));
  // A proposed table that covers this execution: its verdict is the host's to give, and Expire() ends the wait; or the
  // deadline does, where the world has stopped meanwhile.
  struct Verdict {
    std::mutex mu;
    std::condition_variable cv;
    bool given = false;
    std::shared_ptr<const Plan> plan;
  };
  auto verdict = std::make_shared<Verdict>();
  auto give = [verdict](std::shared_ptr<const Plan> plan) {
    std::lock_guard<std::mutex> lock(verdict->mu);
    verdict->plan = std::move(plan);
    verdict->given = true;
    verdict->cv.notify_all();
  };
  request.plan = prepared.set->Resolve(call.site, {call.launch, request.key.index}, request.rank, prepared.wide, give);
  if (request.plan == nullptr) {
    std::unique_lock<std::mutex> lock(verdict->mu);
    auto limit = std::chrono::nanoseconds(options_.timeout_ns) + kVerdictGrace;
    verdict->cv.wait_for(lock, limit, [&] { return verdict->given; });
    request.plan = verdict->plan;
  }
  if (request.plan == nullptr) return Status::Error(NoVerdict(request));
  return prepared.team->Enqueue(request, prepared.team->PlanFor(request), stream, allocate);
}

}  // namespace jaxcoll
