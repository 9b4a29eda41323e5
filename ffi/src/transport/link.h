// The narrow interface between the executor and what moves bytes.
//
// A link joins this process to one peer process. Messages are small headers with an optional payload; they may arrive
// in any order. Two ways to move a transfer's bytes:
//   pull links: the sender OFFERs where the bytes lie, the receiver Reads them in place and ACKs;
//   push links: the receiver says READY, the sender streams DATA.
// Either way a small transfer goes EAGERly inside one message.
#ifndef JAXCOLL_TRANSPORT_LINK_H_
#define JAXCOLL_TRANSPORT_LINK_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"

namespace jaxcoll {

enum class MessageType : uint8_t {
  kOffer = 1,    // payload: RemoteSpan[], where the sender's bytes lie
  kPosted = 8,   // payload: RemoteSpan, where in the sender's slab a copy of the bytes lies; nothing is acknowledged
  kEager = 2,    // payload: the bytes
  kReady = 3,    // the receiver can take the transfer
  kData = 4,     // payload: bytes from `offset` on
  kAck = 5,      // the receiver has read the offered bytes
  kAbort = 6,    // payload: why; the execution fails on every rank
  kGoodbye = 7,  // the process leaves in order
  kWaiting = 9,  // `transfer`: the rank that the sender waits for; the operation is late
  kTeamFailed = 10,  // payload: why; all of communicator key.comm's GPU side, of the generation key.launch, has failed
};

// Which execution of which call site of which communicator: equal on all ranks.
struct OpKey {
  uint64_t comm = 0;
  uint64_t site = 0;
  int64_t launch = 0;
  uint32_t index = 0;
  bool operator==(const OpKey& o) const {
    return comm == o.comm && site == o.site && launch == o.launch && index == o.index;
  }
};

struct OpKeyHash {
  size_t operator()(const OpKey& k) const {
    return static_cast<size_t>(
        Mix64(k.comm ^ Mix64(k.site ^ Mix64(static_cast<uint64_t>(k.launch) ^ (uint64_t{k.index} << 40)))));
  }
};

struct Header {
  uint32_t magic = kMagic;
  uint32_t payload = 0;  // bytes that follow
  MessageType type = MessageType::kGoodbye;
  uint8_t follows = 0;        // kData: sent right behind other bytes, or while some were still under way on this link
  uint16_t src = 0, dst = 0;  // ranks in the communicator
  uint16_t lane = 0;
  OpKey key;
  uint32_t transfer = 0;
  uint64_t signature = 0;  // kind, reduction, type, count of the sender's operation
  uint64_t offset = 0;     // kOffer: the sender's withdrawals() when it offered
  uint64_t total = 0;      // kData: bytes of the whole transfer

