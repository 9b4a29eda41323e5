#include "gpu/kernels.h"

#include <algorithm>
#include <string>

#include "combine_source.h"  // kCombineSource: the text of combine.cu, written by CMake

namespace jaxcoll {
namespace gpu {
namespace {

constexpr int kThreads = 256;
constexpr uint64_t kBlocksMost = 1024;  // a grid-stride loop does the rest
constexpr uint64_t kElementsPerThread = 8;
constexpr int kAttributeMajor = 75, kAttributeMinor = 76;  // cudaDevAttrComputeCapabilityMajor, -Minor

}  // namespace

const char* CombineSource() { return kCombineSource; }

Status Kernels::Compile(int arch, DType type, Reduction op, std::vector<char>* cubin) const {
  void* program = nullptr;
  int code = api_->nvrtcCreateProgram(&program, kCombineSource, "jaxcoll_combine.cu", 0, nullptr, nullptr);
  if (code != 0) return Status::Error(Format("nvrtcCreateProgram failed with %d", code));
  std::string options[] = {Format("--gpu-architecture=sm_%d", arch), Format("-DJC_TYPE=%d", static_cast<int>(type)),
                           Format("-DJC_OP=%d", static_cast<int>(op)), "--fmad=false", "--std=c++14"};
  std::vector<const char*> pointers;
  for (const std::string& o : options) pointers.push_back(o.c_str());
  code = api_->nvrtcCompileProgram(program, static_cast<int>(pointers.size()), pointers.data());
  size_t size = 0;
  Status status;
  if (code != 0) {
    std::string log;
    if (api_->nvrtcGetProgramLogSize(program, &size) == 0) {
      log.resize(size);
      if (api_->nvrtcGetProgramLog(program, log.data()) != 0) log.clear();
    }
    status = Status::Error(
        Format("NVRTC can't compile the reduction (%s %s) for sm_%d, code %d. Is NVRTC %d.%d older than this GPU? "
               "Cure: pip install --upgrade 'jaxcoll[cuda13]'. %s",
               ReductionName(op), DTypeName(type), arch, code, api_->nvrtc_version / 1000,
               api_->nvrtc_version % 1000 / 10, log.c_str()));
  } else if (int sized = api_->nvrtcGetCUBINSize(program, &size); sized != 0) {
    status = Status::Error(Format("nvrtcGetCUBINSize failed with %d", sized));
  } else {
    cubin->resize(size);
    if (int got = api_->nvrtcGetCUBIN(program, cubin->data()); got != 0)
      status = Status::Error(Format("nvrtcGetCUBIN failed with %d", got));
  }
  if (int c = api_->nvrtcDestroyProgram(&program); c != 0 && status.ok())
    status = Status::Error(Format("nvrtcDestroyProgram failed with %d", c));
  return status;
}

Status Kernels::Prepare(int device, DType type, Reduction op, Function* out) {
  std::lock_guard<std::mutex> lock(mu_);
  auto it = loaded_.find({device, type, op});
  if (it != loaded_.end()) {
    *out = it->second;
    return {};
  }
  int major = 0, minor = 0;
  JC_CUDA(*api_, cudaDeviceGetAttribute(&major, kAttributeMajor, device));
  JC_CUDA(*api_, cudaDeviceGetAttribute(&minor, kAttributeMinor, device));
  std::vector<char> cubin = compiled_[{major * 10 + minor, type, op}];
  if (cubin.empty()) {
    JC_RETURN_IF_ERROR(Compile(major * 10 + minor, type, op, &cubin));
    compiled_[{major * 10 + minor, type, op}] = cubin;
  }
  Module module = nullptr;
  Function function = nullptr;
  if (int code = api_->cuModuleLoadData(&module, cubin.data()); code != 0)
    return Status::Error(Format("cuModuleLoadData failed with %d", code));
  if (int code = api_->cuModuleGetFunction(&function, module, "jc_combine"); code != 0)
    return Status::Error(Format("cuModuleGetFunction failed with %d", code));
  loaded_[{device, type, op}] = function;
  *out = function;
  return {};
}

Status Kernels::Launch(Function function, const CombineArgs& args, Stream stream) const {
  uint64_t per_block = kThreads * kElementsPerThread;
  auto blocks = static_cast<unsigned>(std::clamp<uint64_t>((args.n + per_block - 1) / per_block, 1, kBlocksMost));
  CombineArgs copy = args;  // the driver reads it before it returns
  void* params[] = {&copy};
  int code = api_->cuLaunchKernel(function, blocks, 1, 1, kThreads, 1, 1, 0, stream, params, nullptr);
  return code == 0 ? Status() : Status::Error(Format("cuLaunchKernel failed with %d", code));
}

}  // namespace gpu
}  // namespace jaxcoll
