// XLA's side on the CPU: decodes a call, starts it, and returns a future. It never waits for a peer longer than the
// engine's short polling: XLA runs independent calls at the same time and in another order on every device.
#include <memory>
#include <string>

#include "communicator/c_api_internal.h"
#include "communicator/world.h"
#include "xla/ffi/api/ffi.h"

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
  if (kind < 0 || kind >= kNumKinds || group_size < 1 || devices.size() == 0 ||
      devices.size() % static_cast<size_t>(group_size) != 0 || args.size() != rets.size() || args.size() == 0)
    return Failed("malformed attributes: was the program made by another version of jaxcoll?");
  Call call;
  call.kind = static_cast<Kind>(kind);
  call.reduce = static_cast<Reduction>(reduce);
  call.site = static_cast<uint64_t>(site);
  call.set_key = set_key;
  call.device = device;
  call.launch = run.run_id;
  call.devices = devices.begin();
  call.group_size = static_cast<size_t>(group_size);
  call.groups = devices.size() / call.group_size;
  bool many = call.kind == Kind::kReduceScatter || call.kind == Kind::kAllToAll;
  for (size_t i = 0; i < args.size(); ++i) {
    auto in = args.get<ffi::AnyBuffer>(i);
    auto out = rets.get<ffi::AnyBuffer>(i);
    if (in.has_error() || out.has_error()) return Failed("an operand can't be read");
    auto type = static_cast<DType>(in->element_type());
    if (i == 0) call.dtype = type;
    if (type != call.dtype || static_cast<DType>((*out)->element_type()) != type)
      return Failed("the operands of one call differ in type");
    call.inputs.push_back(in->untyped_data());
    call.outputs.push_back((*out)->untyped_data());
    // Where the blocks are many, every group's size divides the operand (groups are then of one size).
    auto elements = static_cast<int64_t>(in->element_count());
    call.counts.push_back(many ? elements / group_size : elements);
  }
  ffi::Promise promise;
  ffi::Future future(promise);
  auto shared = std::make_shared<ffi::Promise>(std::move(promise));
  Status status;
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
