#include "executor/engine.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

namespace jaxcoll {
namespace {

constexpr size_t kMaxAborted = 4096;
constexpr size_t kRecordCapacity = size_t{1} << 14;
constexpr size_t kHelpFrom = size_t{128} << 10;  // bytes of a task from which waking another thread pays
constexpr int kYields = 4;

// A payload lies wherever its connection's buffer ends: not aligned.
RemoteSpan SpanAt(const void* payload) {
  RemoteSpan span;
  memcpy(&span, payload, sizeof(span));
  return span;
}

// Messages that may come before their operation has begun here. What isn't one of ours is dropped; so is kWaiting,
// which comes again every second, also for operations that are over here.
bool IsKept(MessageType type) {
  return type == MessageType::kOffer || type == MessageType::kEager || type == MessageType::kReady ||
         type == MessageType::kPosted;
}

}  // namespace

Engine::Engine(EngineOptions options, int my_process, std::vector<Link*> links)
    : options_(std::move(options)),
      my_process_(my_process),
      links_(std::move(links)),
      lost_(links_.size()),
      closing_(links_.size()),
      record_(options_.record),
      records_(kRecordCapacity) {
  if (!options_.threads) return;
  threads_.emplace_back([this] { WatchLoop(); });
  for (int i = 0; i < options_.helpers; ++i) threads_.emplace_back([this] { HelperLoop(); });
}

Engine::~Engine() { Stop(); }

void Engine::AddPollable(Pollable* p) {
  pollables_.push_back(p);
  if (!p->carries_data()) return;
  if (carriers_++ == 0) driven_ = p;
}

void Engine::Stop() {
  {
    std::unique_lock<std::mutex> lock(mu_);
    if (stopping_.exchange(true)) return;
    std::vector<OpKey> keys;
    keys.reserve(open_.size());
    for (auto& [key, e] : open_) keys.push_back(key.op);
    for (const OpKey& key : keys) FailKey(key, "this process is leaving", nullptr);
    FlushFinished(lock);
  }
  helper_cv_.notify_all();
  watch_cv_.notify_all();
  for (std::thread& t : threads_)
    if (t.get_id() == std::this_thread::get_id())
      t.detach();
    else
      t.join();
  threads_.clear();
  completers_.Stop();
}

bool Engine::Start(OpRequest request, bool drive, Status* status, Completion done) {
  std::unique_lock<std::mutex> lock(mu_);
  auto refuse = [&](const std::string& why) {
    *status = Status::Error(why);
    return true;
  };
  if (stopping_) return refuse("jaxcoll has been shut down in this process");
  if (auto it = aborted_.find(request.key); it != aborted_.end()) return refuse(it->second);
  FullKey key{request.key, request.rank};
  if (open_.count(key) != 0) return refuse("the same execution of a call began twice on one rank");

  auto owned = std::make_unique<Execution>(this, std::move(request), std::move(done));
  Execution* e = owned.get();
  std::shared_ptr<Execution::Caller> caller = e->caller;
  open_.emplace(key, std::move(owned));
  std::unique_ptr<Gang>& gang = gangs_[key.op];
  if (gang == nullptr) gang = std::make_unique<Gang>();
  gang->members.resize(static_cast<size_t>(e->request.group->size()));
  gang->members[static_cast<size_t>(key.rank)] = e;
  ++gang->open;
  e->gang = gang.get();
  if (drive) caller->driver = std::this_thread::get_id();
  if (drive && driven_ != nullptr) driven_->Polling(+1);
  SetBusy();
  if (CollectLocal(e)) e->Start();
  if (e->over() && open_.count(key) != 0) Retire(e);  // nothing to do at all
  for (const Early& m : early_.Take(key.op, key.rank)) Dispatch(m.link, m.header, m.payload.data());
  if (any_lost_) FailIfLost(key.op, key.rank);
  RunTasks(lock);
  FlushFinished(lock);
  if (drive) {
    lock.unlock();
    Drive(key.op, key.rank, caller->over);
    lock.lock();
    SetBusy();
    if (driven_ != nullptr) driven_->Polling(-1);
  }
  caller->inside = false;
  if (!caller->over.load(std::memory_order_relaxed)) return false;
  *status = caller->status;
  return true;
}

// The handler's thread stays with its operation for a moment, asleep between messages: a second thread would cost a
// switch per message. It soon sleeps in the kernel rather than yielding in a loop: with more ranks than cores the
// scheduler makes who yields often wait long (measured, 8 ranks on 2 cores, 4 KiB: 4 yields 0.19 ms; yields only, 0.16
// ms at best and 3 to 6 ms often; none 0.26 ms).
void Engine::Drive(const OpKey& key, int rank, const std::atomic<bool>& over) {
  int64_t give_up = NowNs() + options_.spin_ns;
  while (!over.load(std::memory_order_acquire)) {
    if (Pump()) {
      give_up = NowNs() + options_.spin_ns;
      continue;
    }
    int64_t left = give_up - NowNs();
    if (left <= 0) return;
    uint32_t messages = 1;
    {
      std::lock_guard<std::mutex> lock(mu_);
      Execution* e = Find(key, rank);
      if (e == nullptr) continue;
      messages = e->Expecting();
    }
    // A few turns for the others first: often the message comes with the next one, and an idle core wakes slowly.
    bool came = false;
    for (int i = 0; i < kYields && !came; ++i) {
      sched_yield();
      came = Pump();
    }
    if (came) continue;
    // Of the messages awaited some may come by another way.
    if (driven_ != nullptr) driven_->Wait(carriers_ > 1 ? 1 : messages, left, over);
  }
}

bool Engine::PollAll() {
  bool any = false;
  for (Pollable* p : pollables_)
    if (p->carries_data() || !options_.threads) any = p->Poll() || any;
  return any;
}

bool Engine::Pump() {
  bool any = PollAll();
  if (!any && !has_tasks_.load(std::memory_order_relaxed) && options_.threads) return false;
  std::unique_lock<std::mutex> lock(mu_);
  any = any || !tasks_.empty();
  RunTasks(lock);
  FlushFinished(lock);
  return any;
}

void Engine::Work() {
  std::unique_lock<std::mutex> lock(mu_);
  RunTasks(lock);
  FlushFinished(lock);
}

void Engine::RunTasks(std::unique_lock<std::mutex>& lock) {
  while (!tasks_.empty()) {
    // The newest first: what a task has just written is still in the cache when it is copied on.
    Task t = tasks_.back();
    tasks_.pop_back();
    has_tasks_.store(!tasks_.empty(), std::memory_order_relaxed);
    if (options_.helpers > 0 && !tasks_.empty() &&
        tasks_.back().execution->TaskBytes(tasks_.back().lane, tasks_.back().node) >= kHelpFrom)
      helper_cv_.notify_one();
    ++t.execution->running;
    t.execution->PinSenders(t.lane, t.node, +1);
    lock.unlock();
    Status status = t.execution->RunNode(t.lane, t.node);
    if (!status.ok()) PollAll();  // a peer that has given up says why before it takes its memory back
    lock.lock();
    t.execution->PinSenders(t.lane, t.node, -1);
    --t.execution->running;
    if (!status.ok()) FailKey(t.execution->request.key, t.execution->Describe() + ": " + status.message(), t.execution);
    if (!t.execution->failed) {
      t.execution->NodeRan(t.lane, t.node);
      continue;
    }
    // The operation failed meanwhile: whoever only waited for this task to let go of its memory can leave now.
    const OpKey key = t.execution->request.key;
    std::vector<Execution*> leaving;
    for (int r = 0; r < t.execution->request.group->size(); ++r)
      if (Execution* e = Find(key, r); e != nullptr && e->failed && e->running == 0) leaving.push_back(e);
    for (Execution* e : leaving) Retire(e);
  }
}

void Engine::FlushFinished(std::unique_lock<std::mutex>& lock) {
  if (finished_.empty() && graveyard_.empty()) return;
  std::vector<Finished> finished = std::move(finished_);
  std::vector<std::unique_ptr<Execution>> dead = std::move(graveyard_);
  finished_.clear();
  graveyard_.clear();
  lock.unlock();
  dead.clear();
  Complete(std::move(finished));
  lock.lock();
}

void Engine::Complete(std::vector<Finished> finished) {
  if (finished.empty()) return;
  if (!options_.threads) {
    for (Finished& f : finished) f.done(f.status);
    return;
  }
  std::vector<std::function<void()>> completions;
  completions.reserve(finished.size());
  for (Finished& f : finished)
    completions.push_back([done = std::move(f.done), status = std::move(f.status)] { done(status); });
  completers_.Run(std::move(completions));
}

void Engine::HelperLoop() {
  std::unique_lock<std::mutex> lock(mu_);
  while (!stopping_) {
    helper_cv_.wait(lock, [&] { return stopping_ || !tasks_.empty(); });
    RunTasks(lock);
    FlushFinished(lock);
  }
}

Execution* Engine::Find(const OpKey& key, int rank) {
  auto it = gangs_.find(key);
  return it == gangs_.end() || static_cast<size_t>(rank) >= it->second->members.size()
             ? nullptr
             : it->second->members[static_cast<size_t>(rank)];
}

bool Engine::CollectLocal(Execution* e) {
  for (Execution* peer : e->gang->members) {
    if (peer == nullptr || peer == e) continue;
    if (peer->signature() != e->signature()) {
      FailKey(e->request.key, Disagreement(*e, peer->request.rank, peer->signature()), e);
      return false;
    }
    for (const Incoming& in : e->request.plan->incoming)
      if (in.peer == peer->request.rank)
        for (uint32_t lane = 0; lane < e->lanes(); ++lane) peer->OfferLocal(lane, in.transfer, e);
  }
  return true;
}

std::string Engine::Disagreement(const Execution& e, int rank, uint64_t signature) const {
  return Format("the ranks disagree: %s, but rank %d calls %s%s", e.Describe().c_str(), rank,
                Execution::DescribeSignature(signature).c_str(),
                (signature >> 8) == (e.signature() >> 8) ? " with another schedule or table" : "");
}

void Engine::SetBusy() {
  bool busy = !open_.empty();
  if (busy == busy_) return;
  busy_ = busy;
  for (Pollable* p : pollables_) p->SetBusy(busy);
}

size_t Engine::open_operations() {
  std::lock_guard<std::mutex> lock(mu_);
  return open_.size();
}

int Engine::Sending() {
  std::lock_guard<std::mutex> lock(mu_);
  for (size_t p = 0; p < links_.size(); ++p)
    if (links_[p] != nullptr && closing_[p].since_ns == 0 && !links_[p]->idle()) return static_cast<int>(p);
  return -1;
}

size_t Engine::failures() {
  std::lock_guard<std::mutex> lock(mu_);
  return failures_;
}

Engine::Peer Engine::StateOf(int process) {
  std::lock_guard<std::mutex> lock(mu_);
  if (process < 0 || static_cast<size_t>(process) >= closing_.size()) return Peer::kLost;
  const Closing& closing = closing_[static_cast<size_t>(process)];
  if (closing.since_ns == 0) return Peer::kThere;
  return closing.why == kLeftInOrder ? Peer::kLeft : Peer::kLost;
}

void Engine::SetRecordSink(std::function<void()> wake, size_t threshold) {
  std::lock_guard<std::mutex> lock(mu_);
  record_wake_ = std::move(wake);
  record_threshold_ = threshold;
}

void Engine::OnMessage(Link* link, const Header& header, const void* payload) {
  if (header.type == MessageType::kTeamFailed) {
    std::string why(static_cast<const char*>(payload), std::min<size_t>(header.payload, kMaxReason));
    if (options_.on_team_failed) options_.on_team_failed(header.key, why);
    return;
  }
  std::unique_lock<std::mutex> lock(mu_);
  Dispatch(link, header, payload);
}

void Engine::Dispatch(Link* link, const Header& h, const void* payload) {
  if (h.type == MessageType::kAbort) {
    std::string why(static_cast<const char*>(payload), std::min<size_t>(h.payload, kMaxReason));
    if (why.empty()) why = "a peer has given up, and doesn't say why";
    FailKey(h.key, why, nullptr);
    return;
  }
  Execution* e = Find(h.key, h.dst);
  if (e == nullptr) {
    if (IsKept(h.type)) KeepEarly(link, h, payload);
    return;
  }
  if (e->failed || h.src >= e->request.group->size() ||
      (link != nullptr && e->request.group->process[h.src] != link->process()))
    return Drop(link, h, payload);
  if (h.signature != e->signature()) {
    FailKey(h.key, Disagreement(*e, h.src, h.signature), e);
    return Drop(link, h, payload);
  }
  switch (h.type) {
    case MessageType::kOffer:
      // Where nothing can be read in place an offer is no answer. (Elsewhere payloads lie aligned, in a ring or a
      // buffer of their own.)
      if (link->can_read())
        e->OnOffer(link, h, static_cast<const RemoteSpan*>(payload), h.payload / sizeof(RemoteSpan), nullptr);
      break;
    case MessageType::kPosted:
      e->OnPosted(link, h, h.payload == sizeof(RemoteSpan) ? SpanAt(payload) : RemoteSpan{0, 0});
      break;
    case MessageType::kEager:
      e->OnEager(link, h, payload);
      break;
    case MessageType::kReady:
      e->OnReady(link, h);
      break;
    case MessageType::kAck:
      e->OnAck(h);
      break;
    case MessageType::kWaiting:
      e->OnWaiting(h);
      break;
    default:
      break;
  }
}

void Engine::Drop(Link* link, const Header& h, const void* payload) {
  if (link != nullptr && h.type == MessageType::kPosted && h.payload == sizeof(RemoteSpan))
    link->ReleasePosted(SpanAt(payload));
}

void Engine::KeepEarly(Link* link, const Header& h, const void* payload) {
  if (aborted_.count(h.key) != 0) return Drop(link, h, payload);
  if (early_.bytes() + EarlyMessages::Cost(h.payload) > options_.early_bytes) {
    std::string why = TooFarAhead(h.src, early_.bytes(), "for operations that it has not begun");
    Drop(link, h, payload);
    TellAll(h.key, why);
    return FailKey(h.key, why, nullptr);
  }
  early_.Keep(link, h, payload, NowNs());
}

std::vector<MutableSpan> Engine::OnData(Link* link, const Header& h) {
  std::unique_lock<std::mutex> lock(mu_);
  Execution* e = Find(h.key, h.dst);
  if (e == nullptr || e->failed || h.src >= e->request.group->size() ||
      e->request.group->process[h.src] != link->process() || h.signature != e->signature())
    return {};
  std::vector<MutableSpan> target = e->DataTarget(link, h);
  if (!target.empty()) ++e->running;
  return target;
}

void Engine::OnLanded(Link* link, const Header& h, const Timed& timed) {
  std::unique_lock<std::mutex> lock(mu_);
  Execution* e = Find(h.key, h.dst);
  if (e == nullptr) return;
  --e->running;
  if (!e->failed)
    e->OnLanded(link, h, timed);
  else if (e->running == 0)
    Retire(e);
}

void Engine::OnSent(Link*, uint64_t token) {
  std::unique_lock<std::mutex> lock(mu_);
  auto it = streams_.find(token);
  if (it == streams_.end()) return;
  StreamRef ref = it->second;
  streams_.erase(it);
  Execution* e = Find(ref.key, ref.rank);
  if (e != nullptr && !e->failed) e->SendDone(ref.lane, ref.node);
}

void Engine::TellAll(const OpKey& key, const std::string& why) {
  Header h;
  h.type = MessageType::kAbort;
  h.key = key;
  Span text{why.data(), std::min(why.size(), kMaxReason)};
  for (size_t p = 0; p < links_.size(); ++p)
    if (links_[p] != nullptr && lost_[p].empty()) links_[p]->Send(h, &text, 1);
}

void Engine::FailKey(const OpKey& key, const std::string& why, const Execution* tell) {
  if (aborted_.emplace(key, why).second) {
    aborted_order_.push_back(key);
    ++failures_;
    if (aborted_order_.size() > kMaxAborted) {
      aborted_.erase(aborted_order_.front());
      aborted_order_.pop_front();
    }
    if (tell != nullptr) {
      std::vector<int> told{my_process_};
      const std::vector<int>& processes = tell->request.group->process;
      for (size_t r = 0; r < processes.size(); ++r) {
        if (std::find(told.begin(), told.end(), processes[r]) != told.end()) continue;
        told.push_back(processes[r]);
        if (!lost_[static_cast<size_t>(processes[r])].empty()) continue;
        Header h = tell->MakeHeader(MessageType::kAbort, static_cast<int>(r), 0, 0);
        h.key = key;
        Span text{why.data(), std::min<size_t>(why.size(), kMaxReason)};
        links_[static_cast<size_t>(processes[r])]->Send(h, &text, 1);
      }
    }
  }
  std::vector<Execution*> mine;
  for (auto& [k, e] : open_)
    if (k.op == key && !e->failed) mine.push_back(e.get());
  if (!mine.empty())
    for (Pollable* p : pollables_) p->Withdraw(key);
  for (Execution* e : mine) {
    e->failed = true;
    e->failure = why;
    tasks_.erase(std::remove_if(tasks_.begin(), tasks_.end(), [&](const Task& t) { return t.execution == e; }),
                 tasks_.end());
    for (Link* link : links_)
      if (link != nullptr) e->running -= link->Forget(key, e->request.rank);
  }
  for (auto it = streams_.begin(); it != streams_.end();)
    it = it->second.key == key ? streams_.erase(it) : std::next(it);
  for (const Early& m : early_.Take(key)) Drop(m.link, m.header, m.payload.data());
  for (Execution* e : mine)
    if (e->running == 0) Retire(e);
}

bool Engine::Recorded(const OpKey& key) const {
  return Sampled(key.launch, key.index, record_stride_.load(std::memory_order_relaxed));
}

void Engine::Retire(Execution* e) {
  auto it = open_.find(FullKey{e->request.key, e->request.rank});
  if (it == open_.end() || it->second.get() != e) return;
  Status status = e->failed ? Status::Error(e->failure) : Status();
  if (!e->failed && record_.load(std::memory_order_relaxed) && Recorded(e->request.key)) {
    size_t held = 0;
    e->AddRecords(&records_, &held);
    if (record_wake_ && held >= record_threshold_) record_wake_();
  }
  if (e->caller->inside) {
    e->caller->status = std::move(status);
    e->caller->over.store(true, std::memory_order_release);
    const std::thread::id driver = e->caller->driver;
    if (driven_ != nullptr && driver != std::thread::id() && driver != std::this_thread::get_id()) driven_->Wake();
  } else {
    finished_.push_back({std::move(e->done), std::move(status)});
  }
  auto gang = gangs_.find(e->request.key);
  gang->second->members[static_cast<size_t>(e->request.rank)] = nullptr;
  if (--gang->second->open == 0) gangs_.erase(gang);
  graveyard_.push_back(std::move(it->second));
  open_.erase(it);
  SetBusy();
}

}  // namespace jaxcoll
