#include "device.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

namespace standin {

int64_t NowNs() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

Device& Device::Get() {
  // Its thread begins when all of it is there. Never destroyed: the thread may outlive main.
  static Device* device = [] {
    auto* made = new Device;
    std::thread([made] { made->Loop(); }).detach();
    return made;
  }();
  return *device;
}

int Device::Enter(const char* function) {
  std::lock_guard<std::mutex> lock(mu);
  int64_t n = ++calls_[function];
  auto it = injections_.find(function);
  return it != injections_.end() && it->second.nth == n ? it->second.code : 0;
}

void Device::Fail(const char* function, int64_t nth, int code) {
  std::lock_guard<std::mutex> lock(mu);
  calls_[function] = 0;
  injections_[function] = {nth, code};
}

int64_t Device::Calls(const char* function) {
  std::lock_guard<std::mutex> lock(mu);
  auto it = calls_.find(function);
  return it == calls_.end() ? 0 : it->second;
}

std::string Device::AllCalls() {
  std::lock_guard<std::mutex> lock(mu);
  std::string out;
  for (const auto& [name, count] : calls_)
    if (count > 0) out += name + " " + std::to_string(count) + "\n";
  return out;
}

// Forgets what has been destroyed: else every round would go through it, more and more slowly.
template <typename T>
void DropDestroyed(std::unordered_set<T*>* all) {
  for (auto it = all->begin(); it != all->end();) {
    T* one = *it;
    if (!one->destroyed) {
      ++it;
      continue;
    }
    it = all->erase(it);
    delete one;
  }
}

// Work that waits for ever (of an aborted test) is dropped with its streams.
void Device::Reset(uint64_t seed) {
  std::lock_guard<std::mutex> lock(mu);
  random_.seed(seed);
  calls_.clear();
  injections_.clear();
  breaches_.clear();
  default_stream_.queue.clear();
  for (StreamState* s : streams) s->queue.clear();
  DropDestroyed(&streams);
  DropDestroyed(&events);
  for (const auto& [at, block] : memory_) free(reinterpret_cast<void*>(at));
  memory_.clear();
}

void Device::Breach(const std::string& what) { breaches_.insert(what); }

std::string Device::Breaches() {
  std::lock_guard<std::mutex> lock(mu);
  std::string out;
  for (const std::string& b : breaches_) out += b + "\n";
  return out;
}

std::string Device::Stuck() {
  std::lock_guard<std::mutex> lock(mu);
  if (!idle_ || changed_) return "still running";
  std::string out;
  for (StreamState* s : streams)
    if (!s->queue.empty()) out += "device " + std::to_string(s->device) + ": " + s->queue.front().what + "\n";
  if (!default_stream_.queue.empty()) out += "the default stream: " + default_stream_.queue.front().what + "\n";
  return out;
}

StreamState* Device::Stream(void* handle) {
  if (handle == nullptr) return &default_stream_;
  auto* s = static_cast<StreamState*>(handle);
  if (streams.count(s) != 0 && !s->destroyed) return s;
  Breach("a stream that is not there was used");
  return nullptr;
}

EventState* Device::Event(void* handle) {
  auto* e = static_cast<EventState*>(handle);
  if (events.count(e) != 0 && !e->destroyed) return e;
  Breach("an event that is not there was used");
  return nullptr;
}

void Device::Push(StreamState* stream, Op op) {
  stream->queue.push_back(std::move(op));
  changed_ = true;
  cv.notify_all();
}

void Device::Touch(const void* p, size_t bytes, const char* what) {
  auto at = reinterpret_cast<uintptr_t>(p);
  auto it = memory_.upper_bound(at);
  if (it == memory_.begin()) return;
  --it;
  uintptr_t end = it->first + it->second.bytes;
  if (at >= end) return;
  if (it->second.freed)
    Breach(std::string(what) + ": memory that was freed");
  else if (at + bytes > end)
    Breach(std::string(what) + ": beyond the end of an allocation");
}

void* Device::Allocate(size_t bytes) {
  void* p = aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
  memset(p, 0xA5, bytes);
  std::lock_guard<std::mutex> lock(mu);
  memory_[reinterpret_cast<uintptr_t>(p)] = {bytes, false};
  return p;
}

void Device::Free(void* p, const char* what) {
  auto it = memory_.find(reinterpret_cast<uintptr_t>(p));
  if (it == memory_.end() || it->second.freed) return Breach(std::string(what) + ": memory that is not allocated");
  it->second.freed = true;
  memset(p, 0xDD, it->second.bytes);
}

size_t Device::Allocated() {
  return static_cast<size_t>(
      std::count_if(memory_.begin(), memory_.end(), [](const auto& at) { return !at.second.freed; }));
}

bool Device::Round() {
  bool moved = false;
  for (auto& poll : pollers) moved = poll() || moved;
  std::vector<StreamState*> busy;
  for (StreamState* s : streams)
    if (!s->queue.empty()) busy.push_back(s);
  if (!default_stream_.queue.empty()) busy.push_back(&default_stream_);
  std::shuffle(busy.begin(), busy.end(), random_);
  for (StreamState* s : busy) {
    // A random stretch of one stream: others may overtake it at any point.
    for (uint64_t most = 1 + random_() % 4; most > 0 && !s->queue.empty(); --most) {
      Op& op = s->queue.front();
      if (op.ready && !op.ready()) break;
      if (op.run) op.run();
      s->queue.pop_front();
      moved = true;
    }
  }
  return moved;
}

void Device::Loop() {
  std::unique_lock<std::mutex> lock(mu);
  for (;;) {
    changed_ = false;
    if (Round()) {
      lock.unlock();  // callers get their turn
      lock.lock();
      continue;
    }
    idle_ = true;
    cv.wait_for(lock, std::chrono::milliseconds(1),
                [&] { return changed_; });  // delayed transfers need no call to become due
    idle_ = false;
  }
}

int64_t CopyText(const std::string& text, char* out, int64_t size) {
  if (size > 0) {
    auto n = std::min<size_t>(text.size(), static_cast<size_t>(size - 1));
    memcpy(out, text.data(), n);
    out[n] = 0;
  }
  return static_cast<int64_t>(text.size());
}

}  // namespace standin

using standin::CopyText;
using standin::Device;

extern "C" {

void standin_reset(uint64_t seed) { standin::Device::Get().Reset(seed); }
void standin_fail(const char* function, int64_t nth, int code) { standin::Device::Get().Fail(function, nth, code); }
int64_t standin_calls(const char* function) { return standin::Device::Get().Calls(function); }

// A stream of the caller's own, neither counted nor failed; what it holds still runs after its end.
void* standin_stream(int device) {
  standin::Device& d = standin::Device::Get();
  auto* s = new standin::StreamState;
  s->device = device;
  s->test = true;
  std::lock_guard<std::mutex> lock(d.mu);
  d.streams.insert(s);
  return s;
}

void standin_stream_end(void* stream) {
  std::lock_guard<std::mutex> lock(Device::Get().mu);
  static_cast<standin::StreamState*>(stream)->destroyed = true;
}

int64_t standin_all_calls(char* out, int64_t size) { return CopyText(Device::Get().AllCalls(), out, size); }
int64_t standin_breaches(char* out, int64_t size) { return CopyText(Device::Get().Breaches(), out, size); }
int64_t standin_stuck(char* out, int64_t size) { return CopyText(Device::Get().Stuck(), out, size); }

}  // extern "C"
