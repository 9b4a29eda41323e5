#include "communicator/schedule_set.h"

#include <algorithm>

#include "base/clock.h"

namespace jaxcoll {
namespace {

// Executions older than this many commits are over on every rank: a commit needs the acknowledgement of all of them.
constexpr size_t kCommitsKept = 64;

// Adds the time of its scope to `*sum`.
class Timed {
 public:
  explicit Timed(int64_t* sum) : sum_(sum), began_ns_(NowNs()) {}
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;
  ~Timed() { *sum_ += NowNs() - began_ns_; }

 private:
  int64_t* const sum_;
  const int64_t began_ns_;
};

// The place of the same executable, or null.
const Place* Of(const Places& places, uint64_t site, const Place& place) {
  auto it = places.find(site);
  if (it == places.end()) return nullptr;
  auto same = std::find_if(it->second.begin(), it->second.end(), [&](const Place& p) { return p.Near(place); });
  return same == it->second.end() ? nullptr : &*same;
}

}  // namespace

ScheduleSet::ScheduleSet(std::vector<std::shared_ptr<const Program>> programs, size_t chosen)
    : programs_(std::move(programs)) {
  auto v = std::make_shared<Version>();
  v->number = 0;
  v->program = programs_[chosen];
  v->table = std::make_shared<Table>(Table::Identity(*v->program));
  commits_.reserve(kCommitsKept + 1);
  commits_.push_back({std::move(v), {}});
}

std::shared_ptr<const Plan> ScheduleSet::PlanOf(Version& v, int rank, bool wide) {
  std::shared_ptr<const Plan>& plan = v.plans[{rank, wide}];
  if (plan == nullptr) plan = CompilePlan(v.program, v.table, rank, wide);
  return plan;
}

bool ScheduleSet::Covers(const Commit& c, uint64_t site, const Place& place) {
  const Place* point = Of(c.points, site, place);
  return point == nullptr || !place.Before(*point);
}

void ScheduleSet::Begin(uint64_t site, const Place& place) {
  std::vector<Place>& places = started_[site];
  auto same = std::find_if(places.begin(), places.end(), [&](const Place& p) { return p.Near(place); });
  if (same == places.end())
    places.push_back(place);
  else if (same->Before(place))
    *same = place;
}

std::shared_ptr<const Plan> ScheduleSet::Find(uint64_t site, const Place& place, int rank, bool wide) {
  for (size_t i = commits_.size(); i-- > 1;)
    if (Covers(commits_[i], site, place)) return PlanOf(*commits_[i].version, rank, wide);
  return PlanOf(*commits_[0].version, rank, wide);
}

std::shared_ptr<const Plan> ScheduleSet::Resolve(uint64_t site, Place place, int rank, bool wide,
                                                 std::function<void(std::shared_ptr<const Plan>)> start) {
  std::lock_guard<std::mutex> lock(mu_);
  if (proposal_ && Covers(*proposal_, site, place)) {
    waiting_.push_back({site, place, rank, wide, NowNs(), std::move(start)});
    return nullptr;
  }
  Begin(site, place);
  return Find(site, place, rank, wide);
}

Status ScheduleSet::Stage(uint64_t version, std::shared_ptr<const Program> program, Table table,
                          const std::vector<int>& ranks, bool wide) {
  JC_RETURN_IF_ERROR(Validate(*program, table));
  auto v = std::make_shared<Version>();
  v->number = version;
  v->program = std::move(program);
  table.version = version;
  v->table = std::make_shared<Table>(std::move(table));
  // Made here, on the control thread: the first execution under the table finds its plan ready.
  for (int r : ranks) {
    PlanOf(*v, r, false);
    if (wide) PlanOf(*v, r, true);
  }
  std::lock_guard<std::mutex> lock(mu_);
  if (version <= commits_.back().version->number)
    return Status::Error(Format("table version %llu is not newer than %llu, which is in force",
                                static_cast<unsigned long long>(version),
                                static_cast<unsigned long long>(commits_.back().version->number)));
  staged_[version] = std::move(v);
  return {};
}

Places ScheduleSet::Started() {
  std::lock_guard<std::mutex> lock(mu_);
  return started_;
}

Status ScheduleSet::Propose(uint64_t version, Places points) {
  std::lock_guard<std::mutex> lock(mu_);
  held_ns_ = 0;
  Timed timed(&held_ns_);
  auto it = staged_.find(version);
  if (it == staged_.end())
    return Status::Error(Format("table version %llu is not staged", static_cast<unsigned long long>(version)));
  if (proposal_) return Status::Error("another table waits for its verdict");
  for (const auto& [site, places] : started_) {
    for (const Place& last : places) {
      const Place* point = Of(points, site, last);
      if (point == nullptr || !last.Before(*point))
        return Status::Error(
            Format("call site %llx has gone past the proposed execution", static_cast<unsigned long long>(site)));
    }
  }
  proposal_.emplace(Commit{it->second, std::move(points)});
  return {};
}

Status ScheduleSet::Decide(uint64_t version, bool commit) {
  std::vector<std::pair<Waiting, std::shared_ptr<const Plan>>> go;
  // What is dropped is freed after the lock: an execution that begins would wait for it.
  std::vector<Commit> dropped;
  dropped.reserve(2);
  std::map<uint64_t, std::shared_ptr<Version>> passed;
  {
    std::lock_guard<std::mutex> lock(mu_);
    Timed timed(&held_ns_);
    if (!proposal_ || proposal_->version->number != version)
      return Status::Error(Format("table version %llu is not proposed", static_cast<unsigned long long>(version)));
    if (commit) {
      commits_.push_back(std::move(*proposal_));
      if (commits_.size() > kCommitsKept) {
        dropped.push_back(std::move(commits_.front()));
        commits_.erase(commits_.begin());
        dropped.push_back({nullptr, std::exchange(commits_.front().points, {})});
      }
      while (!staged_.empty() && staged_.begin()->first <= version) passed.insert(staged_.extract(staged_.begin()));
    } else {
      dropped.push_back(std::move(*proposal_));
    }
    proposal_.reset();
    for (Waiting& w : waiting_) {
      Begin(w.site, w.place);
      std::shared_ptr<const Plan> plan = Find(w.site, w.place, w.rank, w.wide);
      go.emplace_back(std::move(w), std::move(plan));
    }
    waiting_.clear();
  }
  for (auto& [w, plan] : go) w.start(plan);
  return {};
}

void ScheduleSet::Expire(int64_t since_ns) {
  std::vector<Waiting> over;
  {
    std::lock_guard<std::mutex> lock(mu_);
    auto late = std::stable_partition(waiting_.begin(), waiting_.end(),
                                      [&](const Waiting& w) { return w.since_ns > since_ns; });
    over.assign(std::make_move_iterator(late), std::make_move_iterator(waiting_.end()));
    waiting_.erase(late, waiting_.end());
  }
  for (Waiting& w : over) w.start(nullptr);
}

uint64_t ScheduleSet::version() {
  std::lock_guard<std::mutex> lock(mu_);
  return commits_.back().version->number;
}

std::pair<std::shared_ptr<const Program>, std::shared_ptr<const Table>> ScheduleSet::InForce() {
  std::lock_guard<std::mutex> lock(mu_);
  const Version& v = *commits_.back().version;
  return {v.program, v.table};
}

size_t ScheduleSet::waiting() {
  std::lock_guard<std::mutex> lock(mu_);
  return waiting_.size();
}

int64_t ScheduleSet::held_ns() {
  std::lock_guard<std::mutex> lock(mu_);
  return held_ns_;
}

}  // namespace jaxcoll
