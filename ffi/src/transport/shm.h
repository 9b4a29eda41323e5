// Processes of one host: a ring of messages per ordered pair in shared memory; large transfers are read in place from
// the peer's memory where the system allows it (process_vm_readv), else streamed through the ring.
//
// Waiting. A process that has nobody polling and open operations sleeps on a futex in its own segment; who puts a
// message into one of its rings wakes it, and only then pays a system call.
#ifndef JAXCOLL_TRANSPORT_SHM_H_
#define JAXCOLL_TRANSPORT_SHM_H_

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "transport/link.h"
#include "transport/shm_slab.h"

namespace jaxcoll {

struct ShmSegment;  // the layout in shared memory, shm_layout.h
struct ShmRing;

class ShmTransport;

class ShmLink final : public Link {
 public:
  ShmLink(ShmTransport* transport, int process, int place, pid_t pid, ShmSegment* theirs, ShmRing* out, ShmRing* in,
          bool can_read);
  const char* name() const override { return can_read() ? "shm (reads in place)" : "shm (ring)"; }
  // Both ends must choose the same way, so each must be able to read the other.
  bool can_read() const override;
  size_t eager_limit() const override;
  size_t offer_limit() const override;
  bool Send(const Header& header, const Span* payload, size_t spans) override;
  void Stream(const Header& header, const std::vector<Span>& payload, uint64_t token) override;
  Status Read(const RemoteSpan* from, size_t spans, void* to, size_t size) override;
  bool Withdrawn(const OpKey& key, uint64_t since) const override;
  uint64_t withdrawals() const override;
  int Forget(const OpKey& key, int rank) override;
  bool idle() override { return !has_pending_; }
  Slab* slab() override;
  void Lend(uint64_t block) override;
  void PeerGone() override;
  const void* Posted(const RemoteSpan& block) override;
  void ReleasePosted(const RemoteSpan& block) override;

 private:
  friend class ShmTransport;
  struct Pending {
    Header header;
    std::vector<uint8_t> owned;  // the payload of a Send that didn't fit
    std::vector<Span> stream;    // a Stream's pieces, in the caller's memory
    size_t next = 0;             // the first of them that isn't written; it begins where the last fragment ended
    uint64_t token = 0;
    bool streaming = false;
    size_t held() const { return streaming ? 0 : sizeof(Pending) + owned.size(); }
  };
  bool TryWrite(const Header& header, const Span* payload, size_t spans, size_t bytes);  // under mu_
  // The same. Where there is no room now, the reader rings when there is.
  bool WriteOrAsk(const Header& header, const Span* payload, size_t spans, size_t bytes);
  bool Flush(std::vector<uint64_t>* sent);  // under mu_; whether the queue is empty now
  bool WriteFragment(Pending* p);           // under mu_

  ShmTransport* const transport_;
  const int place_;  // the peer's
  const pid_t pid_;
  ShmSegment* const theirs_;
  ShmRing* const out_;
  ShmRing* const in_;
  const bool can_read_;
  std::mutex mu_;
  std::deque<Pending> pending_;
  std::atomic<bool> has_pending_{false};
  bool gone_ = false;  // nobody reads the ring any more
};

class ShmTransport final : public Pollable {
 public:
  // `fd` is this process's segment (a memfd of SegmentBytes(places)); `place` its number among the processes of this
  // host.
  static size_t SegmentBytes(int places);
  static Status Create(int fd, int places, int place, std::unique_ptr<ShmTransport>* out);
  ~ShmTransport() override;

  // Maps a peer's segment and joins the two. Both segments must have been created. `allow_read`: try process_vm_readv.
  Status AddPeer(int fd, int process, int place, pid_t pid, bool allow_read, std::unique_ptr<ShmLink>* out);
  void Run(LinkSink* sink, bool thread);
  void Stop();

  bool Poll() override;
  bool carries_data() const override { return !links_.empty(); }
  void Wait(uint32_t messages, int64_t timeout_ns, const std::atomic<bool>& over) override;
  void Wake() override;
  void Polling(int delta) override;
  void SetBusy(bool busy) override;
  void Withdraw(const OpKey& key) override;

 private:
  friend class ShmLink;
  ShmTransport(ShmSegment* mine, int places, int place);
  bool Drain(ShmLink* link);
  bool AnyWork() const;  // messages that didn't fit wait for room
  bool AnyRoom() const;  // for some of them there may be room now
  bool AnyInbound() const;
  void Sleep(uint32_t bell, uint32_t wake_at, int64_t timeout_ns);
  void ServiceLoop();
  void Kick();

  ShmSegment* const mine_;
  const int places_, place_;
  ShmSlab slab_;
  LinkSink* sink_ = nullptr;
  std::vector<ShmLink*> links_;
  std::vector<ShmSegment*> mapped_;
  std::mutex poll_mu_;
  std::mutex wait_mu_, sleep_mu_;
  std::condition_variable wait_cv_;
  std::atomic<int> pollers_{0};
  std::atomic<bool> busy_{false}, stopping_{false};
  std::thread thread_;
};

}  // namespace jaxcoll

#endif  // JAXCOLL_TRANSPORT_SHM_H_
