#include "transport/tcp.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"

namespace jaxcoll {
namespace {

constexpr size_t kEagerLimit = size_t{16} << 10;
constexpr size_t kFragment = size_t{256} << 10;
constexpr size_t kBuffer = size_t{64} << 10;
constexpr int kReadRounds = 16;  // of one connection before the others get their turn

const std::vector<uint8_t>& Zeros() {
  static const std::vector<uint8_t> zeros(kFragment);
  return zeros;
}

}  // namespace

TcpLink::TcpLink(TcpTransport* transport, int process, const std::vector<int>& fds) : Link(process), transport_(transport) {
  for (int fd : fds) {
    auto c = std::make_unique<Conn>();
    c->fd = fd;
    c->buffer.resize(kBuffer);
    conns_.push_back(std::move(c));
  }
}

TcpLink::~TcpLink() {
  for (auto& c : conns_)
    if (c->fd >= 0) close(c->fd);
}

size_t TcpLink::eager_limit() const { return kEagerLimit; }

Status TcpLink::Read(const RemoteSpan*, size_t, void*, size_t) { return Status::Error("tcp can't read a peer's memory"); }

void TcpLink::Send(const Header& header, const Span* payload, size_t spans) {
  if (down_) return;
  Item item;
  item.header = header;
  for (size_t i = 0; i < spans; ++i) {
    const auto* p = static_cast<const uint8_t*>(payload[i].data);
    item.owned.insert(item.owned.end(), p, p + payload[i].size);
  }
  item.header.payload = static_cast<uint32_t>(item.owned.size());
  item.spans = {{nullptr, item.owned.size()}};
  Push(conns_[0].get(), std::move(item));
}

void TcpLink::Push(Conn* c, Item item) {
  item.total = sizeof(Header) + item.header.payload;
  std::vector<uint64_t> sent;
  bool ok = true;
  {
    std::lock_guard<std::mutex> lock(c->write_mu);
    bool first = c->queue.empty();
    c->queue.push_back(std::move(item));
    if (!c->queue.back().owned.empty()) c->queue.back().spans[0].data = c->queue.back().owned.data();
    // What the socket takes goes out at once. The end of a stream is told by whoever polls next: OnSent may not be called from here.
    if (first) ok = Write(c, &sent);
    if (!c->queue.empty()) transport_->Arm(c, true);
  }
  if (!sent.empty()) transport_->SentLater(this, sent);
  if (!ok) {
    cant_write_ = true;
    transport_->Kick();
  }
}

void TcpLink::Stream(const Header& header, const std::vector<Span>& payload, uint64_t token) {
  if (down_) return;  // its operation fails, or has failed
  size_t total = 0;
  for (const Span& s : payload) total += s.size;
  size_t fragments = (total + kFragment - 1) / kFragment;
  auto state = std::make_shared<StreamState>();
  state->token = token;
  state->left = static_cast<int>(fragments);
  size_t at_span = 0, skip = 0, first = Mix64(header.transfer * 64 + header.lane) % conns_.size();
  for (size_t f = 0; f < fragments; ++f) {
    Item item;
    item.header = header;
    item.header.offset = f * kFragment;
    item.stream = state;
    size_t want = std::min(kFragment, total - f * kFragment);
    item.header.payload = static_cast<uint32_t>(want);
    while (want > 0) {
      const Span& s = payload[at_span];
      size_t take = std::min(want, s.size - skip);
      if (take > 0) item.spans.push_back({static_cast<const uint8_t*>(s.data) + skip, take});
      want -= take;
      skip += take;
      if (skip == s.size) {
        ++at_span;
        skip = 0;
      }
    }
    Push(conns_[(first + f) % conns_.size()].get(), std::move(item));
  }
}

bool TcpLink::Write(Conn* c, std::vector<uint64_t>* sent) {
  constexpr size_t kMaxIov = 64;
  while (!c->queue.empty()) {
    Item& item = c->queue.front();
    iovec iov[kMaxIov];
    size_t n = 0, skip = item.written;
    auto add = [&](const void* data, size_t size) {
      if (skip >= size) {
        skip -= size;
        return;
      }
      if (n < kMaxIov) iov[n++] = {const_cast<uint8_t*>(static_cast<const uint8_t*>(data)) + skip, size - skip};
      skip = 0;
    };
    add(&item.header, sizeof(Header));
    for (const Span& s : item.spans) add(s.data, s.size);
    msghdr message{};
    message.msg_iov = iov;
    message.msg_iovlen = n;
    ssize_t put = sendmsg(c->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK;
    }
    item.written += static_cast<size_t>(put);
    if (item.written < item.total) continue;
    if (item.stream && item.stream->left.fetch_sub(1) == 1) sent->push_back(item.stream->token);
    c->queue.pop_front();
  }
  return true;
}

int TcpLink::Forget(const OpKey& key, int rank) {
  int released = 0;
  for (auto& c : conns_) {
    {
      std::lock_guard<std::mutex> lock(c->write_mu);
      for (size_t i = 0; i < c->queue.size();) {
        Item& item = c->queue[i];
        if (!item.stream || !(item.header.key == key) || item.header.src != rank) {
          ++i;
        } else if (item.written == 0) {
          c->queue.erase(c->queue.begin() + static_cast<ptrdiff_t>(i));
        } else {
          // Under way: the frame must be completed, with bytes that are not the caller's.
          item.spans = {{Zeros().data(), item.header.payload}};
          item.stream = nullptr;
          ++i;
        }
      }
    }
    std::lock_guard<std::mutex> lock(c->read_mu);
    if (c->landing && !c->discard && c->header.key == key && c->header.dst == rank) {
      c->discard = true;
      c->target.clear();
      ++released;
    }
  }
  return released;
}

// Reads into the buffer what the socket has, unless a payload is landing.
bool TcpLink::Fill(Conn* c, bool* any, bool* drained) {
  if (c->begin == c->end) c->begin = c->end = 0;
  if (c->begin > 0 && c->end == c->buffer.size()) {
    memmove(c->buffer.data(), c->buffer.data() + c->begin, c->end - c->begin);
    c->end -= c->begin;
    c->begin = 0;
  }
  if (c->end == c->buffer.size()) c->buffer.resize(c->buffer.size() * 2);  // a long message; bounded by kMaxPayload
  size_t room = c->buffer.size() - c->end;
  ssize_t got = recv(c->fd, c->buffer.data() + c->end, room, MSG_DONTWAIT);
  if (got == 0) {
    c->ended = *drained = true;
    if (c->begin != c->end) fault_ = "its connection has closed in the middle of a message";
    return c->begin == c->end;
  }
  if (got < 0) {
    if (errno == EINTR) return true;
    *drained = true;
    return errno == EAGAIN || errno == EWOULDBLOCK;
  }
  *any = true;
  *drained = static_cast<size_t>(got) < room;
  c->end += static_cast<size_t>(got);
  return true;
}

bool TcpLink::Parse(Conn* c, bool* any) {
  LinkSink* sink = transport_->sink_;
  while (!c->landing && c->end - c->begin >= sizeof(Header)) {
    Header h;
    memcpy(&h, c->buffer.data() + c->begin, sizeof(h));
    if (h.magic != Header::kMagic || h.payload > kMaxPayload) {
      fault_ = h.magic != Header::kMagic ? "it sent bytes that are no jaxcoll message" : "it sent a message that is too long";
      return false;
    }
    if (h.type == MessageType::kData) {
      std::vector<MutableSpan> target = sink->OnData(this, h);
      std::lock_guard<std::mutex> lock(c->read_mu);
      c->begin += sizeof(Header);
      c->header = h;
      c->landing = true;
      c->discard = target.empty();
      c->target = std::move(target);
      c->landing_left = h.payload;
      return true;
    }
    if (c->end - c->begin < sizeof(Header) + h.payload) return true;
    const uint8_t* payload = c->buffer.data() + c->begin + sizeof(Header);
    *any = true;
    if (h.type == MessageType::kGoodbye)
      left_ = true;
    else
      sink->OnMessage(this, h, payload);
    c->begin += sizeof(Header) + h.payload;
  }
  return true;
}

bool TcpLink::Land(Conn* c, bool* any, bool* drained) {
  LinkSink* sink = transport_->sink_;
  bool done = false, report = false, ok = true;
  Header h;
  {
    std::lock_guard<std::mutex> lock(c->read_mu);
    // First what the buffer holds already, then from the socket into place.
    while (c->landing_left > 0 && ok && !*drained) {
      size_t held = c->end - c->begin;
      if (held > 0) {
        size_t take = std::min(held, c->landing_left);
        const uint8_t* from = c->buffer.data() + c->begin;
        if (c->discard) {
          c->landing_left -= take;
        } else {
          MutableSpan& s = c->target.front();
          take = std::min(take, s.size);
          memcpy(s.data, from, take);
          s.data = static_cast<uint8_t*>(s.data) + take;
          s.size -= take;
          if (s.size == 0) c->target.erase(c->target.begin());
          c->landing_left -= take;
        }
        c->begin += take;
        *any = true;
        continue;
      }
      ssize_t got;
      if (c->discard) {
        c->begin = c->end = 0;
        got = recv(c->fd, c->buffer.data(), std::min(c->buffer.size(), c->landing_left), MSG_DONTWAIT);
      } else {
        iovec iov[64];
        size_t n = std::min<size_t>(64, c->target.size());
        for (size_t i = 0; i < n; ++i) iov[i] = {c->target[i].data, c->target[i].size};
        msghdr message{};
        message.msg_iov = iov;
        message.msg_iovlen = n;
        got = recvmsg(c->fd, &message, MSG_DONTWAIT);
      }
      if (got == 0) {
        fault_ = "its connection has closed in the middle of a message";
        ok = false;
      } else if (got < 0) {
        if (errno == EINTR) continue;
        *drained = true;
        ok = errno == EAGAIN || errno == EWOULDBLOCK;
      } else {
        *any = true;
        c->landing_left -= static_cast<size_t>(got);
        for (auto left = static_cast<size_t>(got); left > 0 && !c->discard;) {
          MutableSpan& s = c->target.front();
          size_t take = std::min(left, s.size);
          s.data = static_cast<uint8_t*>(s.data) + take;
          s.size -= take;
          left -= take;
          if (s.size == 0) c->target.erase(c->target.begin());
        }
      }
    }
    if (c->landing_left == 0) {
      done = true;
      report = !c->discard;
      h = c->header;
      c->landing = false;
      c->target.clear();
    } else if (!ok && !c->discard) {
      // The connection breaks in the middle: the memory is let go with it.
      report = true;
      h = c->header;
      h.payload = 0;
      c->discard = true;
      c->target.clear();
    }
  }
  if (report) sink->OnLanded(this, h);
  return ok || done;
}

bool TcpLink::ReadSome(Conn* c, bool* any) {
  bool drained = false;
  for (int round = 0; round < kReadRounds && !drained; ++round) {
    if (c->landing) {
      if (!Land(c, any, &drained)) return false;
    } else {
      if (!Fill(c, any, &drained)) return false;
    }
    if (!Parse(c, any)) return false;
    while (c->landing && c->end > c->begin) {
      bool blocked = false;
      if (!Land(c, any, &blocked) || !Parse(c, any)) return false;
      if (blocked) break;
    }
  }
  return true;
}

Status TcpTransport::Create(std::unique_ptr<TcpTransport>* out) {
  int epoll_fd = epoll_create1(EPOLL_CLOEXEC), wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (epoll_fd < 0 || wake_fd < 0) return Status::Error(Format("epoll: %s", strerror(errno)));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = ~uint64_t{0};
  epoll_ctl(epoll_fd, EPOLL_CTL_ADD, wake_fd, &event);
  out->reset(new TcpTransport(epoll_fd, wake_fd));
  return {};
}

TcpTransport::~TcpTransport() {
  Stop();
  close(epoll_fd_);
  close(wake_fd_);
}

Status TcpTransport::AddPeer(int process, const std::vector<int>& fds, bool carries_data, std::unique_ptr<TcpLink>* out) {
  auto link = std::make_unique<TcpLink>(this, process, fds);
  for (auto& c : link->conns_) {
    int one = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));  // fails on a UNIX socket, where nothing is delayed
    fcntl(c->fd, F_SETFL, fcntl(c->fd, F_GETFL) | O_NONBLOCK);
    slots_.push_back({link.get(), c.get()});
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = slots_.size() - 1;
    if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, c->fd, &event) != 0)
      return Status::Error(Format("connection to process %d: %s", process, strerror(errno)));
  }
  carries_data_ = carries_data_ || carries_data;
  links_.push_back(link.get());
  *out = std::move(link);
  return {};
}

