#ifndef JAXCOLL_COMMUNICATOR_C_API_INTERNAL_H_
#define JAXCOLL_COMMUNICATOR_C_API_INTERNAL_H_

namespace jaxcoll {

class World;
// The world that the XLA handlers use, or null.
World* CurrentWorld();

}  // namespace jaxcoll

#endif  // JAXCOLL_COMMUNICATOR_C_API_INTERNAL_H_