  static constexpr uint32_t kMagic = 0x314c434a;  // "JCL1"
};
static_assert(sizeof(Header) == 80, "one layout on both ends");

constexpr size_t kMaxReason = 4096;  // bytes of text in kAbort and kTeamFailed
constexpr size_t kMaxPayload =
    size_t{1} << 20;  // no message is larger; a frame that claims more is an attack or a fault

struct Span {
  const void* data;
  size_t size;
};
struct MutableSpan {
  void* data;
  size_t size;
};
struct RemoteSpan {
  uint64_t address, size;
};

// How long a payload was under way: at the speed of `bytes` (none: nothing is known) in `ns`. What was timed of it
// ended at `end_ns`, steady clock.
struct Timed {
  uint64_t bytes = 0;
  int64_t ns = 0, end_ns = 0;
};

class Link;

// Why a link is down whose process said goodbye.
inline constexpr const char* kLeftInOrder = "its process has left";

// Memory of this process that its peers see: a value copied here once is read by all of them in place. Blocks are freed
// by their readers, without a message.
class Slab {
 public:
  virtual ~Slab() = default;
  virtual size_t limit(uint32_t readers) const = 0;  // bytes of the largest block that pays with so many readers
  // Copies the spans into a block that the caller holds, and returns its address in the slab; 0: there is no room now.
  virtual uint64_t Put(const Span* data, size_t spans, size_t bytes) = 0;
  // Ends the caller's hold.
  virtual void Release(uint64_t block) = 0;
};

// What polls for messages: a transport, or a test's scheduler. The engine polls itself while an operation is young;
// otherwise a transport's own thread does.
class Pollable {
 public:
  virtual ~Pollable() = default;
  // Handles what has arrived; returns whether anything had.
  virtual bool Poll() = 0;
  // Whether transfers come this way; otherwise nobody polls or waits here.
  virtual bool carries_data() const = 0;
  // Sleeps until about `messages` more have come, for `timeout_ns`, or until Wake(); not at all once it is `over`.
  virtual void Wait(uint32_t messages, int64_t timeout_ns, const std::atomic<bool>& over) = 0;
  // Ends the sleep of all who Wait: what one of them waited for may be over.
  virtual void Wake() = 0;
  // Somebody begins (+1) or ends (-1) polling in a loop: meanwhile nobody has to be woken.
  virtual void Polling(int delta) = 0;
  // Operations are open, so messages matter, or none are.
  virtual void SetBusy(bool busy) = 0;
  // The operation has failed here, and the memory that it has offered is about to be used for something else.
  virtual void Withdraw(const OpKey& key) {}
};

// What a transport calls back (the engine). Calls come from whichever thread polls the transport, with none of the
// transport's locks held.
class LinkSink {
 public:
  virtual ~LinkSink() = default;
  // A message has arrived; the payload is valid during the call only.
  virtual void OnMessage(Link* link, const Header& header, const void* payload) = 0;
  // A kData message begins: where its payload goes. Empty: to be read and dropped. Otherwise the memory is held for the
  // transport until it calls OnLanded, or releases it in Forget.
  virtual std::vector<MutableSpan> OnData(Link* link, const Header& header) = 0;
  virtual void OnLanded(Link* link, const Header& header, const Timed& timed) = 0;
  // The last byte of a streamed transfer has been handed over: its memory is free again.
  virtual void OnSent(Link* link, uint64_t token) = 0;
  virtual void OnLinkDown(Link* link, const std::string& why) = 0;
  // Runs what the messages have made possible; a transport's own thread calls it after Poll().
  virtual void Work() = 0;
};

class Link {
 public:
  virtual ~Link() = default;
  virtual const char* name() const = 0;  // "shm", "tcp", ...
  int process() const { return process_; }
  virtual bool can_read() const = 0;       // a pull link
  virtual size_t eager_limit() const = 0;  // bytes
  // Pull links: spans of one offer. A value in more pieces is put together before it is offered.
  virtual size_t offer_limit() const { return 1; }

  // Sends a message whose payload is copied before the call returns. Never blocks: what doesn't fit now is queued.
  // False: it is longer than any message of this link (at most kMaxPayload), and nothing is sent.
  virtual bool Send(const Header& header, const Span* payload, size_t spans) = 0;
  // Push links: streams a whole transfer from the caller's memory as kData messages, then calls OnSent(token).
  virtual void Stream(const Header& header, const std::vector<Span>& payload, uint64_t token) = 0;
  // Pull links: copies from the peer's memory. An error's text goes on from the words "rank 3 ". What has been read is
  // of the operation only if its offer, made after `since` withdrawals, isn't withdrawn even now.
  virtual Status Read(const RemoteSpan* from, size_t spans, void* to, size_t size) = 0;
  virtual bool Withdrawn(const OpKey& key, uint64_t since) const { return false; }
  // How many operations this process has withdrawn.
  virtual uint64_t withdrawals() const { return 0; }
  // The slab that the peer at the other end can read, or null.
  virtual Slab* slab() { return nullptr; }
  // The peer will read a block of that slab once more.
  virtual void Lend(uint64_t block) {}
  // The peer's process has ended: it reads nothing any more.
  virtual void PeerGone() {}
  // A block of the peer's slab as this process sees it (null: outside of the slab), and the end of its use.
  virtual const void* Posted(const RemoteSpan& block) { return nullptr; }
  virtual void ReleasePosted(const RemoteSpan& block) {}
  // The execution `key` of local rank `rank` has failed: drops what streams from its memory. Returns how many kData
  // targets of it were released; the others will be reported by OnLanded soon.
  virtual int Forget(const OpKey& key, int rank) = 0;
  // Whether nothing waits to be sent (or the peer takes nothing any more).
  virtual bool idle() { return true; }
  // Bytes of this process's memory that hold messages which wait to be sent.
  size_t held() const { return held_.load(std::memory_order_relaxed); }

 protected:
  explicit Link(int process) : process_(process) {}

  std::atomic<size_t> held_{0};

 private:
  int process_;
};

}  // namespace jaxcoll

#endif  // JAXCOLL_TRANSPORT_LINK_H_
