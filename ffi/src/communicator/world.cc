#include "communicator/world.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/clock.h"
#include "communicator/request.h"

namespace jaxcoll {
namespace {

// Of a call site: XLA has 32 launches under way on a device, and one is forgotten only when so many others have used
// the call site since it did. There may be thousands of call sites, so what each keeps counts.
constexpr size_t kLaunchesKept = 128;

}  // namespace

uint64_t GroupId(const int64_t* devices, size_t count) {
  uint64_t h = Mix64(count);
  for (size_t i = 0; i < count; ++i) h = Mix64(h ^ static_cast<uint64_t>(devices[i]));
  return h;
}

World::World(EngineOptions options, int processes, int me)
    : options_(std::move(options)),
      processes_(processes),
      me_(me),
      links_(static_cast<size_t>(processes)),
      life_lines_(static_cast<size_t>(processes)) {}

World::~World() { Stop(); }

Status World::CheckPeer(int process) const {
  if (started_) return Status::Error("the world has started: its peers are fixed");
  if (process < 0 || process >= processes_ || process == me_)
    return Status::Error(Format("process %d of %d is no peer", process, processes_));
  return {};
}

Status World::AddDevices(int process, const int64_t* devices, size_t count) {
  if (process < 0 || process >= processes_) return Status::Error(Format("process %d of %d", process, processes_));
  for (size_t i = 0; i < count; ++i)
    if (!process_of_device_.emplace(devices[i], process).second)
      return Status::Error(Format("device %lld belongs to two processes", static_cast<long long>(devices[i])));
  return {};
}

Status World::CreateShm(int fd, int places, int place) {
  if (started_ || shm_ != nullptr) return Status::Error("the shared memory segment is there already");
  return ShmTransport::Create(fd, places, place, &shm_);
}

Status World::AddShmPeer(int process, int fd, int place, int pid, bool allow_read) {
  JC_RETURN_IF_ERROR(CheckPeer(process));
  if (shm_ == nullptr) return Status::Error("create this process's shared memory segment first");
  std::unique_ptr<ShmLink> link;
  JC_RETURN_IF_ERROR(shm_->AddPeer(fd, process, place, pid, allow_read, &link));
  links_[static_cast<size_t>(process)] = link.get();
  owned_links_.push_back(std::move(link));
  return {};
}

Status World::AddTcpPeer(int process, const std::vector<int>& fds, bool carries_data) {
  JC_RETURN_IF_ERROR(CheckPeer(process));
  if (fds.empty()) return Status::Error("a tcp peer needs at least one connection");
  if (tcp_ == nullptr) JC_RETURN_IF_ERROR(TcpTransport::Create(options_.timeout_ns, &tcp_));
  std::unique_ptr<TcpLink> link;
  JC_RETURN_IF_ERROR(tcp_->AddPeer(process, fds, carries_data, &link));
  if (carries_data) links_[static_cast<size_t>(process)] = link.get();
  life_lines_[static_cast<size_t>(process)] = link.get();
  owned_links_.push_back(std::move(link));
  return {};
}

Status World::AddFakePeer(FakeNetwork* net, int process) {
  JC_RETURN_IF_ERROR(CheckPeer(process));
  links_[static_cast<size_t>(process)] = net->Connect(me_, process);
  fake_ = net;
  return {};
}

Status World::Start() {
  if (started_) return Status::Error("the world has started already");
  for (int p = 0; p < processes_; ++p)
    if (p != me_ && links_[static_cast<size_t>(p)] == nullptr) return Status::Error(Format("no link to process %d", p));
  started_ = true;
  EngineOptions options = options_;
  options.on_tick = [this] { ExpireWaiting(NowNs() - options_.timeout_ns); };
  options.on_team_failed = [this](const OpKey& key, const std::string& why) { TeamFailed(key, why); };
  options.on_lost = [this](int process, const std::string& why) { ProcessLost(process, why); };
  engine_ = std::make_unique<Engine>(std::move(options), me_, links_);
  if (shm_ != nullptr) engine_->AddPollable(shm_.get());
  if (tcp_ != nullptr) engine_->AddPollable(tcp_.get());
  if (fake_ != nullptr) fake_->Attach(me_, engine_.get());
  if (shm_ != nullptr) shm_->Run(engine_.get(), options_.threads);
  if (tcp_ != nullptr) tcp_->Run(engine_.get(), options_.threads);
  return {};
}

void World::Stop() {
  if (engine_ != nullptr) {
    engine_->Stop();
    ExpireWaiting(std::numeric_limits<int64_t>::max());  // no verdict will come
  }
  if (shm_ != nullptr) shm_->Stop();
  if (tcp_ != nullptr) tcp_->Stop();
}

void World::ExpireWaiting(int64_t since_ns) {
  std::vector<std::shared_ptr<ScheduleSet>> sets;
  {
    std::lock_guard<std::mutex> lock(mu_);
    for (const auto& [key, set] : sets_) sets.push_back(set);
  }
  for (const auto& set : sets) set->Expire(since_ns);
}

Status World::LoadProgram(const uint8_t* bytes, size_t size, int64_t* handle) {
  auto program = std::make_shared<Program>();
  JC_RETURN_IF_ERROR(Program::Parse(bytes, size, program.get()));
  auto known = [&] {
    for (size_t i = 0; i < programs_.size(); ++i)
      if (programs_[i]->id == program->id && programs_[i]->name == program->name) {
        *handle = static_cast<int64_t>(i);
        return true;
      }
    return false;
  };
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (known()) return {};
  }
  JC_RETURN_IF_ERROR(Validate(*program, Table::Identity(*program)));  // takes long for many ranks
  std::lock_guard<std::mutex> lock(mu_);
  if (known()) return {};
  programs_.push_back(std::move(program));
  *handle = static_cast<int64_t>(programs_.size() - 1);
  return {};
}

