// What XLA hands to a handler, as the world's Call. The same on every platform.
#ifndef JAXCOLL_HANDLERS_CALL_H_
#define JAXCOLL_HANDLERS_CALL_H_

#include "communicator/world.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcoll {

Status DecodeCall(int32_t device, xla::ffi::RunId run, int32_t kind, int32_t reduce, int64_t site, int64_t set_key,
                  int32_t group_size, xla::ffi::Span<const int64_t> devices, xla::ffi::RemainingArgs args,
                  xla::ffi::RemainingRets rets, Call* out);

}  // namespace jaxcoll

#endif  // JAXCOLL_HANDLERS_CALL_H_
