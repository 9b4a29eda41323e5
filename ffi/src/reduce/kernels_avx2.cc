#define JAXCOLL_KERNEL_NAMESPACE kernels_avx2
#include "reduce/kernels.inc"
