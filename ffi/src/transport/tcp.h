// Processes of other hosts: several TCP connections per pair, connected and authenticated by the caller (Python), which
// hands over the descriptors. Connection 0 carries the small messages, before whatever else waits there; a large
// transfer is cut into fragments over all of them, written from and read into the caller's memory without a copy of
// ours. Between processes of one host the same class is the life line: its end says that the peer is gone.
#ifndef JAXCOLL_TRANSPORT_TCP_H_
#define JAXCOLL_TRANSPORT_TCP_H_

#include <sys/uio.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "transport/arrivals.h"
#include "transport/descriptor.h"
#include "transport/link.h"

namespace jaxcoll {

class TcpTransport;

class TcpLink final : public Link {
 public:
  TcpLink(TcpTransport* transport, int process, const std::vector<int>& fds);
  const char* name() const override { return "tcp"; }
  bool can_read() const override { return false; }
  size_t eager_limit() const override;
  bool Send(const Header& header, const Span* payload, size_t spans) override;
  void Stream(const Header& header, const std::vector<Span>& payload, uint64_t token) override;
  Status Read(const RemoteSpan* from, size_t spans, void* to, size_t size) override;
  int Forget(const OpKey& key, int rank) override;
  bool idle() override;

 private:
  friend class TcpTransport;
  struct StreamState {
    uint64_t token;
    std::atomic<int> left;  // fragments not yet written
  };
  struct Item {
    Header header;
    std::vector<uint8_t> owned;
    std::vector<Span> spans;
    size_t written = 0, total = 0;   // bytes of header and payload
    size_t next = 0, next_from = 0;  // the first span that isn't written, and the byte of it
    size_t held = 0;                 // bytes of ours: none where the payload is the caller's
    std::shared_ptr<StreamState> stream;
  };
  struct Conn {
    explicit Conn(int descriptor) : fd(descriptor) {}
    const Descriptor fd;
    bool tcp = false;    // not a UNIX socket
    bool armed = false;  // EPOLLOUT is on
    bool ended = false;  // the peer has closed it
    std::mutex write_mu, read_mu;
    std::deque<Item> messages, streams;  // the farewell is the last of the streams
    // The one whose first item is written next: what is begun is finished, then messages go first. Null: none.
    std::deque<Item>* Next();
    // Reading: bytes that have come, then, for a kData payload, straight into its target.
    std::vector<uint8_t> buffer;
    size_t begin = 0, end = 0;
    bool landing = false, discard = false;
    Header header;
    std::vector<MutableSpan> target;
    size_t target_at = 0;  // those before it are full
    size_t landing_left = 0;
    uint64_t read = 0;  // bytes of the stream, those in the buffer included
    bool dry = false;   // the last read took all that had come
    Arrivals arrivals;
    int small = 0;  // so many bytes may wait for an acknowledgement although they have come
  };
  void Push(Conn* c, Item item);
  void Drop(Conn* c);  // what waits to be written: nobody will take it; under write_mu
  static size_t Unwritten(const Item& item, iovec* iov, size_t most);  // the next pieces; how many
  static void Wrote(Item* item, size_t bytes);
  static size_t Own(Item* item);  // what is still to be written becomes ours; how many bytes that holds
  // Writes what the socket takes. Finished streams are added to `sent`. False: the connection is broken.
  bool Write(Conn* c, std::vector<uint64_t>* sent);
  bool ReadSome(Conn* c, bool* any);
  bool Fill(Conn* c, bool* any, bool* drained);
  bool Parse(Conn* c, bool* any);
  bool Land(Conn* c, bool* any, bool* drained);
  ssize_t ReadInto(Conn* c, iovec* to, size_t count);
  ssize_t Receive(Conn* c);
  void Sample(Conn* c, int64_t stamp_ns);
  bool UnderWay() const;               // whether the peer has yet to get something
  void Landed(Conn* c, size_t bytes);  // so many more of the payload are in place

  TcpTransport* const transport_;
  std::vector<std::unique_ptr<Conn>> conns_;
  std::atomic<bool> down_{false};
  std::atomic<bool> left_{false};  // the peer has said goodbye
  std::atomic<bool> cant_write_{false};
  Came came_;                                        // of the polling thread
  const char* fault_ = "its connection has closed";  // why it goes down; of the polling thread
};

class TcpTransport final : public Pollable {
 public:
  // `timeout_ns`: how long a collective waits for a peer.
  static Status Create(int64_t timeout_ns, std::unique_ptr<TcpTransport>* out);
  ~TcpTransport() override;
  // Takes the descriptors over. `carries_data`: false when another link moves the transfers to this process.
  Status AddPeer(int process, const std::vector<int>& fds, bool carries_data, std::unique_ptr<TcpLink>* out);
  void Run(LinkSink* sink, bool thread);
  void Stop();
  bool Poll() override;
  bool carries_data() const override { return carries_data_; }
  void Wait(uint32_t messages, int64_t timeout_ns, const std::atomic<bool>& over) override;
  void Wake() override;
  void Polling(int delta) override;
  void SetBusy(bool busy) override;

 private:
  friend class TcpLink;
  TcpTransport(int epoll_fd, int wake_fd, int end_fd, int64_t silence_ms)
      : epoll_fd_(epoll_fd), wake_fd_(wake_fd), end_fd_(end_fd), silence_ms_(silence_ms) {}
  struct Slot {
    TcpLink* link;
    TcpLink::Conn* conn;
  };
  bool HandleEvents(int timeout_ms);
  void Arm(TcpLink::Conn* c, bool on);
  void Down(TcpLink* link);
  void Ended(TcpLink* link, TcpLink::Conn* c);
  void Kick();
  void FindSilent();  // takes down what leads to hosts that don't answer
  // Streams whose last byte went out where OnSent could not be called; the next poll reports them.
  void SentLater(TcpLink* link, const std::vector<uint64_t>& tokens);
  bool ReportSent();
  void ServiceLoop();

  // `wake_fd_` wakes whoever polls; `end_fd_` all who sleep in Wait, the last of whom reads it.
  const Descriptor epoll_fd_, wake_fd_, end_fd_;
  const int64_t silence_ms_;  // after which a host that doesn't answer is lost
  LinkSink* sink_ = nullptr;
  std::deque<Slot> slots_;
  std::vector<TcpLink*> links_;
  std::atomic<bool> carries_data_{false}, to_flush_{false};
  std::mutex poll_mu_, wait_mu_, sleep_mu_;
  int sleepers_ = 0;    // under sleep_mu_
  bool ended_ = false;  // under sleep_mu_: end_fd_ is readable
  std::condition_variable wait_cv_;
  std::mutex sent_mu_;
  std::vector<std::pair<TcpLink*, uint64_t>> sent_;
  std::atomic<bool> any_sent_{false};
  std::atomic<int> pollers_{0};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace jaxcoll

#endif  // JAXCOLL_TRANSPORT_TCP_H_
