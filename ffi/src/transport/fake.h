// A transport for tests: messages of several engines in one process and one thread, delivered in a random order that a
// seed repeats.
#ifndef JAXCOLL_TRANSPORT_FAKE_H_
#define JAXCOLL_TRANSPORT_FAKE_H_

#include <memory>
#include <random>
#include <vector>

#include "transport/link.h"

namespace jaxcoll {

class FakeNetwork {
 public:
  FakeNetwork(uint64_t seed, bool can_read);
  ~FakeNetwork();
  // The link on which process `from` talks to process `to`; owned by the network.
  Link* Connect(int from, int to);
  void Attach(int process, LinkSink* sink);
  // Delivers one message chosen at random. False: there is none.
  bool Step();
  // From now on the process neither sends nor receives; its peers are told.
  void Kill(int process);

 private:
  friend class FakeLink;
  struct Message {
    int from, to;
    Header header;
    std::vector<uint8_t> payload;
    bool last_of_stream = false;  // then the sender is told, by token
    uint64_t token = 0;
  };
  Link* Find(int from, int to) const;

  std::mt19937_64 random_;
  const bool can_read_;
  std::vector<std::unique_ptr<Link>> links_;
  std::vector<std::pair<int, int>> ends_;
  std::vector<LinkSink*> sinks_;
  std::vector<bool> dead_;
  std::vector<Message> messages_;
};

}  // namespace jaxcoll

#endif  // JAXCOLL_TRANSPORT_FAKE_H_
