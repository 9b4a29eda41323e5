// The pages behind large results. Touching memory for the first time costs a fault and a cleared page; on CPUs without
// cores to spare that is more work than moving the data (numbers: BUILD.md).
#ifndef JAXCOLL_EXECUTOR_PAGES_H_
#define JAXCOLL_EXECUTOR_PAGES_H_

#include "executor/view.h"

namespace jaxcoll {

// Lets malloc keep freed memory for the next allocation, where it would return blocks of a result's size to the system
// and take fresh pages from it for every call. For the whole process, and for good. Does nothing without glibc.
void KeepFreedMemory();

// Asks for large pages behind the results of `blocks` blocks a leaf that are large enough, and, once freed memory is
// kept, behind whatever malloc's heap has grown by. A hint: where it fails nothing is lost.
void AdviseLargePages(const View& view, int blocks);

}  // namespace jaxcoll

#endif  // JAXCOLL_EXECUTOR_PAGES_H_
