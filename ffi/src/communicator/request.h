// What every call asks of an executor, on a CPU or a GPU, by itself or in a world: checked and filled in by one rule.
#ifndef JAXCOLL_COMMUNICATOR_REQUEST_H_
#define JAXCOLL_COMMUNICATOR_REQUEST_H_

#include "base/status.h"
#include "executor/execution.h"

namespace jaxcoll {

// Whether partial sums are kept in f32 until all contributions are in. It decides the bits of the result and which plan
// a rank compiles: all ranks must say the same.
bool KeepsWide(Kind kind, DType dtype, Reduction reduce);

// Sets the type, the reduction and the buffers of a request; `counts`: elements a block of each leaf. Fails where
// `kind` can't be computed on that type.
Status SetOperands(Kind kind, Reduction reduce, DType dtype, size_t leaves, void* const* inputs, void* const* outputs,
                   const int64_t* counts, OpRequest* request);

}  // namespace jaxcoll

#endif  // JAXCOLL_COMMUNICATOR_REQUEST_H_
