// One peer: what is written, and what is read.
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "transport/silence.h"
#include "transport/tcp.h"

namespace jaxcoll {
namespace {

constexpr size_t kEagerLimit = size_t{16} << 10;
constexpr size_t kFragment = size_t{256} << 10;
constexpr size_t kBuffer = size_t{64} << 10;
constexpr size_t kControl = 1024;  // bytes that say something about the transfers, and carry none
constexpr int kReadRounds = 16;    // of one connection before the others get their turn

}  // namespace

TcpLink::TcpLink(TcpTransport* transport, int process, const std::vector<int>& fds)
    : Link(process), transport_(transport) {
  for (int fd : fds) {
    auto c = std::make_unique<Conn>(fd);
    c->buffer.resize(kBuffer);
    conns_.push_back(std::move(c));
  }
}

size_t TcpLink::eager_limit() const { return kEagerLimit; }

Status TcpLink::Read(const RemoteSpan*, size_t, void*, size_t) {
  return Status::Error("tcp can't read a peer's memory");
}

bool TcpLink::Send(const Header& header, const Span* payload, size_t spans) {
  if (down_) return true;  // its operation fails, or has failed
  Item item;
  item.header = header;
  for (size_t i = 0; i < spans; ++i) {
    const auto* p = static_cast<const uint8_t*>(payload[i].data);
    item.owned.insert(item.owned.end(), p, p + payload[i].size);
  }
  if (item.owned.size() > kMaxPayload) return false;
  item.header.payload = static_cast<uint32_t>(item.owned.size());
  item.spans = {{nullptr, item.owned.size()}};
  item.held = sizeof(Item) + item.owned.size();
  Push(conns_[0].get(), std::move(item));
  return true;
}

std::deque<TcpLink::Item>* TcpLink::Conn::Next() {
  if (!streams.empty() && (streams.front().written > 0 || messages.empty())) return &streams;
  return messages.empty() ? nullptr : &messages;
}

void TcpLink::Push(Conn* c, Item item) {
  item.total = sizeof(Header) + item.header.payload;
  std::vector<uint64_t> sent;
  bool ok = true;
  {
    std::lock_guard<std::mutex> lock(c->write_mu);
    if (down_) return;
    bool first = c->Next() == nullptr;
    held_ += item.held;
    bool waits = item.stream != nullptr || item.header.type == MessageType::kGoodbye;
    std::deque<Item>& queue = waits ? c->streams : c->messages;
    queue.push_back(std::move(item));
    if (!queue.back().owned.empty()) queue.back().spans[0].data = queue.back().owned.data();
    // What the socket takes goes out at once. The end of a stream is told by whoever polls next: OnSent may not be
    // called from here.
    if (first) ok = Write(c, &sent);
    if (c->Next() != nullptr) transport_->Arm(c, true);
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
    item.header.follows = f > 0 || UnderWay() ? 1 : 0;
    Push(conns_[(first + f) % conns_.size()].get(), std::move(item));
  }
}

bool TcpLink::UnderWay() const {
  for (const auto& c : conns_) {
    int unacknowledged = 0;
    if (ioctl(c->fd, SIOCOUTQ, &unacknowledged) == 0 && unacknowledged > c->small) return true;
  }
  return false;
}

size_t TcpLink::Unwritten(const Item& item, iovec* iov, size_t most) {
  size_t n = 0, from = item.next_from;
  auto add = [&](const void* data, size_t size, size_t skip) {
    if (size > skip) iov[n++] = {const_cast<uint8_t*>(static_cast<const uint8_t*>(data)) + skip, size - skip};
  };
  add(&item.header, sizeof(Header), std::min(item.written, sizeof(Header)));
  for (size_t i = item.next; i < item.spans.size() && n < most; ++i)
    add(item.spans[i].data, item.spans[i].size, std::exchange(from, 0));
  return n;
}

void TcpLink::Wrote(Item* item, size_t bytes) {
  size_t of_header = std::min(bytes, sizeof(Header) - std::min(item->written, sizeof(Header)));
  item->written += bytes;
  for (size_t left = bytes - of_header; left > 0;) {
    size_t take = std::min(left, item->spans[item->next].size - item->next_from);
    item->next_from += take;
    left -= take;
    if (item->next_from < item->spans[item->next].size) return;
    ++item->next;
    item->next_from = 0;
  }
}

bool TcpLink::Write(Conn* c, std::vector<uint64_t>* sent) {
  constexpr size_t kMaxIov = 64;
  while (std::deque<Item>* queue = c->Next()) {
    Item& item = queue->front();
    iovec iov[kMaxIov];
    msghdr message{};
    message.msg_iov = iov;
    message.msg_iovlen = Unwritten(item, iov, kMaxIov);
    ssize_t put = sendmsg(c->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK;
    }
    Wrote(&item, static_cast<size_t>(put));
    if (item.written < item.total) continue;
    if (item.stream && item.stream->left.fetch_sub(1) == 1) sent->push_back(item.stream->token);
    held_ -= item.held;
    queue->pop_front();
  }
  return true;
}

void TcpLink::Drop(Conn* c) {
  for (std::deque<Item>* queue : {&c->messages, &c->streams}) {
    for (const Item& item : *queue) held_ -= item.held;
    queue->clear();
  }
}

bool TcpLink::idle() {
  bool idle = true;
  for (auto& c : conns_) {
    std::lock_guard<std::mutex> lock(c->write_mu);
    idle = idle && c->Next() == nullptr;
  }
  return idle || down_ || left_;
}

size_t TcpLink::Own(Item* item) {
  size_t from = item->next_from;
  for (size_t i = item->next; i < item->spans.size(); ++i) {
    const auto* data = static_cast<const uint8_t*>(item->spans[i].data);
    item->owned.insert(item->owned.end(), data + std::exchange(from, 0), data + item->spans[i].size);
  }
  item->spans = {{item->owned.data(), item->owned.size()}};
  item->next = item->next_from = 0;
  item->stream = nullptr;
  item->held = sizeof(Item) + item->owned.size();
  return item->held;
}

int TcpLink::Forget(const OpKey& key, int rank) {
  int released = 0;
  for (auto& c : conns_) {
    {
      std::lock_guard<std::mutex> lock(c->write_mu);
      for (size_t i = 0; i < c->streams.size();) {
        Item& item = c->streams[i];
        if (!item.stream || !(item.header.key == key) || item.header.src != rank) {
          ++i;
        } else if (item.written == 0) {
          c->streams.erase(c->streams.begin() + static_cast<ptrdiff_t>(i));
        } else {
          // Under way: the frame must be completed, and the peer may have finished with it before it hears of the end.
          held_ += Own(&item);
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

// From the socket, as much as there is room for; notes when it came.
ssize_t TcpLink::ReadInto(Conn* c, iovec* to, size_t count) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(timespec))];
  msghdr message{};
  message.msg_iov = to;
  message.msg_iovlen = count;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t got = recvmsg(c->fd, &message, MSG_DONTWAIT);
  if (got < 0 && (errno == ETIMEDOUT || errno == EHOSTUNREACH)) fault_ = kSilent;
  if (got <= 0) return got;
  size_t room = 0;
  for (size_t i = 0; i < count; ++i) room += to[i].iov_len;
  c->read += static_cast<size_t>(got);
  c->dry = static_cast<size_t>(got) < room;
  int64_t stamp_ns = 0;
  const cmsghdr* note = CMSG_FIRSTHDR(&message);
  if (note != nullptr && note->cmsg_level == SOL_SOCKET && note->cmsg_type == SCM_TIMESTAMPNS) {
    timespec t;
    memcpy(&t, CMSG_DATA(note), sizeof(t));
    stamp_ns = int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
  }
  Sample(c, stamp_ns);
  return got;
}

// Notes how much has come, for the times of payloads. The kernel may know when the last of what was read came (wall
// clock), which is better than the time at which this process got to it.
void TcpLink::Sample(Conn* c, int64_t stamp_ns) {
  int queued = 0;
  if (!c->dry && ioctl(c->fd, SIOCINQ, &queued) != 0) return;
  int64_t came = NowNs();
  if (stamp_ns != 0) came -= std::max<int64_t>(0, WallNs() - stamp_ns);
  c->arrivals.Saw(&came_, came, c->read + static_cast<uint64_t>(queued));
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
  iovec to{c->buffer.data() + c->end, room};
  ssize_t got = ReadInto(c, &to, 1);
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
  *drained = c->dry;
  c->end += static_cast<size_t>(got);
  return true;
}

bool TcpLink::Parse(Conn* c, bool* any) {
  LinkSink* sink = transport_->sink_;
  while (!c->landing && c->end - c->begin >= sizeof(Header)) {
    Header h;
    memcpy(&h, c->buffer.data() + c->begin, sizeof(h));
    if (h.magic != Header::kMagic || h.payload > kMaxPayload) {
      fault_ = h.magic != Header::kMagic ? "it sent bytes that are no jaxcoll message"
                                         : "it sent a message that is too long";
      return false;
    }
    if (h.type == MessageType::kData) {
      std::vector<MutableSpan> target = sink->OnData(this, h);
      std::lock_guard<std::mutex> lock(c->read_mu);
      if (!h.follows) c->arrivals.Gap(c->read - (c->end - c->begin));
      c->begin += sizeof(Header);
      c->header = h;
      c->landing = true;
      c->discard = target.empty();
      c->target = std::move(target);
      c->target_at = 0;
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

// From the socket into place.
ssize_t TcpLink::Receive(Conn* c) {
  if (c->discard) {
    c->begin = c->end = 0;
    iovec to{c->buffer.data(), std::min(c->buffer.size(), c->landing_left)};
    return ReadInto(c, &to, 1);
  }
  iovec iov[64];
  size_t n = std::min<size_t>(64, c->target.size() - c->target_at);
  for (size_t i = 0; i < n; ++i) iov[i] = {c->target[c->target_at + i].data, c->target[c->target_at + i].size};
  return ReadInto(c, iov, n);
}

void TcpLink::Landed(Conn* c, size_t bytes) {
  c->landing_left -= bytes;
  while (bytes > 0 && !c->discard) {
    MutableSpan& s = c->target[c->target_at];
    size_t take = std::min(bytes, s.size);
    s.data = static_cast<uint8_t*>(s.data) + take;
    s.size -= take;
    bytes -= take;
    if (s.size == 0) ++c->target_at;
  }
}

bool TcpLink::Land(Conn* c, bool* any, bool* drained) {
  LinkSink* sink = transport_->sink_;
  bool done = false, report = false, ok = true;
  Header h;
  Timed timed;
  {
    std::lock_guard<std::mutex> lock(c->read_mu);
    // First what the buffer holds already, then from the socket into place.
    while (c->landing_left > 0 && ok && !*drained) {
      size_t held = c->end - c->begin;
      if (held > 0) {
        size_t take = std::min(held, c->landing_left);
        if (!c->discard) {
          take = std::min(take, c->target[c->target_at].size);
          memcpy(c->target[c->target_at].data, c->buffer.data() + c->begin, take);
        }
        Landed(c, take);
        c->begin += take;
        *any = true;
        continue;
      }
      ssize_t got = Receive(c);
      if (got == 0) {
        fault_ = "its connection has closed in the middle of a message";
        ok = false;
      } else if (got < 0) {
        if (errno == EINTR) continue;
        *drained = true;
        ok = errno == EAGAIN || errno == EWOULDBLOCK;
      } else {
        *any = true;
        Landed(c, static_cast<size_t>(got));
      }
    }
    if (c->landing_left == 0) {
      done = true;
      report = !c->discard;
      h = c->header;
      uint64_t end = c->read - (c->end - c->begin);
      timed = c->arrivals.Of(end - h.payload, end);
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
  if (report) sink->OnLanded(this, h, timed);
  return ok || done;
}

bool TcpLink::ReadSome(Conn* c, bool* any) {
  bool drained = false;
  for (int round = 0; round < kReadRounds && !drained; ++round) {
    const Came before = came_;
    const uint64_t read = c->read;
    const bool landing = c->landing;
    if (!(landing ? Land(c, any, &drained) : Fill(c, any, &drained)) || !Parse(c, any)) return false;
    if (!landing && !c->landing && c->read - read < kControl) came_ = before;  // what no transfer had to wait for
    while (c->landing && c->end > c->begin) {
      bool blocked = false;
      if (!Land(c, any, &blocked) || !Parse(c, any)) return false;
      if (blocked) break;
    }
    if (!c->landing) c->arrivals.Forget(c->read - (c->end - c->begin));
  }
  return true;
}

}  // namespace jaxcoll
