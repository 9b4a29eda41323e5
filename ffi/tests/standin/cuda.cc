// The CUDA runtime, the driver's module calls and NVRTC, as far as jaxcoll uses them.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device.h"
#include "reduce/combine.h"

namespace standin {
namespace {

thread_local int current_device = 0;
constexpr int kDevices = 64;
constexpr int kNotReady = 600, kInvalidHandle = 400, kInvalidValue = 1;

// As in gpu/combine.cu.
struct CombineArgs {
  void* dst;
  const void* src[128];
  uint64_t wide[2];
  uint64_t n;
  uint32_t count, dst_wide;
};
static_assert(sizeof(CombineArgs) == 8 + 128 * 8 + 16 + 8 + 8, "the kernel's argument");

struct Kernel {
  jaxcoll::DType type;
  jaxcoll::Reduction op;
};

// "Compiled" code: which reduction it is.
struct Image {
  char magic[8];
  int type, op;
};

void RunCombine(const Kernel& kernel, const CombineArgs& a) {
  Device& d = Device::Get();
  size_t narrow = jaxcoll::ElementSize(kernel.type);
  std::vector<jaxcoll::Source> sources;
  for (uint32_t k = 0; k < a.count; ++k) {
    bool wide = (a.wide[k / 64] >> (k % 64)) & 1;
    d.Touch(a.src[k], a.n * (wide ? 4 : narrow), "a reduction's source");
    sources.push_back({a.src[k], wide});
  }
  d.Touch(a.dst, a.n * (a.dst_wide ? 4 : narrow), "a reduction's result");
  jaxcoll::Combine(kernel.type, kernel.op, a.dst, a.dst_wide != 0, sources.data(), static_cast<int>(a.count), a.n);
}

}  // namespace

int CurrentDevice() { return current_device; }

}  // namespace standin

using standin::Device;
using standin::EventState;
using standin::StreamState;

#define ENTER()              \
  Device& d = Device::Get(); \
  if (int injected = d.Enter(__func__); injected != 0) return injected

extern "C" {

const char* cudaGetErrorString(int code) { return code == 600 ? "not ready" : "an error of the stand-in"; }

int cudaRuntimeGetVersion(int* v) {
  ENTER();
  const char* text = getenv("JAXCOLL_STANDIN_CUDA");
  *v = text != nullptr ? atoi(text) : 12090;
  return 0;
}
int cudaDriverGetVersion(int* v) {
  ENTER();
  const char* text = getenv("JAXCOLL_STANDIN_DRIVER");
  *v = text != nullptr ? atoi(text) : 13000;
  return 0;
}
int cudaGetDevice(int* device) {
  ENTER();
  *device = standin::current_device;
  return 0;
}
int cudaSetDevice(int device) {
  ENTER();
  if (device < 0 || device >= standin::kDevices) return standin::kInvalidValue;
  standin::current_device = device;
  return 0;
}
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER();
  *value = attribute == 75 ? 9 : 0;
  return 0;
}
int cudaFree(void* p) {
  ENTER();
  if (p == nullptr) return 0;
  std::lock_guard<std::mutex> lock(d.mu);
  d.Free(p, "cudaFree");
  return 0;
}

int cudaStreamCreateWithFlags(void** out, unsigned flags) {
  ENTER();
  auto* s = new StreamState;
  s->device = standin::current_device;
  std::lock_guard<std::mutex> lock(d.mu);
  d.streams.insert(s);
  *out = s;
  return 0;
}
int cudaStreamDestroy(void* handle) {
  ENTER();
  std::lock_guard<std::mutex> lock(d.mu);
  StreamState* s = d.Stream(handle);
  if (s == nullptr) return standin::kInvalidHandle;
  s->destroyed = true;  // what is queued still runs, as on a device
  return 0;
}
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags) {
  ENTER();
  std::lock_guard<std::mutex> lock(d.mu);
  StreamState* s = d.Stream(stream);
  EventState* e = d.Event(event);
  if (s == nullptr || e == nullptr) return standin::kInvalidHandle;
  if (e->recorded == 0) d.Breach("a stream waits for an event that was never recorded");
  d.Push(s, {"waits for an event", [e, n = e->recorded] { return e->reached >= n; }, {}});
  return 0;
}

int cudaEventCreateWithFlags(void** out, unsigned flags) {
  ENTER();
  auto* e = new EventState;
  std::lock_guard<std::mutex> lock(d.mu);
  d.events.insert(e);
  *out = e;
  return 0;
}
int cudaEventRecord(void* event, void* stream) {
  ENTER();
  std::lock_guard<std::mutex> lock(d.mu);
  EventState* e = d.Event(event);
  StreamState* s = d.Stream(stream);
  if (s == nullptr || e == nullptr) return standin::kInvalidHandle;
  if (e->reached != e->recorded) d.Breach("an event was recorded again before it was reached");
  uint64_t n = ++e->recorded;
  d.Push(s, {"records an event", {}, [e, n] {
               e->reached = n;
               e->time_ns = standin::NowNs();
             }});
  return 0;
}
int cudaEventQuery(void* event) {
  ENTER();
  std::lock_guard<std::mutex> lock(d.mu);
  EventState* e = d.Event(event);
  if (e == nullptr) return standin::kInvalidHandle;
  return e->reached == e->recorded ? 0 : standin::kNotReady;
}
int cudaEventElapsedTime(float* ms, void* from, void* to) {
  ENTER();
  std::lock_guard<std::mutex> lock(d.mu);
  EventState *a = d.Event(from), *b = d.Event(to);
  if (a == nullptr || b == nullptr || a->recorded == 0 || b->recorded == 0) return standin::kInvalidHandle;
  if (a->reached != a->recorded || b->reached != b->recorded) return standin::kNotReady;
  *ms = static_cast<float>(static_cast<double>(b->time_ns - a->time_ns) * 1e-6);
  return 0;
}
int cudaEventDestroy(void* event) {
  ENTER();
  std::lock_guard<std::mutex> lock(d.mu);
  EventState* e = d.Event(event);
  if (e == nullptr) return standin::kInvalidHandle;
  e->destroyed = true;
  return 0;
}

