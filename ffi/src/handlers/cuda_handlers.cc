// XLA's side on NVIDIA GPUs: takes the program's stream, enqueues behind it, returns. It is not marked as compatible
// with command buffers: a swapped table changes the launches, and a captured graph would go on with the old ones.
#include <optional>
#include <string>

#include "communicator/c_api_internal.h"
#include "handlers/call.h"

namespace jaxcoll {
namespace {

namespace ffi = xla::ffi;

constexpr size_t kScratchAlign = 256;

ffi::Error CollectiveOnGpu(gpu::Stream stream, ffi::ScratchAllocator scratch, int32_t device, ffi::RunId run,
                           int32_t kind, int32_t reduce, int64_t site, int64_t set_key, int32_t group_size,
                           ffi::Span<const int64_t> devices, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  World* world = CurrentWorld();
  if (world == nullptr)
    return ffi::Error::Internal(
        "jaxcoll: the compiled program was loaded before jaxcoll was started in this process; call jaxcoll.init() "
        "first");
  Call call;
  Status status = DecodeCall(device, run, kind, reduce, site, set_key, group_size, devices, args, rets, &call);
  // The memory goes back to XLA when the handler returns, for use behind this stream, which by then waits for ours.
  auto allocate = [&scratch](size_t bytes, void** out) -> Status {
    std::optional<void*> p = scratch.Allocate(bytes, kScratchAlign);
    if (!p.has_value())
      return Status::Error("XLA has no memory left: lower XLA_PYTHON_CLIENT_MEM_FRACTION or the message size");
    *out = *p;
    return {};
  };
  if (status.ok()) status = world->ExecuteGpu(std::move(call), stream, allocate);
  return status.ok() ? ffi::Error::Success() : ffi::Error::Internal("jaxcoll: " + status.message());
}

}  // namespace
}  // namespace jaxcoll

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcoll_collective_cuda, jaxcoll::CollectiveOnGpu,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<void*>>()
                                  .Ctx<xla::ffi::ScratchAllocator>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Ctx<xla::ffi::RunId>()
                                  .Attr<int32_t>("kind")
                                  .Attr<int32_t>("reduce")
                                  .Attr<int64_t>("site")
                                  .Attr<int64_t>("set_key")
                                  .Attr<int32_t>("group_size")
                                  .Attr<xla::ffi::Span<const int64_t>>("devices")
                                  .RemainingArgs()
                                  .RemainingRets());
#pragma GCC visibility pop
