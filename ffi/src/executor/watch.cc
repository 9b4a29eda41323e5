// What goes wrong with operations, and who is told: deadlines, late ranks, ranks that disagree, processes that are
// lost.
#include <algorithm>
#include <utility>

#include "executor/engine.h"

namespace jaxcoll {
namespace {

constexpr auto kTick = std::chrono::milliseconds(50);
// A link has gone down, but what its process said before may still lie unread on another connection or in a ring.
constexpr int64_t kGraceNs = 50 * int64_t{1000000};

}  // namespace

void Engine::WatchLoop() {
  std::unique_lock<std::mutex> lock(mu_);
  while (!stopping_) {
    watch_cv_.wait_for(lock, kTick);
    if (stopping_) return;
    lock.unlock();
    Tick();
    lock.lock();
  }
}

void Engine::Tick() {
  if (options_.on_tick) options_.on_tick();
  std::unique_lock<std::mutex> lock(mu_);
  int64_t now = NowNs();
  NoticeLosses(now);
  TellWaiting(now);
  std::vector<std::string> late;
  GiveVerdicts(now, &late);
  DropStale(now);
  RunTasks(lock);
  FlushFinished(lock);
  ReportLosses(lock);
  lock.unlock();  // nobody may be reading what we log
  if (options_.log && !options_.quiet)
    for (const std::string& line : late) options_.log(line);
}

void Engine::ReportLosses(std::unique_lock<std::mutex>& lock) {
  std::vector<std::pair<int, std::string>> losses;
  losses.reserve(unreported_.size());
  for (int p : unreported_) losses.emplace_back(p, lost_[static_cast<size_t>(p)]);
  unreported_.clear();
  if (losses.empty() || !options_.on_lost) return;
  lock.unlock();
  for (const auto& [process, why] : losses) options_.on_lost(process, why);
  lock.lock();
}

// Before the deadline everybody hears whom the others wait for, so that the verdict names the rank that holds up all.
void Engine::TellWaiting(int64_t now) {
  int64_t period = std::min(options_.mismatch_ns, options_.timeout_ns / 3);
  for (auto& [key, e] : open_) {
    int rank = -1;
    if (e->failed || now - std::max(e->started_ns, e->told_ns) < period) continue;
    e->told_ns = now;
    (void)e->Missing(&rank);  // only whom, not the words
    for (int r = 0; r < e->request.group->size(); ++r) {
      Header h = e->MakeHeader(MessageType::kWaiting, r, 0, static_cast<uint32_t>(rank < 0 ? e->request.rank : rank));
      auto process = static_cast<size_t>(e->request.group->process[static_cast<size_t>(r)]);
      if (links_[process] != nullptr && lost_[process].empty()) links_[process]->Send(h, nullptr, 0);
      if (Execution* peer = links_[process] == nullptr ? Find(key.op, r) : nullptr; peer != nullptr) peer->OnWaiting(h);
    }
  }
}

void Engine::GiveVerdicts(int64_t now, std::vector<std::string>* late) {
  struct Verdict {
    OpKey key, other;
    std::string why;
    bool both;
  };
  std::vector<Verdict> verdicts;
  for (auto& [key, e] : open_) {
    int64_t age = now - e->started_ns;
    int rank = -1;
    if (e->failed || age < std::min(options_.mismatch_ns, options_.timeout_ns)) continue;
    if (const Early* m = age >= options_.mismatch_ns ? FindDisagreement(*e, now) : nullptr) {
      verdicts.push_back({key.op, m->header.key,
                          Format("the ranks disagree: %s, but rank %u calls %s", e->Describe().c_str(), m->header.src,
                                 Execution::DescribeSignature(m->header.signature).c_str()),
                          true});
    } else if (age >= options_.timeout_ns) {
      verdicts.push_back({key.op, key.op,
                          Format("%s: no end after %.1f s (JAXCOLL_TIMEOUT): %s", e->Describe().c_str(),
                                 static_cast<double>(age) * 1e-9, e->Missing(&rank).c_str()),
                          false});
    } else if (age >= options_.warn_ns && !e->warned) {
      e->warned = true;
      late->push_back(Format("%s waits for %.0f s: %s", e->Describe().c_str(), static_cast<double>(age) * 1e-9,
                             e->Missing(&rank).c_str()));
    }
  }
  for (const Verdict& v : verdicts) {
    const Execution* teller = nullptr;
    for (auto& [k, e] : open_)
      if (k.op == v.key) teller = e.get();
    if (teller == nullptr) continue;
    if (v.both) TellAll(v.other, v.why);  // the peers wait under their own key
    FailKey(v.key, v.why, teller);
    if (v.both) FailKey(v.other, v.why, nullptr);
  }
}

// A peer that waits at the same call site under another launch with another operation, while we wait for it: the
// programs differ. Its table may be another one: a rank that is ahead has passed the commit of a swap. One that we
// don't wait for may be ahead as well, for as long as this operation lasts.
const Early* Engine::FindDisagreement(const Execution& e, int64_t now) const {
  return early_.FindOther(e.request.key.comm, e.request.key.site, e.signature(), [&](const Early& m) {
    return int{m.header.dst} == e.request.rank && now - m.kept_ns >= options_.mismatch_ns && !e.heard(m.header.src) &&
           e.WaitsFor(m.header.src);
  });
}

std::string Engine::TooFarAhead(int rank, size_t bytes, const std::string& what) const {
  return Format(
      "rank %d is too far ahead: process %d holds %zu MiB %s. Let the ranks meet now and then, by block_until_ready or "
      "a collective in which all take part",
      rank, my_process_, bytes >> 20, what.c_str());
}

// Early messages of operations that nobody waits for any more: those that do would have given up by now.
void Engine::DropStale(int64_t now) {
  const int64_t before = now - options_.timeout_ns - options_.timeout_ns / 2;
  for (std::vector<Early> stale = early_.TakeStale(before); !stale.empty(); stale = early_.TakeStale(before))
    for (const Early& m : stale) Drop(m.link, m.header, m.payload.data());
}

void Engine::OnLinkDown(Link* link, const std::string& why) {
  std::unique_lock<std::mutex> lock(mu_);
  Closing& closing = closing_[static_cast<size_t>(link->process())];
  if (closing.since_ns != 0) return;
  closing = {NowNs(), why};
  if (options_.threads) return;  // the watch thread gives the verdict
  ProcessLost(link->process(), why);
  FlushFinished(lock);
  ReportLosses(lock);
}

void Engine::NoticeLosses(int64_t now) {
  for (size_t p = 0; p < closing_.size(); ++p)
    if (closing_[p].since_ns != 0 && now - closing_[p].since_ns >= kGraceNs && lost_[p].empty())
      ProcessLost(static_cast<int>(p), closing_[p].why);
}

void Engine::ProcessLost(int process, const std::string& why) {
  std::string& lost = lost_[static_cast<size_t>(process)];
  if (!lost.empty()) return;
  lost = why;
  any_lost_ = true;
  links_[static_cast<size_t>(process)]->PeerGone();
  unreported_.push_back(process);
  std::vector<std::pair<OpKey, std::string>> failing;
  for (auto& [key, e] : open_) {
    // A process that left in order has served all its operations: these may end without it. Who is not served tells the
    // others.
    std::string needs = e->failed ? "" : e->Needs(process);
    if (needs.empty()) continue;
    const std::vector<int>& processes = e->request.group->process;
    auto rank = std::find(processes.begin(), processes.end(), process) - processes.begin();
    failing.emplace_back(key.op, Format("rank %d is lost (%s) during %s: %s", static_cast<int>(rank), why.c_str(),
                                        e->Describe().c_str(), needs.c_str()));
  }
  for (auto& [key, text] : failing) {
    const Execution* teller = nullptr;
    for (auto& [k, e] : open_)
      if (k.op == key) teller = e.get();
    if (teller != nullptr) FailKey(key, text, teller);
  }
}

void Engine::FailIfLost(const OpKey& key, int rank) {
  Execution* e = Find(key, rank);
  for (size_t r = 0; e != nullptr && !e->failed && r < e->request.group->process.size(); ++r) {
    int process = e->request.group->process[r];
    const std::string& why = lost_[static_cast<size_t>(process)];
    std::string needs = why.empty() ? "" : e->Needs(process);
    if (!needs.empty())
      FailKey(
          key,
          Format("rank %zu is lost (%s), so there is no %s: %s", r, why.c_str(), e->Describe().c_str(), needs.c_str()),
          e);
  }
}

}  // namespace jaxcoll