Status World::DefineSet(int64_t set_key, const int64_t* devices, size_t ranks, const std::vector<int64_t>& programs,
                        size_t chosen) {
  std::lock_guard<std::mutex> lock(mu_);
  if (programs.empty() || chosen >= programs.size() || ranks == 0)
    return Status::Error("a schedule set needs a communicator, programs and one of them chosen");
  std::vector<std::shared_ptr<const Program>> list;
  for (int64_t p : programs) {
    if (p < 0 || static_cast<size_t>(p) >= programs_.size())
      return Status::Error(Format("no program %lld", static_cast<long long>(p)));
    list.push_back(programs_[static_cast<size_t>(p)]);
    const Program &a = *list.front(), &b = *list.back();
    if (a.kind != b.kind || a.nranks != b.nranks || a.root != b.root)
      return Status::Error(
          Format("programs %s and %s don't compute the same collective", a.name.c_str(), b.name.c_str()));
  }
  if (list[0]->nranks != static_cast<int>(ranks))
    return Status::Error(
        Format("program %s is for %d ranks, the communicator has %zu", list[0]->name.c_str(), list[0]->nranks, ranks));
  Member member;
  JC_RETURN_IF_ERROR(GetMember(devices, ranks, &member));
  std::shared_ptr<ScheduleSet>& set = sets_[{member.group->id, set_key}];
  if (set == nullptr) set = std::make_shared<ScheduleSet>(std::move(list), chosen);
  return {};
}

Status World::GetMember(const int64_t* devices, size_t count, Member* out) {
  uint64_t id = GroupId(devices, count);
  auto it = members_.find(id);
  if (it == members_.end()) {
    Member m;
    auto group = std::make_shared<Group>();
    group->id = id;
    for (size_t i = 0; i < count; ++i) {
      auto p = process_of_device_.find(devices[i]);
      if (p == process_of_device_.end())
        return Status::Error(Format(
            "device %lld is unknown to jaxcoll: the program's mesh holds a device that was not there when jaxcoll "
            "looked; call jaxcoll.init() after all devices exist",
            static_cast<long long>(devices[i])));
      group->process.push_back(p->second);
      if (p->second == me_) m.local_ranks.push_back(static_cast<int>(i));
    }
    group->name = Format("the communicator of %zu devices (%lld..%lld)", count, static_cast<long long>(devices[0]),
                         static_cast<long long>(devices[count - 1]));
    m.group = std::move(group);
    it = members_.emplace(id, std::move(m)).first;
  }
  *out = it->second;
  return {};
}

std::shared_ptr<ScheduleSet> World::FindSet(uint64_t group, int64_t set_key) {
  std::lock_guard<std::mutex> lock(mu_);
  auto it = sets_.find({group, set_key});
  return it == sets_.end() ? nullptr : it->second;
}

Status World::Stage(uint64_t group, int64_t set_key, uint64_t version, int64_t program, const uint8_t* bytes,
                    size_t size) {
  std::shared_ptr<const Program> p;
  std::shared_ptr<ScheduleSet> set;
  std::vector<int> ranks;
  std::shared_ptr<gpu::Team> team;
  {
    std::lock_guard<std::mutex> lock(mu_);
    auto member = members_.find(group);
    auto it = sets_.find({group, set_key});
    if (member == members_.end() || it == sets_.end())
      return Status::Error("this process has not used that communicator's schedule set yet");
    if (program < 0 || static_cast<size_t>(program) >= programs_.size()) return Status::Error("no such program");
    p = programs_[static_cast<size_t>(program)];
    set = it->second;
    ranks = member->second.local_ranks;
    if (auto joined = teams_.find(group); joined != teams_.end()) team = joined->second;
    const Program& have = *set->programs()[0];
    if (p->kind != have.kind || p->nranks != have.nranks || p->root != have.root)
      return Status::Error(Format("program %s doesn't compute this set's collective", p->name.c_str()));
  }
  Table table = Table::Identity(*p);
  if (size > 0) JC_RETURN_IF_ERROR(Table::Parse(bytes, size, *p, &table));
  if (team != nullptr) {
    // On the control thread, while executions go on: the first execution under the table finds its pairs connected.
    JC_RETURN_IF_ERROR(Validate(*p, table));
    int made = 0;
    JC_RETURN_IF_ERROR(team->Connect(*p, table, &made));
  }
  return set->Stage(version, p, std::move(table), ranks, true);
}

