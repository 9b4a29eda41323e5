// CUDA and NCCL, opened at run time: one table of function pointers, declared by ourselves. The library builds and is
// tested where there is neither. Nothing in the table waits for the device: no cudaStreamSynchronize,
// cudaDeviceSynchronize or cudaEventSynchronize, so that nothing on the enqueue path can.
#ifndef JAXCOLL_GPU_API_H_
#define JAXCOLL_GPU_API_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"

namespace jaxcoll {
namespace gpu {

using Stream = void*;  // cudaStream_t, the same pointer as the driver's CUstream
using Event = void*;
using Module = void*;
using Function = void*;
using Comm = void*;  // ncclComm_t

constexpr int kCudaNotReady = 600;
constexpr int kNcclInProgress = 7;
constexpr int kNcclBytes = 0;  // ncclInt8: bytes travel; reductions are ours, but inside a host (gpu/host_calls.h)
constexpr int kNoColor = -1;

struct UniqueId {
  char bytes[128];
};

// ncclConfig_t as of 2.27; older versions know a prefix. NCCL accepts the layout of every older version as long as
// `size` and `version` name it, which is why newer fields need no place here.
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char* net_name;
  int split_share, traffic_class;
  const char* comm_name;
  int collnet_enable, cta_policy, shrink_share, nvls_ctas;
};
static_assert(sizeof(Config) == 72 && offsetof(Config, comm_name) == 48, "NCCL's own layout");

constexpr int kOldestNccl = 21800;
// Every field undefined, the size and version of the layout that this NCCL (e.g. 22907) and ours have in common.
Config MakeConfig(int nccl_version);

// X(library, function, arguments): all return an int, 0 for success (but the two that return a text).
#define JAXCOLL_GPU_FUNCTIONS(X)                                                                                 \
  X(kCudart, cudaRuntimeGetVersion, (int*))                                                                      \
  X(kCudart, cudaDriverGetVersion, (int*))                                                                       \
  X(kCudart, cudaGetDevice, (int*))                                                                              \
  X(kCudart, cudaSetDevice, (int))                                                                               \
  X(kCudart, cudaDeviceGetAttribute, (int*, int, int))                                                           \
  X(kCudart, cudaFree, (void*))                                                                                  \
  X(kCudart, cudaStreamCreateWithFlags, (Stream*, unsigned))                                                     \
  X(kCudart, cudaStreamDestroy, (Stream))                                                                        \
  X(kCudart, cudaStreamWaitEvent, (Stream, Event, unsigned))                                                     \
  X(kCudart, cudaEventCreateWithFlags, (Event*, unsigned))                                                       \
  X(kCudart, cudaEventRecord, (Event, Stream))                                                                   \
  X(kCudart, cudaEventQuery, (Event))                                                                            \
  X(kCudart, cudaEventElapsedTime, (float*, Event, Event))                                                       \
  X(kCudart, cudaEventDestroy, (Event))                                                                          \
  X(kCudart, cudaMallocAsync, (void**, size_t, Stream))                                                          \
  X(kCudart, cudaFreeAsync, (void*, Stream))                                                                     \
  X(kCudart, cudaMemcpyAsync, (void*, const void*, size_t, int, Stream))                                         \
  X(kCudart, cudaMemsetAsync, (void*, int, size_t, Stream))                                                      \
  X(kDriver, cuModuleLoadData, (Module*, const void*))                                                           \
  X(kDriver, cuModuleGetFunction, (Function*, Module, const char*))                                              \
  X(kDriver, cuLaunchKernel,                                                                                     \
    (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**))    \
  X(kNvrtc, nvrtcVersion, (int*, int*))                                                                          \
  X(kNvrtc, nvrtcCreateProgram, (void**, const char*, const char*, int, const char* const*, const char* const*)) \
  X(kNvrtc, nvrtcCompileProgram, (void*, int, const char* const*))                                               \
  X(kNvrtc, nvrtcGetCUBINSize, (void*, size_t*))                                                                 \
  X(kNvrtc, nvrtcGetCUBIN, (void*, char*))                                                                       \
  X(kNvrtc, nvrtcGetProgramLogSize, (void*, size_t*))                                                            \
  X(kNvrtc, nvrtcGetProgramLog, (void*, char*))                                                                  \
  X(kNvrtc, nvrtcDestroyProgram, (void**))                                                                       \
  X(kNccl, ncclGetVersion, (int*))                                                                               \
  X(kNccl, ncclGetUniqueId, (UniqueId*))                                                                         \
  X(kNccl, ncclCommInitRankConfig, (Comm*, int, UniqueId, int, Config*))                                         \
  X(kNccl, ncclCommSplit, (Comm, int, int, Comm*, Config*))                                                      \
  X(kNccl, ncclCommGetAsyncError, (Comm, int*))                                                                  \
  X(kNccl, ncclCommAbort, (Comm))                                                                                \
  X(kNccl, ncclCommDestroy, (Comm))                                                                              \
  X(kNccl, ncclGroupStart, ())                                                                                   \
  X(kNccl, ncclGroupEnd, ())                                                                                     \
  X(kNccl, ncclSend, (const void*, size_t, int, int, Comm, Stream))                                              \
  X(kNccl, ncclRecv, (void*, size_t, int, int, Comm, Stream))                                                    \
  X(kNccl, ncclReduceScatter, (const void*, void*, size_t, int, int, Comm, Stream))                              \
  X(kNccl, ncclAllGather, (const void*, void*, size_t, int, Comm, Stream))

enum Library { kCudart, kDriver, kNvrtc, kNccl, kNumLibraries };

struct ApiOptions {
  std::string library;               // one file that holds everything (a stand-in); empty: search
  std::vector<std::string> folders;  // searched first: the lib folders of the nvidia wheels
};

struct Api {
  // Fails with a line for each library that is missing or too old, "...: what was looked for, where. Cure: what to
  // do", and a last one, "found: ...", with the paths of the others.
  static Status Open(const ApiOptions& options, std::shared_ptr<const Api>* out);

#define JAXCOLL_GPU_DECLARE(library, name, args) int(*name) args = nullptr;
  JAXCOLL_GPU_FUNCTIONS(JAXCOLL_GPU_DECLARE)
#undef JAXCOLL_GPU_DECLARE
  const char* (*cudaGetErrorString)(int) = nullptr;
  const char* (*ncclGetErrorString)(int) = nullptr;
  const char* (*ncclGetLastError)(Comm) = nullptr;

  int nccl_version = 0, runtime_version = 0, driver_version = 0, nvrtc_version = 0;  // 22907, 12090, 13000, 12090
  std::string paths[kNumLibraries];
  std::string Describe() const;  // versions and paths, one line each

  Status Cuda(int code, const char* call) const;
  Status Nccl(int code, const char* call) const;  // kNcclInProgress is no error
};

#define JC_CUDA(api, call) JC_RETURN_IF_ERROR((api).Cuda((api).call, #call))
#define JC_NCCL(api, call) JC_RETURN_IF_ERROR((api).Nccl((api).call, #call))

}  // namespace gpu
}  // namespace jaxcoll

#endif  // JAXCOLL_GPU_API_H_