void TcpTransport::Arm(TcpLink::Conn* c, bool on) {
  if (c->armed == on || c->fd < 0) return;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].conn != c) continue;
    epoll_event event{};
    event.events = on ? EPOLLIN | EPOLLOUT : EPOLLIN;
    event.data.u64 = i;
    epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, c->fd, &event);
    c->armed = on;
    return;
  }
}

void TcpTransport::Run(LinkSink* sink, bool thread) {
  sink_ = sink;
  if (thread) thread_ = std::thread([this] { ServiceLoop(); });
}

void TcpTransport::Stop() {
  if (stopping_.exchange(true)) return;
  Header goodbye;
  for (TcpLink* link : links_) link->Send(goodbye, nullptr, 0);
  Kick();
  {
    std::lock_guard<std::mutex> lock(wait_mu_);
  }
  wait_cv_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void TcpTransport::SentLater(TcpLink* link, const std::vector<uint64_t>& tokens) {
  {
    std::lock_guard<std::mutex> lock(sent_mu_);
    for (uint64_t t : tokens) sent_.emplace_back(link, t);
    any_sent_ = true;
  }
  if (pollers_ == 0) Kick();
}

bool TcpTransport::ReportSent() {
  if (!any_sent_.load(std::memory_order_relaxed)) return false;
  std::vector<std::pair<TcpLink*, uint64_t>> sent;
  {
    std::lock_guard<std::mutex> lock(sent_mu_);
    sent.swap(sent_);
    any_sent_ = false;
  }
  for (auto [link, token] : sent) sink_->OnSent(link, token);
  return !sent.empty();
}

void TcpTransport::Kick() {
  uint64_t one = 1;
  if (write(wake_fd_, &one, sizeof(one)) < 0) return;  // full: it is awake anyway
}

// A process that leaves closes all its connections, one after the other, and what it has sent on the others is still to be read.
void TcpTransport::Ended(TcpLink* link, TcpLink::Conn* c) {
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, c->fd, nullptr);
  bool all = true;
  for (auto& other : link->conns_) all = all && other->ended;
  if (all) Down(link);
}

