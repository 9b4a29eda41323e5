// The slab of a process: data posted once, for every peer of the host to read in place.
#ifndef JAXCOLL_TRANSPORT_SHM_SLAB_H_
#define JAXCOLL_TRANSPORT_SHM_SLAB_H_

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "transport/link.h"

namespace jaxcoll {

// This process's slab: a ring of blocks, allocated at the head, freed in order at the tail once nobody reads them.
class ShmSlab final : public Slab {
 public:
  explicit ShmSlab(uint8_t* base) : base_(base) {}
  size_t limit(uint32_t readers) const override;
  uint64_t Put(const Span* data, size_t spans, size_t bytes) override;
  void Hold(uint64_t block) override;
  void Release(uint64_t block) override;

 private:
  uint8_t* const base_;
  std::mutex mu_;
  uint64_t head_ = 0, tail_ = 0;  // positions that only grow
};

}  // namespace jaxcoll

#endif  // JAXCOLL_TRANSPORT_SHM_SLAB_H_
