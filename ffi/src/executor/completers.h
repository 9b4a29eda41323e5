// Threads that run completions. XLA resumes the rest of a device's program inside the completion of a future, and that
// program may block for as long as it likes (in a collective of XLA's own, for its peers): so no completion may stand
// behind another. An idle thread takes it, or a new one is started.
#ifndef JAXCOLL_EXECUTOR_COMPLETERS_H_
#define JAXCOLL_EXECUTOR_COMPLETERS_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace jaxcoll {

class Completers {
 public:
  Completers() : state_(std::make_shared<State>()) {}
  ~Completers() { Stop(); }

  void Run(std::vector<std::function<void()>> completions);
  // Idle threads end. One that is still inside of somebody's program is given a second, then left behind with the state
  // it needs.
  void Stop();

 private:
  struct State {
    std::mutex mu;
    std::condition_variable work, quiet;
    std::deque<std::function<void()>> queue;
    size_t idle = 0, threads = 0;  // idle: waiting, or started and not yet running
    bool stopping = false;
  };
  static void Loop(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
};

}  // namespace jaxcoll

#endif  // JAXCOLL_EXECUTOR_COMPLETERS_H_
