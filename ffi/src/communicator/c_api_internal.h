#ifndef JAXCOLL_COMMUNICATOR_C_API_INTERNAL_H_
#define JAXCOLL_COMMUNICATOR_C_API_INTERNAL_H_

#include "base/status.h"

namespace jaxcoll {

class World;
// The world that the XLA handlers use, or null.
World* CurrentWorld();
// Keeps a failure's message for jc_last_error() on this thread; returns 0 or -1.
int Report(const Status& s);

}  // namespace jaxcoll

#endif  // JAXCOLL_COMMUNICATOR_C_API_INTERNAL_H_
