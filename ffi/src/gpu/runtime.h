// What a process has once for all its GPUs: the libraries, the kernels, the records, the monitor.
#ifndef JAXCOLL_GPU_RUNTIME_H_
#define JAXCOLL_GPU_RUNTIME_H_

#include <memory>

#include "gpu/api.h"
#include "gpu/kernels.h"
#include "gpu/monitor.h"
#include "telemetry/record.h"

namespace jaxcoll {
namespace gpu {

class Runtime {
 public:
  explicit Runtime(std::shared_ptr<const Api> a)
      : api(std::move(a)), kernels(api), records(kRecords), monitor(api, &records, {}) {}

  const std::shared_ptr<const Api> api;
  Kernels kernels;
  RecordBuffer records;
  Monitor monitor;

 private:
  static constexpr size_t kRecords = size_t{1} << 18;
};

}  // namespace gpu
}  // namespace jaxcoll

#endif  // JAXCOLL_GPU_RUNTIME_H_
