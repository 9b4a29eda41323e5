#include "executor/completers.h"

#include <chrono>
#include <system_error>
#include <thread>

namespace jaxcoll {

void Completers::Run(std::vector<std::function<void()>> completions) {
  State& s = *state_;
  std::unique_lock<std::mutex> lock(s.mu);
  for (auto& c : completions) s.queue.push_back(std::move(c));
  // Those started here count as idle at once: the next call must not start threads for the same completions again.
  size_t fresh = s.queue.size() > s.idle ? s.queue.size() - s.idle : 0;
  s.threads += fresh;
  s.idle += fresh;
  // One system call for all of them: the operations of a process's ranks end together.
  if (completions.size() > 1)
    s.work.notify_all();
  else
    s.work.notify_one();
  lock.unlock();
  for (size_t started = 0; started < fresh; ++started) {
    try {
      std::thread([state = state_] { Loop(state); }).detach();
    } catch (const std::system_error&) {
      // The system has no thread to give. Those that are there take the rest when they can.
      lock.lock();
      s.threads -= fresh - started;
      s.idle -= fresh - started;
      if (s.threads == 0) throw;
      return;
    }
  }
}

void Completers::Loop(const std::shared_ptr<State>& state) {
  State& s = *state;
  std::unique_lock<std::mutex> lock(s.mu);
  --s.idle;  // as which it has counted since it was started
  while (true) {
    if (s.queue.empty()) {
      if (s.stopping) break;
      ++s.idle;
      s.work.wait(lock, [&] { return s.stopping || !s.queue.empty(); });
      --s.idle;
      continue;
    }
    std::function<void()> completion = std::move(s.queue.front());
    s.queue.pop_front();
    lock.unlock();
    completion();
    completion = nullptr;
    lock.lock();
  }
  --s.threads;
  s.quiet.notify_all();
}

void Completers::Stop() {
  State& s = *state_;
  std::unique_lock<std::mutex> lock(s.mu);
  s.stopping = true;
  s.work.notify_all();
  s.quiet.wait_for(lock, std::chrono::seconds(1), [&] { return s.threads == 0; });
}

}  // namespace jaxcoll
