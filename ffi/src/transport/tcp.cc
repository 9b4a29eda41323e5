// All peers together: epoll, threads, and the end of connections.
#include "transport/tcp.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/clock.h"
#include "transport/silence.h"

namespace jaxcoll {
namespace {

constexpr int64_t kLookNs = 1000000000;  // between two looks for hosts that don't answer

bool IsTcp(int fd) {
  int protocol = 0;
  socklen_t size = sizeof(protocol);
  return getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) == 0 && protocol == IPPROTO_TCP;
}

}  // namespace

Status TcpTransport::Create(int64_t timeout_ns, std::unique_ptr<TcpTransport>* out) {
  int epoll_fd = epoll_create1(EPOLL_CLOEXEC), wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC),
      end_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (epoll_fd < 0 || wake_fd < 0 || end_fd < 0) return Status::Error(Format("epoll: %s", strerror(errno)));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = ~uint64_t{0};
  epoll_ctl(epoll_fd, EPOLL_CTL_ADD, wake_fd, &event);
  out->reset(new TcpTransport(epoll_fd, wake_fd, end_fd, SilenceMs(timeout_ns)));
  return {};
}

TcpTransport::~TcpTransport() { Stop(); }

Status TcpTransport::AddPeer(int process, const std::vector<int>& fds, bool carries_data,
                             std::unique_ptr<TcpLink>* out) {
  auto link = std::make_unique<TcpLink>(this, process, fds);
  for (auto& c : link->conns_) {
    c->tcp = IsTcp(c->fd);
    if (c->tcp) KeepAlive(c->fd, silence_ms_);
    int one = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));  // fails on a UNIX socket, where nothing is delayed
    setsockopt(c->fd, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof(one));
    socklen_t size = sizeof(c->small);  // a receiver may keep back the acknowledgement of a segment
    getsockopt(c->fd, IPPROTO_TCP, TCP_MAXSEG, &c->small, &size);
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
  // The peers read this end behind all that was sent, and know that nothing more comes: the process may live on for
  // long.
  for (TcpLink* link : links_)
    for (auto& c : link->conns_) {
      std::lock_guard<std::mutex> lock(c->write_mu);
      shutdown(c->fd, SHUT_WR);
    }
}

void TcpTransport::SentLater(TcpLink* link, const std::vector<uint64_t>& tokens) {
  {
    std::lock_guard<std::mutex> lock(sent_mu_);
    for (uint64_t t : tokens) sent_.emplace_back(link, t);
    any_sent_ = true;
  }
  if (pollers_ == 0)
    Kick();
  else
    Wake();
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

// A process that leaves closes all its connections, one after the other, and what it has sent on the others is still to
// be read.
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
    {
      std::lock_guard<std::mutex> lock(c->write_mu);
      link->Drop(c.get());
    }
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
    if (release) sink_->OnLanded(link, h, {});
  }
  if (!stopping_) sink_->OnLinkDown(link, link->left_ ? kLeftInOrder : link->fault_);
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
        if (!ok &&
            slot.link->left_) {  // nobody wants it any more, but what the peer has sent may not have been read yet
          slot.link->Drop(slot.conn);
          ok = true;
        }
        if (slot.conn->Next() == nullptr) Arm(slot.conn, false);
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

void TcpTransport::Wait(uint32_t, int64_t timeout_ns, const std::atomic<bool>& over) {
  {
    std::lock_guard<std::mutex> lock(sleep_mu_);
    ++sleepers_;
  }
  // What ends from here on makes end_fd_ readable. All sleepers see that; of an event in the epoll set one takes it,
  // and the others sleep on.
  if (!any_sent_ && !over) {
    pollfd ready[] = {{epoll_fd_, POLLIN, 0}, {end_fd_, POLLIN, 0}};
    timespec timeout{static_cast<time_t>(timeout_ns / 1000000000), static_cast<long>(timeout_ns % 1000000000)};
    ppoll(ready, 2, &timeout, nullptr);
  }
  std::lock_guard<std::mutex> lock(sleep_mu_);
  uint64_t count;
  if (--sleepers_ == 0 && ended_) ended_ = read(end_fd_, &count, sizeof(count)) < 0;
}

void TcpTransport::Wake() {
  std::lock_guard<std::mutex> lock(sleep_mu_);
  uint64_t one = 1;
  if (sleepers_ > 0 && !ended_) ended_ = write(end_fd_, &one, sizeof(one)) > 0;
}

void TcpTransport::Polling(int delta) {
  if (pollers_.fetch_add(delta) + delta != 0) return;
  if (carries_data_) {
    {
      std::lock_guard<std::mutex> lock(wait_mu_);
    }
    wait_cv_.notify_one();
  }
  // What was sent after this poller's last look was left to it by SentLater: nothing else would wake the service for
  // it.
  if (any_sent_) Kick();
}

void TcpTransport::SetBusy(bool) {}

void TcpTransport::FindSilent() {
  std::lock_guard<std::mutex> lock(poll_mu_);
  for (const Slot& slot : slots_) {
    tcp_info info{};
    socklen_t size = sizeof(info);
    if (!slot.conn->tcp || slot.link->down_ || getsockopt(slot.conn->fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 ||
        !IsSilent(info, silence_ms_))
      continue;
    slot.link->fault_ = kSilent;
    Down(slot.link);
  }
}

void TcpTransport::ServiceLoop() {
  int64_t look_ns = NowNs() + kLookNs;
  while (!stopping_) {
    if (int64_t now = NowNs(); now >= look_ns) {
      look_ns = now + kLookNs;
      FindSilent();
    }
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
