// The slab of a process: data posted once, for every peer of the host to read in place.
#ifndef JAXCOLL_TRANSPORT_SHM_SLAB_H_
#define JAXCOLL_TRANSPORT_SHM_SLAB_H_

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "transport/link.h"

namespace jaxcoll {

struct SlabHead;

// This process's slab: a ring of blocks, allocated at the head, freed in order at the tail once nobody reads them.
class ShmSlab final : public Slab {
 public:
  ShmSlab(uint8_t* base, int places, int place)
      : base_(base), places_(places), place_(place), gone_(static_cast<size_t>(places)) {}
  size_t limit(uint32_t readers) const override;
  uint64_t Put(const Span* data, size_t spans, size_t bytes) override;
  void Release(uint64_t block) override;
  // One more read by the process at `place`.
  void Lend(uint64_t block, int place);
  // Whatever that process holds is free.
  void Gone(int place);

 private:
  bool Held(const SlabHead& block) const;  // under mu_

  uint8_t* const base_;
  const int places_, place_;
  std::mutex mu_;
  uint64_t head_ = 0, tail_ = 0;  // positions that only grow
  std::vector<bool> gone_;        // [place]
};

}  // namespace jaxcoll

#endif  // JAXCOLL_TRANSPORT_SHM_SLAB_H_
