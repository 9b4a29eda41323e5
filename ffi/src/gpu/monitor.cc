#include "gpu/monitor.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/clock.h"

namespace jaxcoll {
namespace gpu {
namespace {

constexpr auto kBusyPause = std::chrono::microseconds(500);
constexpr auto kIdlePause = std::chrono::milliseconds(100);
constexpr int64_t kPollErrorsEvery = int64_t{50} * 1000 * 1000;
constexpr double kNsPerMs = 1e6;

bool Carries(const Program& program, const Edge& edge) {
  for (uint32_t k = edge.first_ref; k < edge.first_ref + edge.ref_count; ++k)
    if (program.chunks[program.refs[k]].weight > 0) return true;
  return false;
}

}  // namespace

Monitor::Monitor(std::shared_ptr<const Api> api, RecordBuffer* records, std::function<void(size_t)> added)
    : api_(std::move(api)), records_(records), added_(std::move(added)), thread_([this] { Loop(); }) {}

Monitor::~Monitor() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    stopping_ = true;
  }
  cv_.notify_all();
  thread_.join();
}

void Monitor::Add(Team* team) {
  std::lock_guard<std::mutex> lock(mu_);
  teams_.push_back(team);
}

void Monitor::Remove(Team* team) {
  std::lock_guard<std::mutex> round(round_mu_);
  std::lock_guard<std::mutex> lock(mu_);
  teams_.erase(std::remove(teams_.begin(), teams_.end(), team), teams_.end());
  aborted_.erase(std::remove(aborted_.begin(), aborted_.end(), team), aborted_.end());
  for (auto it = under_way_.begin(); it != under_way_.end();) {
    if (it->team != team) {
      ++it;
      continue;
    }
    for (Event e : it->events->events)
      (void)api_->cudaEventDestroy(e);  // legal while it is pending; reuse would not be
    it = under_way_.erase(it);
  }
}

void Monitor::Track(InFlight execution) {
  std::lock_guard<std::mutex> lock(mu_);
  ++execution.team->under_way;
  bool first = under_way_.empty();
  under_way_.push_back(std::move(execution));
  if (first) cv_.notify_all();
}

void Monitor::Wake() {
  std::lock_guard<std::mutex> lock(mu_);
  woken_ = true;
  cv_.notify_all();
}

void Monitor::Loop() {
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mu_);
      if (under_way_.empty())
        cv_.wait_for(lock, kIdlePause, [&] { return stopping_ || woken_ || !under_way_.empty(); });
      else
        cv_.wait_for(lock, kBusyPause, [&] { return stopping_ || woken_; });
      woken_ = false;
      if (stopping_) return;
    }
    std::lock_guard<std::mutex> round(round_mu_);
    TakeDevice();
    int64_t now = NowNs();
    CheckExecutions(now);
    CheckTeams(now);
  }
}

void Monitor::TakeDevice() {
  if (has_device_) return;
  Team* team = nullptr;
  {
    std::lock_guard<std::mutex> lock(mu_);
    auto it = std::find_if(teams_.begin(), teams_.end(), [](Team* t) { return !t->failed(); });
    if (it != teams_.end()) team = *it;
  }
  if (team == nullptr) return;
  Status status = api_->Cuda(api_->cudaSetDevice(team->device()), "cudaSetDevice");
  has_device_ = status.ok();
  if (!status.ok())
    team->Fail(Format("device %d of %s: %s", team->device(), team->name().c_str(), status.message().c_str()));
}

void Monitor::CheckExecutions(int64_t now) {
  std::list<InFlight> mine;
  {
    std::lock_guard<std::mutex> lock(mu_);
    mine.swap(under_way_);
  }
  std::list<InFlight> left;
  while (!mine.empty()) {
    InFlight& e = mine.front();
    Status status;
    bool over = e.team->failed() ? false : Over(&e, now, &status);
    if (!status.ok()) e.team->Fail(status.message());
    if (over && status.ok()) {
      if (e.record) AddRecords(e);
      e.team->ReturnEvents(e.rank, std::move(e.events));
      --e.team->under_way;
      mine.pop_front();
    } else {
      left.splice(left.end(), mine,
                  mine.begin());  // of a failed team: kept until Remove(), its events are never used again
    }
  }
  std::lock_guard<std::mutex> lock(mu_);
  left.splice(left.end(), under_way_);
  under_way_.swap(left);
}

bool Monitor::Over(InFlight* e, int64_t now, Status* status) {
  int code = api_->cudaEventQuery(e->at(InFlight::kOver));
  if (code == 0) return true;
  if (code != kCudaNotReady) {
    *status = Status::Error(Format("rank %d of %s: the device has failed: %s", e->rank, e->team->name().c_str(),
                                   api_->Cuda(code, "cudaEventQuery").message().c_str()));
    return false;
  }
  // The clock starts when the stream has come to the execution: what is queued before it is not ours.
  if (e->begun_ns == 0) {
    if (api_->cudaEventQuery(e->at(InFlight::kBegin)) == 0) e->begun_ns = now;
  } else if (now - e->begun_ns > e->team->options().timeout_ns) {
    *status = TimedOut(*e);
  }
  return false;
}

