// What a process has once for all its GPUs: the libraries, the kernels, the records, the monitor.
#ifndef JAXCOLL_GPU_RUNTIME_H_
#define JAXCOLL_GPU_RUNTIME_H_

#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "gpu/api.h"
#include "gpu/kernels.h"
#include "gpu/monitor.h"
#include "telemetry/record.h"

namespace jaxcoll {
namespace gpu {

// Whom to wake when records have heaped up.
class RecordSink {
 public:
  void Set(std::function<void()> wake, size_t threshold) {
    std::lock_guard<std::mutex> lock(mu_);
    wake_ = std::move(wake);
    threshold_ = threshold;
  }
  void Added(size_t held) {
    std::lock_guard<std::mutex> lock(mu_);
    if (wake_ && held >= threshold_) wake_();
  }

 private:
  std::mutex mu_;
  std::function<void()> wake_;
  size_t threshold_ = 0;
};

class Runtime {
 public:
  explicit Runtime(std::shared_ptr<const Api> a)
      : api(std::move(a)),
        kernels(api),
        records(kRecords),
        monitor(api, &records, [this](size_t n) { sink.Added(n); }) {}

  const std::shared_ptr<const Api> api;
  Kernels kernels;
  RecordBuffer records;
  RecordSink sink;
  Monitor monitor;  // its thread uses what stands above

 private:
  static constexpr size_t kRecords = size_t{1} << 18;
};

}  // namespace gpu
}  // namespace jaxcoll

#endif  // JAXCOLL_GPU_RUNTIME_H_
