#include "gpu/api.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <climits>
#include <cstring>

namespace jaxcoll {
namespace gpu {
namespace {

struct LibraryRow {
  const char* what;
  const char* names[3];
  const char* cure;
};

// Newest first. cuda12 and cuda13 wheels bring cudart, nvrtc and NCCL; libcuda comes with the driver.
constexpr LibraryRow kLibraries[kNumLibraries] = {
    {"the CUDA runtime",
     {"libcudart.so.13", "libcudart.so.12", nullptr},
     "pip install 'jaxcoll[cuda12]' (or [cuda13])"},
    {"the CUDA driver",
     {"libcuda.so.1", nullptr, nullptr},
     "install NVIDIA's driver; in a container: docker run --gpus all"},
    {"NVRTC", {"libnvrtc.so.13", "libnvrtc.so.12", nullptr}, "pip install 'jaxcoll[cuda12]' (or [cuda13])"},
    {"NCCL", {"libnccl.so.2", nullptr, nullptr}, "pip install nvidia-nccl-cu12 (or nvidia-nccl-cu13), 2.18 or newer"},
};

constexpr const char* kSystemFolders[] = {"", "/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu",
                                          "/usr/lib/aarch64-linux-gnu"};

std::string CudaVersion(int v) { return Format("%d.%d", v / 1000, v % 1000 / 10); }
std::string NcclVersion(int v) {
  return v < 10000 ? Format("%d.%d.%d", v / 1000, v % 1000 / 100, v % 100)  // up to 2.8
                   : Format("%d.%d.%d", v / 10000, v % 10000 / 100, v % 100);
}

std::string PathOf(void* symbol) {
  Dl_info info;
  return dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "?";
}

std::string PathOfLibrary(void* handle) {
  link_map* map = nullptr;
  return dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0 && map != nullptr ? map->l_name : "?";
}

// What the process holds already wins: a second runtime or NCCL beside jaxlib's own would know nothing of its streams.
void* OpenOne(const LibraryRow& row, const ApiOptions& options, int major, std::string* tried) {
  std::vector<std::string> names;
  for (const char* name : row.names) {
    if (name == nullptr) break;
    size_t length = strlen(name);
    bool versioned = length > 3 && name[length - 3] == '.';
    if (major != 0 && versioned && strtol(name + length - 2, nullptr, 10) != major) continue;
    names.emplace_back(name);
  }
  for (const std::string& name : names)
    if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return handle;
  std::vector<std::string> folders = options.folders;
  folders.insert(folders.end(), std::begin(kSystemFolders), std::end(kSystemFolders));
  for (const std::string& folder : folders)
    for (const std::string& name : names) {
      std::string path = folder;
      if (!folder.empty()) path += '/';
      path += name;
      if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
      const char* why = dlerror();
      if (!tried->empty()) *tried += ", ";
      *tried += path;
      if (!folder.empty() && access(path.c_str(), F_OK) == 0) *tried += Format(" (it is there, but: %s)", why);
    }
  return nullptr;
}

// The wheels to install where something is too old: of the runtime's major version.
int WheelsFor(int runtime_version) { return runtime_version >= 13000 ? 13 : 12; }

Status Versions(Api* api) {
  JC_NCCL(*api, ncclGetVersion(&api->nccl_version));
  JC_CUDA(*api, cudaRuntimeGetVersion(&api->runtime_version));
  JC_CUDA(*api, cudaDriverGetVersion(&api->driver_version));
  int major = 0, minor = 0;
  if (api->nvrtcVersion(&major, &minor) != 0) return Status::Error("nvrtcVersion failed");
  api->nvrtc_version = major * 1000 + minor * 10;
  if (api->nccl_version < kOldestNccl)
    return Status::Error(
        Format("%s is NCCL %s; jaxcoll needs 2.18 or newer. Cure: pip install --upgrade nvidia-nccl-cu%d",
               api->paths[kNccl].c_str(), NcclVersion(api->nccl_version).c_str(), WheelsFor(api->runtime_version)));
  // Within a major version an older driver will do.
  if (api->driver_version / 1000 < api->runtime_version / 1000)
    return Status::Error(Format(
        "%s is a driver for CUDA %s, too old for the CUDA runtime %s of %s. Cure: install a newer NVIDIA driver%s",
        api->paths[kDriver].c_str(), CudaVersion(api->driver_version).c_str(),
        CudaVersion(api->runtime_version).c_str(), api->paths[kCudart].c_str(),
        api->driver_version >= 12000 ? ", or pip install 'jaxcoll[cuda12]'" : ""));
  return {};
}

}  // namespace

Config MakeConfig(int nccl_version) {
  Config c;
  memset(&c, 0, sizeof(c));
  bool named = nccl_version >= 22700;
  c.size = named ? sizeof(Config) : 48;
  c.magic = 0xcafebeef;
  c.version = named ? 22700 : 21800;
  for (int* field : {&c.blocking, &c.cga_cluster_size, &c.min_ctas, &c.max_ctas, &c.split_share, &c.traffic_class,
                     &c.collnet_enable, &c.cta_policy, &c.shrink_share, &c.nvls_ctas})
    *field = INT_MIN;
  return c;
}

Status Api::Open(const ApiOptions& options, std::shared_ptr<const Api>* out) {
  auto api = std::make_shared<Api>();
  void* handles[kNumLibraries] = {};
  int major = 0;
  std::string faults, found;
  for (int i = 0; i < kNumLibraries; ++i) {
    const LibraryRow& row = kLibraries[i];
    if (!options.library.empty()) {
      handles[i] = dlopen(options.library.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (handles[i] == nullptr)
        return Status::Error(Format("%s can't be loaded: %s", options.library.c_str(), dlerror()));
      continue;
    }
    std::string tried;
    handles[i] = OpenOne(row, options, i == kNvrtc ? major : 0, &tried);
    if (handles[i] == nullptr) {
      faults += Format("%s was not found; looked for %s. Cure: %s\n", row.what, tried.c_str(), row.cure);
      continue;
    }
    found += Format("%s%s %s", found.empty() ? "found: " : ", ", row.what, PathOfLibrary(handles[i]).c_str());
    if (i == kCudart) {
      // NVRTC must be of the runtime's major version.
      auto version = reinterpret_cast<int (*)(int*)>(dlsym(handles[i], "cudaRuntimeGetVersion"));
      int v = 0;
      if (version != nullptr && version(&v) == 0) major = v / 1000;
    }
  }
  // All of them at once: whoever installs one needn't come back for the next.
  if (!faults.empty()) return Status::Error(faults + (found.empty() ? "found: none of them" : found));
  std::string missing;
  auto find = [&](Library library, const char* name) {
    void* symbol = dlsym(handles[library], name);
    if (symbol == nullptr)
      missing += std::string(missing.empty() ? "" : ", ") + name;
    else if (api->paths[library].empty())
      api->paths[library] = PathOf(symbol);
    return symbol;
  };
#define JAXCOLL_GPU_FIND(library, name, args) api->name = reinterpret_cast<decltype(api->name)>(find(library, #name));
  JAXCOLL_GPU_FUNCTIONS(JAXCOLL_GPU_FIND)
  JAXCOLL_GPU_FIND(kCudart, cudaGetErrorString, )
  JAXCOLL_GPU_FIND(kNccl, ncclGetErrorString, )
  JAXCOLL_GPU_FIND(kNccl, ncclGetLastError, )
#undef JAXCOLL_GPU_FIND
  if (!missing.empty())
    return Status::Error(
        Format("the CUDA libraries are too old, they lack %s. Cure: pip install --upgrade "
               "'jaxcoll[cuda%d]'%s%s",
               missing.c_str(), WheelsFor(major * 1000), found.empty() ? "" : "\n", found.c_str()));
  JC_RETURN_IF_ERROR(Versions(api.get()));
  *out = std::move(api);
  return {};
}

std::string Api::Describe() const {
  return "CUDA runtime " + CudaVersion(runtime_version) + "  " + paths[kCudart] + "\nCUDA driver " +
         CudaVersion(driver_version) + "  " + paths[kDriver] + "\nNVRTC " + CudaVersion(nvrtc_version) + "  " +
         paths[kNvrtc] + "\nNCCL " + NcclVersion(nccl_version) + "  " + paths[kNccl];
}

Status Api::Cuda(int code, const char* call) const {
  if (code == 0) return {};
  std::string name(call, strcspn(call, "("));
  return Status::Error(Format("%s failed with %d (%s)", name.c_str(), code, cudaGetErrorString(code)));
}

Status Api::Nccl(int code, const char* call) const {
  if (code == 0 || code == kNcclInProgress) return {};
  std::string name(call, strcspn(call, "("));
  const char* last = ncclGetLastError(nullptr);
  return Status::Error(Format("%s failed with %d (%s)%s%s", name.c_str(), code, ncclGetErrorString(code),
                              last != nullptr && *last != 0 ? ": " : "", last != nullptr ? last : ""));
}

}  // namespace gpu
}  // namespace jaxcoll
