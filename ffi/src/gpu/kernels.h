// Reduction kernels: compiled by NVRTC on first use, once per (architecture, type, reduction), loaded once per device.
#ifndef JAXCOLL_GPU_KERNELS_H_
#define JAXCOLL_GPU_KERNELS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "gpu/api.h"
#include "reduce/dtype.h"

namespace jaxcoll {
namespace gpu {

constexpr int kMaxSources = 128;

// The kernel's one argument, as in combine.cu.
struct CombineArgs {
  void* dst = nullptr;
  const void* src[kMaxSources] = {};
  uint64_t wide[kMaxSources / 64] = {};
  uint64_t n = 0;
  uint32_t count = 0, dst_wide = 0;

  void Add(const void* source, bool is_wide) {
    if (is_wide) wide[count / 64] |= uint64_t{1} << (count % 64);
    src[count++] = source;
  }
};

const char* CombineSource();  // the text of combine.cu

class Kernels {
 public:
  explicit Kernels(std::shared_ptr<const Api> api) : api_(std::move(api)) {}

  // Compiles and loads what is missing; may take a second. The current device must be `device`.
  Status Prepare(int device, DType type, Reduction op, Function* out);
  // Enqueues. `function` comes from Prepare.
  Status Launch(Function function, const CombineArgs& args, Stream stream) const;

 private:
  Status Compile(int arch, DType type, Reduction op, std::vector<char>* cubin) const;

  const std::shared_ptr<const Api> api_;
  std::mutex mu_;
  std::map<std::tuple<int, DType, Reduction>, Function> loaded_;             // (device, type, op)
  std::map<std::tuple<int, DType, Reduction>, std::vector<char>> compiled_;  // (architecture, type, op)
};

}  // namespace gpu
}  // namespace jaxcoll

#endif  // JAXCOLL_GPU_KERNELS_H_