std::string Monitor::Place(const InFlight& e) const {
  const Program& program = *e.plan->plan->program;
  for (uint32_t wave = 0; wave < e.plan->steps.size() + e.lanes; ++wave)
    for (uint32_t lane = 0; lane < e.lanes && lane <= wave; ++lane) {
      if (wave - lane >= e.plan->steps.size()) continue;
      for (const LaunchCall& c : e.plan->steps[wave - lane].calls)
        if (api_->cudaEventQuery(e.at(e.mark(lane, c.mark))) != 0)
          return Format("step %d, %s, lane %u", c.call.step, CallName(c.call).c_str(), lane);
      for (const Flow& f : e.plan->steps[wave - lane].flows) {
        if (api_->cudaEventQuery(e.at(e.mark(lane, f.mark))) == 0) continue;
        const Edge& edge = program.edges[f.edge];
        int from = f.send ? e.rank : f.peer, to = f.send ? f.peer : e.rank;
        return Format("step %d, edge %d->%d of graph %u, lane %u", edge.step, from, to, edge.graph, lane);
      }
    }
  return "its last copies";
}

std::string Monitor::PlaceOf(const Team* team, int rank) {
  std::lock_guard<std::mutex> lock(mu_);
  for (const InFlight& e : under_way_)
    if (e.team == team && (rank < 0 || e.rank == rank))
      return Format("%s (call %u, launch %lld) of rank %d waits at %s", KindName(e.plan->plan->program->kind),
                    static_cast<unsigned>(e.key.site & 0xffffffffu), static_cast<long long>(e.key.launch), e.rank,
                    Place(e).c_str());
  return "";
}

Status Monitor::TimedOut(const InFlight& e) const {
  const Program& program = *e.plan->plan->program;
  return Status::Error(Format(
      "%s (call %u, launch %lld) of rank %d in %s has not ended within %.1f s (JAXCOLL_TIMEOUT): it waits at %s",
      KindName(program.kind), static_cast<unsigned>(e.key.site & 0xffffffffu), static_cast<long long>(e.key.launch),
      e.rank, e.team->name().c_str(), static_cast<double>(e.team->options().timeout_ns) * 1e-9, Place(e).c_str()));
}

void Monitor::CheckTeams(int64_t now) {
  bool poll = now - polled_ns_ >= kPollErrorsEvery;
  if (poll) polled_ns_ = now;
  std::vector<Team*> teams;
  {
    std::lock_guard<std::mutex> lock(mu_);
    teams = teams_;
  }
  for (Team* team : teams) {
    auto fail = [&](const std::string& why) {
      std::string place = PlaceOf(team, -1);
      team->Fail(place.empty() ? why : Format("%s; %s", why.c_str(), place.c_str()));
    };
    if (poll && !team->failed())
      if (Status s = team->PollAsyncErrors(); !s.ok()) fail(s.message());
    if (team->under_way > 0 && !team->failed())
      if (std::string gone = team->lost(); !gone.empty()) fail(gone);
    if (!team->failed() || std::find(aborted_.begin(), aborted_.end(), team) != aborted_.end()) continue;
    team->AbortAll();
    std::lock_guard<std::mutex> lock(mu_);
    aborted_.push_back(team);
  }
}

void Monitor::AddRecords(const InFlight& e) {
  const Program& program = *e.plan->plan->program;
  std::vector<Record> records;
  for (size_t i = 0; i < e.plan->timed.size(); ++i) {
    const TimedEdge& t = e.plan->timed[i];
    const Edge& edge = program.edges[t.edge];
    if (!Carries(program, edge)) continue;
    Record r{};
    r.comm = e.key.comm;
    r.launch = e.key.launch;
    r.site = e.key.site;
    r.index = e.key.index;
    r.version = static_cast<uint32_t>(e.plan->plan->table->version);
    r.program = program.id;
    r.graph = static_cast<uint16_t>(edge.graph);
    r.step = edge.step;
    r.src = static_cast<uint16_t>(t.send ? e.rank : t.peer);
    r.dst = static_cast<uint16_t>(t.send ? t.peer : e.rank);
    bool together = t.together || !e.team->options().pairs;  // a group's edges end together
    r.side = static_cast<uint8_t>(kUnsplit | (together ? kTogether : 0) | (t.send ? 1 : 0));
    r.bytes = e.bytes[i];
    float ms = 0, since = 0;
    bool known = api_->cudaEventElapsedTime(&since, e.at(InFlight::kBegin), e.at(e.before(0, t.mark))) == 0;
    double total = 0;
    for (uint32_t lane = 0; lane < e.lanes; ++lane) {
      known = known && api_->cudaEventElapsedTime(&ms, e.at(e.before(lane, t.mark)), e.at(e.mark(lane, t.mark))) == 0;
      total += ms;
    }
    if (!known) continue;  // a time that can't be read is left out, never guessed
    r.start_ns = static_cast<uint64_t>(e.enqueued_ns + WallOffsetNs() +
                                       static_cast<int64_t>(static_cast<double>(since) * kNsPerMs));
    r.transfer_ns = static_cast<uint64_t>(std::max(0.0, total * kNsPerMs));
    records.push_back(r);
  }
  size_t held = records_->Add(records.data(), records.size());
  if (added_) added_(held);
}

}  // namespace gpu
}  // namespace jaxcoll