void TcpTransport::Down(TcpLink* link) {
  if (link->down_.exchange(true)) return;
  for (auto& c : link->conns_) {
    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, c->fd, nullptr);
    shutdown(c->fd, SHUT_RDWR);
    Header h;
    bool release = false;
    {
      std::lock_guard<std::mutex> lock(c->read_mu);
      release = c->landing && !c->discard;
      c->discard = true;
      c->target.clear();
      h = c->header;
      h.payload = 0;
    }
    if (release) sink_->OnLanded(link, h);
  }
  if (!stopping_) sink_->OnLinkDown(link, link->left_ ? "its process has left" : link->fault_);
}

bool TcpTransport::HandleEvents(int timeout_ms) {
  epoll_event events[64];
  int n = epoll_wait(epoll_fd_, events, 64, timeout_ms);
  bool any = false;
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u64 == ~uint64_t{0}) {
      uint64_t count;
      if (read(wake_fd_, &count, sizeof(count)) < 0) continue;
      for (TcpLink* link : links_)
        if (link->cant_write_ && !link->left_ && !link->down_) Down(link);
      continue;
    }
    Slot slot = slots_[events[i].data.u64];
    if (slot.link->down_) continue;
    bool ok = true;
    if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) ok = slot.link->ReadSome(slot.conn, &any);
    if (ok && (events[i].events & EPOLLOUT)) {
      std::vector<uint64_t> sent;
      {
        std::lock_guard<std::mutex> lock(slot.conn->write_mu);
        ok = slot.link->Write(slot.conn, &sent);
        if (!ok && slot.link->left_) {  // nobody wants it any more, but what the peer has sent may not have been read yet
          slot.conn->queue.clear();
          ok = true;
        }
        if (slot.conn->queue.empty()) Arm(slot.conn, false);
      }
      any = true;
      for (uint64_t token : sent) sink_->OnSent(slot.link, token);
    }
    if (!ok)
      Down(slot.link);
    else if (slot.conn->ended)
      Ended(slot.link, slot.conn);
  }
  return any;
}

