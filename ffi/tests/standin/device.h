// A stand-in for CUDA and NCCL, for tests: the same symbols, executed on host memory. It proves ordering and logic, not
// speed, and nothing about real devices. One thread runs the heads of all streams in a random order, so every order
// that streams, events and groups allow comes up; what can't run yet (an event not reached, a peer not there) stays.
// Rules of use are checked; a breach is kept for the test.
#ifndef JAXCOLL_STANDIN_DEVICE_H_
#define JAXCOLL_STANDIN_DEVICE_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

namespace standin {

struct Op {
  std::string what;
  std::function<bool()> ready;  // may have effects: it is asked only at the head of its stream
  std::function<void()> run;
};

struct StreamState {
  int device = 0;
  bool destroyed = false, test = false;  // test: made by the test, not by what is tested
  std::deque<Op> queue;
};

struct EventState {
  uint64_t recorded = 0, reached = 0;  // sequence numbers of records
  int64_t time_ns = 0;
  bool destroyed = false;
};

class Device {
 public:
  static Device& Get();

  // The beginning of every exported function: counts it; nonzero: it must return this error.
  int Enter(const char* function);
  void Fail(const char* function, int64_t nth, int code);
  int64_t Calls(const char* function);
  std::string AllCalls();
  void Reset(uint64_t seed);

  void Breach(const std::string& what);  // mu held
  std::string Breaches();
  std::string Stuck();  // what the heads of streams wait for, if nothing can run; empty when all is done

  StreamState* Stream(void* handle);  // mu held; null handle: the default stream
  EventState* Event(void* handle);
  void Push(StreamState* stream, Op op);  // mu held
  // Memory that is about to be read or written.
  void Touch(const void* p, size_t bytes, const char* what);
  void* Allocate(size_t bytes);
  void Free(void* p, const char* what);
  size_t Allocated();  // mu held

  std::mutex mu;
  std::condition_variable cv;
  std::unordered_set<StreamState*> streams;
  std::unordered_set<EventState*> events;
  std::vector<std::function<bool()>> pollers;  // asked every round; true: something moved

 private:
  Device() = default;
  void Loop();
  bool Round();

  StreamState default_stream_;
  std::mt19937_64 random_{1};
  bool changed_ = false, idle_ = false;
  std::map<std::string, int64_t> calls_;
  struct Injection {
    int64_t nth = 0;
    int code = 0;
  };
  std::map<std::string, Injection> injections_;
  std::set<std::string> breaches_;
  struct Block {
    size_t bytes;
    bool freed;
  };
  std::map<uintptr_t, Block> memory_;  // freed blocks stay until Reset, so that their use is seen
};

int CurrentDevice();
int64_t CopyText(const std::string& text, char* out, int64_t size);  // the whole text's length
int64_t NowNs();

}  // namespace standin

#endif  // JAXCOLL_STANDIN_DEVICE_H_