uint32_t World::NextIndex(uint64_t group, int rank, uint64_t site, int64_t launch) {
  std::vector<Begun>& begun = begun_[Mix64(group ^ Mix64(site ^ Mix64(static_cast<uint64_t>(rank))))];
  auto found = std::find_if(begun.rbegin(), begun.rend(), [&](const Begun& b) { return b.launch == launch; });
  if (found != begun.rend()) {
    std::rotate(found.base() - 1, found.base(), begun.end());
  } else {
    if (begun.size() == kLaunchesKept) begun.erase(begun.begin());
    begun.push_back({launch, 0});
  }
  return begun.back().next++;
}

Status World::Prepare(const Call& call, Prepared* out) {
  // The row that holds this device is the communicator, the place in it the rank.
  const int64_t* end = call.devices + call.group_size * call.groups;
  const int64_t* at = std::find(call.devices, end, call.device);
  if (at == end)
    return Status::Error(Format("device %lld is in none of the call's groups", static_cast<long long>(call.device)));
  size_t row = static_cast<size_t>(at - call.devices) / call.group_size;
  const int64_t* group_begin = call.devices + row * call.group_size;
  auto size = static_cast<size_t>(std::find(group_begin, group_begin + call.group_size, int64_t{-1}) - group_begin);
  int rank = static_cast<int>(at - group_begin);
  out->alone = size == 1;
  if (out->alone) return {};
  OpRequest& request = out->request;
  {
    std::lock_guard<std::mutex> lock(mu_);
    Member member;
    JC_RETURN_IF_ERROR(GetMember(group_begin, size, &member));
    auto it = sets_.find({member.group->id, call.set_key});
    if (it == sets_.end())
      return Status::Error(
          "no schedule set is defined for this call: was the program compiled by another process? Trace it in "
          "this process first, and use the same jaxcoll version on every host");
    out->set = it->second;
    out->local_ranks = member.local_ranks.size();
    request.key = {member.group->id, call.site, call.launch, NextIndex(member.group->id, rank, call.site, call.launch)};
    request.group = member.group;
    if (auto team = teams_.find(member.group->id); team != teams_.end()) out->team = team->second;
  }
  const Program& first = *out->set->programs()[0];
  if (first.kind != call.kind) return Status::Error("the call's schedule set is for another collective");
  request.rank = rank;
  out->wide = KeepsWide(call.kind, call.dtype, call.reduce);
  return SetOperands(call.kind, call.reduce, call.dtype, call.counts.size(), call.inputs.data(), call.outputs.data(),
                     call.counts.data(), &request);
}

std::string World::NoVerdict(const OpRequest& request) const {
  return Format(
      "call %u of rank %d in %s: no verdict came on a proposed table (JAXCOLL_TIMEOUT is %.0f s): the "
      "process that leads the swaps is gone, or this one is leaving",
      static_cast<unsigned>(request.key.site & 0xffffffffu), request.rank, request.group->name.c_str(),
      static_cast<double>(options_.timeout_ns) * 1e-9);
}

bool World::Execute(Call call, Status* status, Completion done) {
  if (engine_ == nullptr) {
    *status = Status::Error("jaxcoll has not been started in this process");
    return true;
  }
  Prepared prepared;
  *status = Prepare(call, &prepared);
  if (!status->ok()) return true;
  if (prepared.alone) {
    for (size_t i = 0; i < call.counts.size(); ++i)
      memcpy(call.outputs[i], call.inputs[i], static_cast<size_t>(call.counts[i]) * ElementSize(call.dtype));
    return true;
  }
  auto request = std::make_shared<OpRequest>(std::move(prepared.request));
  // Alone in its process, the handler's thread does the polling for a moment; with company, whoever comes last does the
  // work.
  bool drive = prepared.local_ranks == 1 && options_.threads;
  auto later = [this, request, done](std::shared_ptr<const Plan> plan) {
    request->plan = std::move(plan);
    Status s;
    if (request->plan == nullptr) return engine_->Complete({{done, Status::Error(NoVerdict(*request))}});
    if (engine_->Start(std::move(*request), false, &s, done)) engine_->Complete({{done, s}});
  };
  std::shared_ptr<const Plan> plan =
      prepared.set->Resolve(call.site, {call.launch, request->key.index}, request->rank, prepared.wide, later);
  if (plan == nullptr) return false;
  request->plan = std::move(plan);
  return engine_->Start(std::move(*request), drive, status, std::move(done));
}

const char* World::LinkName(int process) const {
  if (process == me_) return "inproc";
  if (process < 0 || process >= processes_ || links_[static_cast<size_t>(process)] == nullptr) return "none";
  return links_[static_cast<size_t>(process)]->name();
}

}  // namespace jaxcoll
