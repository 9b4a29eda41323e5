#ifndef JAXCOLL_COMMUNICATOR_C_API_INTERNAL_H_
#define JAXCOLL_COMMUNICATOR_C_API_INTERNAL_H_

#include "base/status.h"
#include "jaxcoll/jaxcoll.h"

namespace jaxcoll {

class World;
struct Call;
// The world that the XLA handlers use, or null.
World* CurrentWorld();
// Keeps a failure's message for jc_last_error() on this thread; returns 0 or -1.
int Report(const Status& s);
World* WorldOf(jc_world* w);
// A call from the C interface's arguments.
Call MakeCall(int64_t device, int64_t launch, int32_t kind, int32_t reduce, int32_t dtype, int64_t site,
              int64_t set_key, const int64_t* devices, int32_t group_size, int32_t groups, int leaves,
              void* const* inputs, void* const* outputs, const int64_t* counts);

}  // namespace jaxcoll

#endif  // JAXCOLL_COMMUNICATOR_C_API_INTERNAL_H_
