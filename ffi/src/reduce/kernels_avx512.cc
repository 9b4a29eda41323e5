#define JAXCOLL_KERNEL_NAMESPACE kernels_avx512
#include "reduce/kernels.inc"