bool TcpTransport::Poll() {
  std::unique_lock<std::mutex> lock(poll_mu_, std::try_to_lock);
  bool any = ReportSent();
  return (lock.owns_lock() && HandleEvents(0)) || any;
}

void TcpTransport::Wait(uint32_t, int64_t timeout_ns) {
  if (any_sent_) return;
  epoll_event peek;
  epoll_wait(epoll_fd_, &peek, 1, static_cast<int>(std::max<int64_t>(1, timeout_ns / 1000000)));
}

void TcpTransport::Polling(int delta) {
  if (pollers_.fetch_add(delta) + delta == 0 && carries_data_) {
    {
      std::lock_guard<std::mutex> lock(wait_mu_);
    }
    wait_cv_.notify_one();
  }
}

void TcpTransport::SetBusy(bool) {}

void TcpTransport::ServiceLoop() {
  while (!stopping_) {
    if (carries_data_ && pollers_ > 0) {
      std::unique_lock<std::mutex> lock(wait_mu_);
      wait_cv_.wait_for(lock, std::chrono::milliseconds(50), [&] { return stopping_ || pollers_ == 0; });
      continue;
    }
    // Wait without the lock, so that a poller never stands behind a sleeper; then take the events.
    epoll_event peek;
    if (epoll_wait(epoll_fd_, &peek, 1, 200) <= 0) continue;
    std::unique_lock<std::mutex> lock(poll_mu_);
    bool any = HandleEvents(0);
    lock.unlock();
    any = ReportSent() || any;
    if (any) sink_->Work();
  }
}

}  // namespace jaxcoll
