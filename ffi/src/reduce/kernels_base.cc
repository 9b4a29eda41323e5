#define JAXCOLL_KERNEL_NAMESPACE kernels_base
#include "reduce/kernels.inc"
