#include "communicator/request.h"

namespace jaxcoll {

bool KeepsWide(Kind kind, DType dtype, Reduction reduce) {
  return Reduces(kind) && IsNarrow(dtype) && (reduce == Reduction::kSum || reduce == Reduction::kProd);
}

Status SetOperands(Kind kind, Reduction reduce, DType dtype, size_t leaves, void* const* inputs, void* const* outputs,
                   const int64_t* counts, OpRequest* request) {
  if (ElementSize(dtype) == 0) return Status::Error("a type that jaxcoll can't move");
  if (Reduces(kind) && !CanReduce(dtype, reduce))
    return Status::Error(Format("%s of %s is not supported", ReductionName(reduce), DTypeName(dtype)));
  request->dtype = dtype;
  request->reduce = reduce;
  request->input.element_size = request->output.element_size = ElementSize(dtype);
  for (size_t i = 0; i < leaves; ++i) {
    request->input.Add(inputs[i], counts[i]);
    request->output.Add(outputs[i], counts[i]);
  }
  return {};
}

}  // namespace jaxcoll
