#include "handlers/call.h"

namespace jaxcoll {

namespace ffi = xla::ffi;

Status DecodeCall(int32_t device, ffi::RunId run, int32_t kind, int32_t reduce, int64_t site, int64_t set_key,
                  int32_t group_size, ffi::Span<const int64_t> devices, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, Call* out) {
  Call& call = *out;
  if (kind < 0 || kind >= kNumKinds || group_size < 1 || devices.size() == 0 ||
      devices.size() % static_cast<size_t>(group_size) != 0 || args.size() != rets.size() || args.size() == 0)
    return Status::Error("malformed attributes: was the program made by another version of jaxcoll?");
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
    auto result = rets.get<ffi::AnyBuffer>(i);
    if (in.has_error() || result.has_error()) return Status::Error("an operand can't be read");
    auto type = static_cast<DType>(in->element_type());
    if (i == 0) call.dtype = type;
    if (type != call.dtype || static_cast<DType>((*result)->element_type()) != type)
      return Status::Error("the operands of one call differ in type");
    call.inputs.push_back(in->untyped_data());
    call.outputs.push_back((*result)->untyped_data());
    // Where the blocks are many, every group's size divides the operand (groups are then of one size).
    auto elements = static_cast<int64_t>(in->element_count());
    call.counts.push_back(many ? elements / group_size : elements);
  }
  return {};
}

}  // namespace jaxcoll
