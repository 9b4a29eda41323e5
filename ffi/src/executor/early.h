// Messages that have come before their operation has begun here: kept until it does. There may be very many of them, so
// nothing that is done often goes through them all.
#ifndef JAXCOLL_EXECUTOR_EARLY_H_
#define JAXCOLL_EXECUTOR_EARLY_H_

#include <cstdint>
#include <functional>
#include <list>
#include <unordered_map>
#include <vector>

#include "transport/link.h"

namespace jaxcoll {

struct Early {
  Link* link;
  Header header;
  std::vector<uint8_t> payload;
  int64_t kept_ns;
};

class EarlyMessages {
 public:
  // Bytes that a message takes, with the lists and tables around it.
  static size_t Cost(size_t payload) { return payload + kAround; }
  size_t bytes() const { return bytes_; }

  void Keep(Link* link, const Header& header, const void* payload, int64_t now);
  // In the order in which they came, those of an operation: for one rank, or all.
  std::vector<Early> Take(const OpKey& key, int rank);
  std::vector<Early> Take(const OpKey& key);
  // All those of an operation to which none has come since `before_ns`. Empty: there is no such operation.
  std::vector<Early> TakeStale(int64_t before_ns);
  // A message of a call site whose sender calls something else than `signature` says, the table aside.
  const Early* FindOther(uint64_t comm, uint64_t site, uint64_t signature,
                         const std::function<bool(const Early&)>& wanted) const;

 private:
  static constexpr size_t kAround = 512;
  struct Op {
    OpKey key;
    std::vector<Early> messages;
  };
  using Ops = std::list<Op>;
  // How many messages say so of a call site.
  struct Shape {
    uint64_t shape;
    size_t count;
  };
  static uint64_t Site(uint64_t comm, uint64_t site) { return Mix64(comm ^ Mix64(site)); }
  void Count(const Header& header, int change);
  std::vector<Early> Gone(std::vector<Early> taken);  // no longer counted

  Ops ops_;  // by the time of their last message, the oldest first
  std::unordered_map<OpKey, Ops::iterator, OpKeyHash> by_key_;
  std::unordered_map<uint64_t, std::vector<Shape>> shapes_;  // by call site
  size_t bytes_ = 0;
};

}  // namespace jaxcoll

#endif  // JAXCOLL_EXECUTOR_EARLY_H_
