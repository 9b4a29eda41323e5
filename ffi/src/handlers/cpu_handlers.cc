// XLA's side on the CPU: decodes a call, starts it, and returns a future. It never waits for a peer longer than the
// engine's short polling: XLA runs independent calls at the same time and in another order on every device.
#include <memory>
#include <string>

#include "communicator/c_api_internal.h"
#include "handlers/call.h"

namespace jaxcoll {
namespace {

namespace ffi = xla::ffi;

ffi::Future Failed(const std::string& message) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ffi::Error::Internal("jaxcoll: " + message));
  return future;
}

ffi::Future Collective(int32_t device, ffi::RunId run, int32_t kind, int32_t reduce, int64_t site, int64_t set_key,
                       int32_t group_size, ffi::Span<const int64_t> devices, ffi::RemainingArgs args,
                       ffi::RemainingRets rets) {
  World* world = CurrentWorld();
  if (world == nullptr)
    return Failed(
        "the compiled program was loaded before jaxcoll was started in this process; call jaxcoll.init() first");
  Call call;
  Status status = DecodeCall(device, run, kind, reduce, site, set_key, group_size, devices, args, rets, &call);
  if (!status.ok()) return Failed(status.message());
  ffi::Promise promise;
  ffi::Future future(promise);
  auto shared = std::make_shared<ffi::Promise>(std::move(promise));
  auto complete = [shared](const Status& s) {
    if (s.ok())
      shared->SetAvailable();
    else
      shared->SetError(ffi::Error::Internal("jaxcoll: " + s.message()));
  };
  if (world->Execute(std::move(call), &status, complete)) complete(status);
  return future;
}

}  // namespace
}  // namespace jaxcoll

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcoll_collective_cpu, jaxcoll::Collective,
                              xla::ffi::Ffi::Bind()
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
