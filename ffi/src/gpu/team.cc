#include "gpu/team.h"

#include <algorithm>
#include <thread>

#include "base/clock.h"
#include "gpu/monitor.h"

namespace jaxcoll {
namespace gpu {
namespace {

constexpr unsigned kNonBlockingStream = 1;  // cudaStreamNonBlocking: no hidden order with the legacy stream
constexpr unsigned kUntimedEvent = 2;       // cudaEventDisableTiming
constexpr size_t kPlansKept = 256;
constexpr timespec kSettlePause = {0, 50000};

Status UseDevice(const Api& api, int device, int* before) {
  JC_CUDA(api, cudaGetDevice(before));
  if (*before != device) JC_CUDA(api, cudaSetDevice(device));
  return {};
}

// For tidying up on a thread that may be XLA's or the user's: its device is the one before again at the end.
class DeviceScope {
 public:
  DeviceScope(const Api& api, int device) : api_(api), device_(device) { (void)UseDevice(api, device, &before_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  ~DeviceScope() {
    if (before_ >= 0 && before_ != device_) (void)api_.cudaSetDevice(before_);
  }

 private:
  const Api& api_;
  int device_, before_ = -1;
};

// Disjoint pairs share a round: one ncclCommSplit makes them all.
std::vector<std::vector<std::pair<int, int>>> Rounds(const std::vector<std::pair<int, int>>& pairs) {
  std::vector<std::vector<std::pair<int, int>>> rounds;
  for (auto pair : pairs) {
    auto clash = [&](std::pair<int, int> o) {
      return o.first == pair.first || o.first == pair.second || o.second == pair.first || o.second == pair.second;
    };
    auto fits = std::find_if(rounds.begin(), rounds.end(),
                             [&](const auto& r) { return std::none_of(r.begin(), r.end(), clash); });
    if (fits == rounds.end()) fits = rounds.insert(rounds.end(), std::vector<std::pair<int, int>>());
    fits->push_back(pair);
  }
  return rounds;
}

}  // namespace

Team::Team(std::shared_ptr<const Api> api, Kernels* kernels, Monitor* monitor, Options options, uint64_t id,
           std::string name, int ranks)
    : api_(std::move(api)),
      kernels_(kernels),
      monitor_(monitor),
      options_(std::move(options)),
      id_(id),
      name_(std::move(name)),
      ranks_(ranks) {}

Team::~Team() {
  if (members_.empty()) return;  // has never joined
  DeviceScope scope(*api_, device());
  monitor_->Remove(this);
  if (failed() || under_way != 0) AbortAll();  // NCCL refuses to destroy what transfers still use
  for (auto& m : members_) DestroyMember(m.get());
}

Member* Team::member(int rank) {
  for (auto& m : members_)
    if (m->rank == rank) return m.get();
  return nullptr;
}

Config Team::CommConfig(bool one_pair) const {
  Config c = MakeConfig(api_->nccl_version);
  c.blocking = 0;  // so that a peer's failure can be acted upon while a call is under way
  int ctas = options_.max_ctas > 0 ? options_.max_ctas : one_pair ? 1 : 0;
  if (ctas > 0) c.min_ctas = 1, c.max_ctas = ctas;
  return c;
}

Status Team::StillWhole() {
  if (failed()) return Status::Error(failure());
  std::string gone = lost();
  return gone.empty() ? Status() : Status::Error(std::move(gone));
}

Status Team::Settle(Comm comm, int code, const char* call) {
  int64_t deadline = NowNs() + options_.timeout_ns;
  JC_RETURN_IF_ERROR(api_->Nccl(code, call));
  while (code == kNcclInProgress) {
    nanosleep(&kSettlePause, nullptr);
    JC_RETURN_IF_ERROR(StillWhole());
    if (NowNs() > deadline)
      return Status::Error(Format("%s is not through after %.1f s (JAXCOLL_TIMEOUT): a rank of %s does not take part",
                                  call, static_cast<double>(options_.timeout_ns) * 1e-9, name_.c_str()));
    JC_NCCL(*api_, ncclCommGetAsyncError(comm, &code));
    JC_RETURN_IF_ERROR(api_->Nccl(code, call));
  }
  return {};
}

Status Team::OnAll(const std::function<Status(Member*)>& f) {
  std::vector<Status> results(members_.size());
  std::vector<std::thread> threads;
  threads.reserve(members_.size());
  for (size_t i = 0; i < members_.size(); ++i)
    threads.emplace_back([this, &f, &results, i] {
      Member* m = members_[i].get();
      int before = -1;  // of a thread that ends here: nobody wants it back
      results[i] = UseDevice(*api_, m->device, &before);
      if (results[i].ok()) results[i] = f(m);
      // At once: the other threads may wait for this rank.
      if (!results[i].ok()) Fail(Format("rank %d of %s: %s", m->rank, name_.c_str(), results[i].message().c_str()));
    });
  for (std::thread& t : threads) t.join();
  for (const Status& s : results)
    if (!s.ok()) return Status::Error(failure());
  return {};
}

Status Team::Join(const std::vector<int>& ranks, const std::vector<int>& devices, const UniqueId& id) {
  if (!members_.empty()) return Status::Error("the local ranks of " + name_ + " have joined already");
  for (size_t i = 0; i < ranks.size(); ++i) {
    members_.push_back(std::make_unique<Member>());
    members_.back()->rank = ranks[i];
    members_.back()->device = devices[i];
  }
  monitor_->Add(this);  // not before: it goes through the members
  return OnAll([&](Member* m) { return JoinOne(m, id); });
}

Status Team::JoinOne(Member* m, const UniqueId& id) {
  std::lock_guard<std::mutex> lock(m->connect_mu);
  if (failed()) return Status::Error(failure());
  JC_CUDA(*api_, cudaFree(nullptr));  // makes the device's primary context, which the driver's calls need
  JC_CUDA(*api_, cudaStreamCreateWithFlags(&m->connect_stream, kNonBlockingStream));
  Config config = CommConfig(options_.pairs);
  // The handle is there when the call returns, the communicator when it has settled.
  int code = api_->ncclCommInitRankConfig(&m->control, ranks_, id, m->rank, &config);
  JC_RETURN_IF_ERROR(Settle(m->control, code, "ncclCommInitRankConfig"));
  if (options_.pairs) return {};
  return Split(m, 0, m->rank, false, [&](Comm c) { m->data = c; });
}

std::vector<std::pair<int, int>> Team::Missing(const Program& program, const Table& table, bool* hosts) const {
  std::vector<bool> gathered(program.edges.size());
  for (const HostCall& call : FindHostCalls(program, table, options_.hosts)) {
    *hosts = !hosts_connected_;
    // What a ReduceScatter replaces goes edge by edge for types that NCCL doesn't reduce as we do.
    for (uint32_t e : call.edges) gathered[e] = !call.reduce;
  }
  std::vector<std::pair<int, int>> pairs;
  if (!options_.pairs) return pairs;
  for (size_t i = 0; i < program.edges.size(); ++i) {
    const Edge& e = program.edges[i];
    std::pair<int, int> pair(table.At(e.graph, e.step)[e.src], table.At(e.graph, e.step + 1)[e.dst]);
    if (!gathered[i] && !std::binary_search(connected_.begin(), connected_.end(), pair)) pairs.push_back(pair);
  }
  std::sort(pairs.begin(), pairs.end());
  pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
  return pairs;
}

Status Team::Connect(const Program& program, const Table& table, int* made) {
  std::lock_guard<std::mutex> lock(connecting_);
  *made = 0;
  if (failed()) return Status::Error(failure());
  bool hosts = false;
  std::vector<std::pair<int, int>> fresh = Missing(program, table, &hosts);
  if (fresh.empty() && !hosts) return {};
  auto rounds = Rounds(fresh);
  std::atomic<int> count{0};
  JC_RETURN_IF_ERROR(OnAll([&](Member* m) { return ConnectOne(m, rounds, hosts, &count); }));
  hosts_connected_ = hosts_connected_ || hosts;
  connected_.insert(connected_.end(), fresh.begin(), fresh.end());
  std::sort(connected_.begin(), connected_.end());
  *made = count;
  return {};
}

Status Team::ConnectOne(Member* m, const std::vector<std::vector<std::pair<int, int>>>& rounds, bool hosts,
                        std::atomic<int>* made) {
  std::lock_guard<std::mutex> lock(m->connect_mu);
  if (failed()) return Status::Error(failure());  // aborted before this thread had the lock
  for (const auto& round : rounds) {
    int color = kNoColor;
    for (size_t i = 0; i < round.size(); ++i)
      if (round[i].first == m->rank || round[i].second == m->rank) color = static_cast<int>(i);
    std::pair<int, int> pair = color >= 0 ? round[static_cast<size_t>(color)] : std::make_pair(-1, -1);
    bool sender = pair.first == m->rank;
    Comm comm = nullptr;
    JC_RETURN_IF_ERROR(Split(m, color, sender ? 0 : 1, true, [&](Comm c) { comm = m->pairs[pair] = c; }));
    if (comm == nullptr) continue;
    JC_RETURN_IF_ERROR(Warm(m, comm, sender));
    ++*made;
  }
  if (hosts) JC_RETURN_IF_ERROR(ConnectHost(m, made));
  return AwaitConnected(m);
}

Status Team::ConnectHost(Member* m, std::atomic<int>* made) {
  int host = options_.hosts[static_cast<size_t>(m->rank)];
  int first = static_cast<int>(std::find(options_.hosts.begin(), options_.hosts.end(), host) - options_.hosts.begin());
  int ranks = static_cast<int>(std::count(options_.hosts.begin(), options_.hosts.end(), host));
  JC_RETURN_IF_ERROR(Split(m, ranks > 1 ? first : kNoColor, m->rank, false, [&](Comm c) { m->inside = c; }));
  if (m->inside == nullptr) return {};
  ++*made;
  return WarmHost(m, ranks);
}

Status Team::Split(Member* m, int color, int key, bool one_pair, const std::function<void(Comm)>& keep) {
  Config config = CommConfig(one_pair);
  Comm comm = nullptr;
  int code = api_->ncclCommSplit(m->control, color, key, &comm, &config);
  if (comm != nullptr) {
    std::lock_guard<std::mutex> publish(m->mu);
    keep(comm);
  }
  JC_RETURN_IF_ERROR(Settle(m->control, code, "ncclCommSplit"));
  return comm == nullptr ? Status() : Settle(comm, kNcclInProgress, "ncclCommSplit");
}

// The bytes have really gone: a pair that can't carry data is found before its table comes into force.
Status Team::AwaitConnected(Member* m) {
  Event event = nullptr;
  JC_CUDA(*api_, cudaEventCreateWithFlags(&event, kUntimedEvent));
  Status status = api_->Cuda(api_->cudaEventRecord(event, m->connect_stream), "cudaEventRecord");
  int64_t deadline = NowNs() + options_.timeout_ns;
  while (status.ok()) {
    int code = api_->cudaEventQuery(event);
    if (code == 0) break;
    if (code != kCudaNotReady)
      status = api_->Cuda(code, "cudaEventQuery");
    else if (Status whole = StillWhole(); !whole.ok())
      status = std::move(whole);
    else if (NowNs() > deadline)
      status = Status::Error("the first transfers of new pairs are not through within the time-out (JAXCOLL_TIMEOUT)");
    else
      nanosleep(&kSettlePause, nullptr);
  }
  Status gone = api_->Cuda(api_->cudaEventDestroy(event), "cudaEventDestroy");
  return status.ok() ? gone : status;
}

// NCCL connects a pair at its first transfer (NCCL_RUNTIME_CONNECT): one byte now, so that no execution pays for it.
Status Team::Warm(Member* m, Comm comm, bool send) {
  void* byte = nullptr;
  JC_CUDA(*api_, cudaMallocAsync(&byte, 1, m->connect_stream));
  int code = send ? api_->ncclSend(byte, 1, kNcclBytes, 1, comm, m->connect_stream)
                  : api_->ncclRecv(byte, 1, kNcclBytes, 0, comm, m->connect_stream);
  Status status = Settle(comm, code, send ? "ncclSend" : "ncclRecv");
  Status freed = api_->Cuda(api_->cudaFreeAsync(byte, m->connect_stream), "cudaFreeAsync");
  return status.ok() ? freed : status;
}

// The collectives inside a host, as the first execution of every path would have to connect them: one byte a rank.
Status Team::WarmHost(Member* m, int ranks) {
  auto all = static_cast<size_t>(ranks);
  void* bytes = nullptr;
  JC_CUDA(*api_, cudaMallocAsync(&bytes, all + 1, m->connect_stream));
  char* one = static_cast<char*>(bytes) + all;
  int code = api_->ncclReduceScatter(bytes, one, 1, kNcclBytes, 0, m->inside, m->connect_stream);
  Status status = Settle(m->inside, code, "ncclReduceScatter");
  if (status.ok()) {
    code = api_->ncclAllGather(one, bytes, 1, kNcclBytes, m->inside, m->connect_stream);
    status = Settle(m->inside, code, "ncclAllGather");
  }
  Status freed = api_->Cuda(api_->cudaFreeAsync(bytes, m->connect_stream), "cudaFreeAsync");
  return status.ok() ? freed : status;
}

std::shared_ptr<const LaunchPlan> Team::PlanFor(const OpRequest& request) {
  const std::shared_ptr<const Plan>& plan = request.plan;
  NcclReduction how;
  std::pair<const Plan*, bool> key(plan.get(), FindNcclReduction(request.dtype, request.reduce, &how));
  std::lock_guard<std::mutex> lock(plans_mu_);
  auto it = plans_.find(key);
  if (it != plans_.end()) return it->second;
  if (plans_.size() >= kPlansKept)
    plans_.clear();  // a launch plan holds its plan, so that no address is used twice meanwhile
  std::vector<HostCall> calls = FindHostCalls(*plan->program, *plan->table, options_.hosts);
  if (!key.second)
    calls.erase(std::remove_if(calls.begin(), calls.end(), [](const HostCall& c) { return c.reduce; }), calls.end());
  return plans_[key] = MakeLaunchPlan(plan, options_.max_streams, calls);
}

void Team::ReturnEvents(int rank, std::unique_ptr<EventSet> set) {
  Member* m = member(rank);
  std::lock_guard<std::mutex> lock(m->events_mu);
  m->free_events.push_back(std::move(set));
}

void Team::Fail(const std::string& why, bool tell) {
  {
    std::lock_guard<std::mutex> lock(failure_mu_);
    if (failed()) return;
    failure_ = why;
    failed_.store(true, std::memory_order_release);
  }
  if (tell_) tell_(why, tell);
  monitor_->Wake();
}

void Team::Lose(const std::string& why) {
  {
    std::lock_guard<std::mutex> lock(failure_mu_);
    if (lost_.empty()) lost_ = why;
  }
  monitor_->Wake();
}

std::string Team::lost() {
  std::lock_guard<std::mutex> lock(failure_mu_);
  return lost_;
}

std::string Team::failure() {
  std::lock_guard<std::mutex> lock(failure_mu_);
  return failure_;
}

Status Team::FailureStatus(int rank) {
  return Status::Error(
      Format("rank %d of %s can't go on, its communicator has failed: %s. Nothing more runs on it; jaxcoll.init(), "
             "called in every process, makes a new one",
             rank, name_.c_str(), failure().c_str()));
}

Status Team::PollAsyncErrors() {
  for (auto& m : members_) {
    std::unique_lock<std::mutex> lock(m->mu, std::try_to_lock);
    if (!lock.owns_lock()) continue;  // it enqueues right now and sees errors itself
    auto poll = [&](Comm comm, const std::string& whose) -> Status {
      if (comm == nullptr) return {};
      int code = 0;
      JC_NCCL(*api_, ncclCommGetAsyncError(comm, &code));
      Status s = api_->Nccl(code, "a transfer");
      return s.ok() ? s
                    : Status::Error(
                          Format("rank %d of %s, %s: %s", m->rank, name_.c_str(), whose.c_str(), s.message().c_str()));
    };
    JC_RETURN_IF_ERROR(poll(m->data, "its data communicator"));
    JC_RETURN_IF_ERROR(poll(m->inside, "the collectives inside its host"));
    for (auto [pair, comm] : m->pairs) JC_RETURN_IF_ERROR(poll(comm, Format("edge %d->%d", pair.first, pair.second)));
  }
  return {};
}

// Aborting is the only way to end what waits on the device for a peer. Locks: no thread may be inside NCCL with the
// communicator; all waits of set-up and enqueue paths look at failed(), so that the locks come soon.
void Team::AbortAll() {
  for (auto& m : members_) {
    std::lock_guard<std::mutex> connect(m->connect_mu);
    std::lock_guard<std::mutex> lock(m->mu);
    for (auto [pair, comm] : m->pairs)
      if (comm != nullptr) (void)api_->ncclCommAbort(comm);  // whatever it says: there is nothing else to try
    m->pairs.clear();
    for (Comm* comm : {&m->inside, &m->data, &m->control}) {
      if (*comm != nullptr) (void)api_->ncclCommAbort(*comm);
      *comm = nullptr;
    }
  }
}

// Children before the control communicator that they were cut from. A time-out or a failure has aborted them already.
void Team::DestroyMember(Member* m) {
  DeviceScope scope(*api_, m->device);
  for (auto [pair, comm] : m->pairs)
    if (comm != nullptr) (void)api_->ncclCommDestroy(comm);
  for (Comm comm : {m->inside, m->data, m->control})
    if (comm != nullptr) (void)api_->ncclCommDestroy(comm);
  for (Stream s : m->streams) (void)api_->cudaStreamDestroy(s);
  if (m->connect_stream != nullptr) (void)api_->cudaStreamDestroy(m->connect_stream);
  for (auto& set : m->free_events)
    for (Event e : set->events) (void)api_->cudaEventDestroy(e);
}

}  // namespace gpu
}  // namespace jaxcoll