int cudaMallocAsync(void** out, size_t bytes, void* stream) {
  ENTER();
  {
    std::lock_guard<std::mutex> lock(d.mu);
    if (d.Stream(stream) == nullptr) return standin::kInvalidHandle;
  }
  *out = d.Allocate(bytes);
  return 0;
}
int cudaFreeAsync(void* p, void* stream) {
  ENTER();
  std::lock_guard<std::mutex> lock(d.mu);
  StreamState* s = d.Stream(stream);
  if (s == nullptr) return standin::kInvalidHandle;
  d.Push(s, {"frees memory", {}, [p] { Device::Get().Free(p, "cudaFreeAsync"); }});
  return 0;
}
int cudaMemcpyAsync(void* dst, const void* src, size_t bytes, int kind, void* stream) {
  ENTER();
  std::lock_guard<std::mutex> lock(d.mu);
  StreamState* s = d.Stream(stream);
  if (s == nullptr) return standin::kInvalidHandle;
  d.Push(s, {"copies", {}, [=] {
               Device::Get().Touch(src, bytes, "a copy's source");
               Device::Get().Touch(dst, bytes, "a copy's result");
               memmove(dst, src, bytes);
             }});
  return 0;
}
int cudaMemsetAsync(void* dst, int value, size_t bytes, void* stream) {
  ENTER();
  std::lock_guard<std::mutex> lock(d.mu);
  StreamState* s = d.Stream(stream);
  if (s == nullptr) return standin::kInvalidHandle;
  d.Push(s, {"sets memory", {}, [=] {
               Device::Get().Touch(dst, bytes, "a memset's result");
               memset(dst, value, bytes);
             }});
  return 0;
}

int cuModuleLoadData(void** module, const void* image) {
  ENTER();
  standin::Image copy;
  memcpy(&copy, image, sizeof(copy));
  if (memcmp(copy.magic, "STANDIN", 8) != 0) return 200;  // CUDA_ERROR_INVALID_IMAGE
  *module = new standin::Kernel{static_cast<jaxcoll::DType>(copy.type), static_cast<jaxcoll::Reduction>(copy.op)};
  return 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  ENTER();
  if (strcmp(name, "jc_combine") != 0) return 500;  // CUDA_ERROR_NOT_FOUND
  *function = module;
  return 0;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** params, void** extra) {
  ENTER();
  std::lock_guard<std::mutex> lock(d.mu);
  StreamState* s = d.Stream(stream);
  if (s == nullptr || gx == 0 || bx == 0 || bx > 1024) return standin::kInvalidValue;
  auto args = std::make_shared<standin::CombineArgs>();
  memcpy(args.get(), params[0], sizeof(*args));
  if (args->count == 0 || args->count > 128) d.Breach("a reduction of no source, or of too many");
  d.Push(s,
         {"reduces", {}, [args, function] { standin::RunCombine(*static_cast<standin::Kernel*>(function), *args); }});
  return 0;
}

int nvrtcVersion(int* major, int* minor) {
  ENTER();
  *major = 12;
  *minor = 9;
  return 0;
}
int nvrtcCreateProgram(void** program, const char* source, const char* name, int headers, const char* const* texts,
                       const char* const* names) {
  ENTER();
  if (strstr(source, "jc_combine") == nullptr) return 3;
  *program = new standin::Image{"STANDIN", -1, -1};
  return 0;
}
int nvrtcCompileProgram(void* program, int count, const char* const* options) {
  ENTER();
  auto* image = static_cast<standin::Image*>(program);
  for (int i = 0; i < count; ++i) {
    sscanf(options[i], "-DJC_TYPE=%d", &image->type);
    sscanf(options[i], "-DJC_OP=%d", &image->op);
  }
  return image->type >= 0 && image->op >= 0 ? 0 : 6;
}
int nvrtcGetCUBINSize(void* program, size_t* size) {
  ENTER();
  *size = sizeof(standin::Image);
  return 0;
}
int nvrtcGetCUBIN(void* program, char* out) {
  ENTER();
  memcpy(out, program, sizeof(standin::Image));
  return 0;
}
int nvrtcGetProgramLogSize(void* program, size_t* size) {
  ENTER();
  *size = 1;
  return 0;
}
int nvrtcGetProgramLog(void* program, char* out) {
  ENTER();
  *out = 0;
  return 0;
}
int nvrtcDestroyProgram(void** program) {
  ENTER();
  delete static_cast<standin::Image*>(*program);
  *program = nullptr;
  return 0;
}

}  // extern "C"
