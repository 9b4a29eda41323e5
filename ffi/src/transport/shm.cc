#include "transport/shm.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "transport/shm_layout.h"

namespace jaxcoll {
namespace {

constexpr size_t kEagerLimit = size_t{16} << 10;
constexpr size_t kFragment = size_t{64} << 10;
constexpr size_t kOfferBytes = kRingBytes / 8;
// A record lies in one piece and the ring never begins anew: half of it has room for one wherever the last one ended.
constexpr size_t kMaxRecord = kRingBytes / 2;
constexpr int kMaxPlaces = 1024;

long Futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, timeout, nullptr, 0);
}

size_t RecordBytes(size_t payload) { return RoundUp(sizeof(RecordHead) + sizeof(Header) + payload, 16); }

// `urgent`: whatever number of messages the owner waits for.
void RingBell(ShmSegment* segment, bool urgent = false) {
  uint32_t bell = segment->bell.fetch_add(1, std::memory_order_seq_cst) + 1;
  if (segment->sleeping.load(std::memory_order_seq_cst) == 0) return;
  if (urgent || static_cast<int32_t>(bell - segment->wake_at.load(std::memory_order_seq_cst)) >= 0)
    Futex(&segment->bell, FUTEX_WAKE, 64, nullptr);
}

Status MapSegment(int fd, size_t bytes, ShmSegment** out) {
  struct stat st{};
  if (fstat(fd, &st) != 0 || static_cast<size_t>(st.st_size) < bytes)
    return Status::Error(
        Format("shared memory segment: %lld bytes, %zu are needed", static_cast<long long>(st.st_size), bytes));
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) return Status::Error(Format("mmap of a shared memory segment: %s", strerror(errno)));
  *out = static_cast<ShmSegment*>(p);
  return {};
}

}  // namespace

ShmLink::ShmLink(ShmTransport* transport, int process, int place, pid_t pid, ShmSegment* theirs, ShmRing* out,
                 ShmRing* in, bool can_read)
    : Link(process),
      transport_(transport),
      place_(place),
      pid_(pid),
      theirs_(theirs),
      out_(out),
      in_(in),
      can_read_(can_read) {}

bool ShmLink::can_read() const { return can_read_ && in_->reads.load(std::memory_order_relaxed) != 0; }

size_t ShmLink::eager_limit() const { return kEagerLimit; }

size_t ShmLink::offer_limit() const { return kOfferBytes / sizeof(RemoteSpan); }

bool ShmLink::TryWrite(const Header& header, const Span* payload, size_t spans, size_t bytes) {
  size_t need = RecordBytes(bytes);
  uint64_t head = out_->head.load(std::memory_order_relaxed), tail = out_->tail.load(std::memory_order_seq_cst);
  size_t at = head % kRingBytes, to_end = kRingBytes - at;
  size_t total = need <= to_end ? need : to_end + need;
  if (head - tail > kRingBytes || kRingBytes - (head - tail) < total) return false;
  if (need > to_end) {
    RecordHead pad{static_cast<uint32_t>(to_end), kPadding, 0};
    memcpy(out_->data + at, &pad, sizeof(pad));
    head += to_end;
    at = 0;
  }
  RecordHead record{static_cast<uint32_t>(need), kMessage, 0};
  uint8_t* p = out_->data + at;
  memcpy(p, &record, sizeof(record));
  Header h = header;
  h.payload = static_cast<uint32_t>(bytes);
  memcpy(p + sizeof(record), &h, sizeof(h));
  p += sizeof(record) + sizeof(h);
  for (size_t i = 0; i < spans; ++i) {
    memcpy(p, payload[i].data, payload[i].size);
    p += payload[i].size;
  }
  out_->head.store(head + need, std::memory_order_release);
  return true;
}

bool ShmLink::WriteOrAsk(const Header& header, const Span* payload, size_t spans, size_t bytes) {
  if (TryWrite(header, payload, spans, bytes)) return true;
  out_->writer_waits.store(1, std::memory_order_seq_cst);
  return TryWrite(header, payload, spans, bytes);  // room may have come between the two
}

bool ShmLink::Send(const Header& header, const Span* payload, size_t spans) {
  size_t bytes = 0;
  for (size_t i = 0; i < spans; ++i) bytes += payload[i].size;
  if (RecordBytes(bytes) > kMaxRecord) return false;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (gone_) return true;  // its operation fails, or has failed
    if (!pending_.empty() || !WriteOrAsk(header, payload, spans, bytes)) {
      Pending p;
      p.header = header;
      for (size_t i = 0; i < spans; ++i) {
        const auto* b = static_cast<const uint8_t*>(payload[i].data);
        p.owned.insert(p.owned.end(), b, b + payload[i].size);
      }
      held_ += p.held();
      pending_.push_back(std::move(p));
      has_pending_ = true;
      transport_->Kick();
    }
  }
  RingBell(theirs_, header.type == MessageType::kAbort);
  return true;
}

void ShmLink::Stream(const Header& header, const std::vector<Span>& payload, uint64_t token) {
  std::lock_guard<std::mutex> lock(mu_);
  if (gone_) return;  // its operation fails, or has failed
  Pending p;
  p.header = header;
  p.header.offset = 0;
  p.stream = payload;
  p.token = token;
  p.streaming = true;
  if (pending_.empty()) out_->writer_waits = 0;  // there may be room: nobody has tried
  pending_.push_back(std::move(p));
  has_pending_ = true;
  transport_->Kick();  // the next poll writes it: OnSent must not be called from here
}

bool ShmLink::WriteFragment(Pending* p) {
  constexpr size_t kParts = 256;
  Span part[kParts]{};
  size_t parts = 0, bytes = 0;
  for (size_t i = p->next; i < p->stream.size() && parts < kParts && bytes < kFragment; ++i) {
    part[parts] = {p->stream[i].data, std::min(p->stream[i].size, kFragment - bytes)};
    bytes += part[parts++].size;
  }
  if (!WriteOrAsk(p->header, part, parts, bytes)) return false;
  p->header.offset += bytes;
  for (size_t i = 0; i < parts; ++i) {
    Span& s = p->stream[p->next];
    s.data = static_cast<const uint8_t*>(s.data) + part[i].size;
    s.size -= part[i].size;
    if (s.size == 0) ++p->next;
  }
  return true;
}

bool ShmLink::Flush(std::vector<uint64_t>* sent) {
  while (!pending_.empty()) {
    Pending& p = pending_.front();
    if (p.streaming) {
      while (p.next < p.stream.size())
        if (!WriteFragment(&p)) return false;
      sent->push_back(p.token);
    } else {
      Span payload{p.owned.data(), p.owned.size()};
      if (!WriteOrAsk(p.header, &payload, 1, p.owned.size())) return false;
    }
    held_ -= p.held();
    pending_.pop_front();
  }
  return true;
}

int ShmLink::Forget(const OpKey& key, int rank) {
  std::lock_guard<std::mutex> lock(mu_);
  pending_.erase(
      std::remove_if(pending_.begin(), pending_.end(),
                     [&](const Pending& p) { return p.streaming && p.header.key == key && p.header.src == rank; }),
      pending_.end());
  return 0;
}

Status ShmLink::Read(const RemoteSpan* from, size_t spans, void* to, size_t size) {
  constexpr size_t kMaxIov = 64;
  auto* dst = static_cast<uint8_t*>(to);
  size_t done = 0, i = 0, skip = 0;
  while (done < size) {
    iovec remote[kMaxIov];
    size_t n = 0, want = 0;
    for (size_t k = i; k < spans && n < kMaxIov; ++k) {
      size_t offset = k == i ? skip : 0;
      remote[n].iov_base = reinterpret_cast<void*>(from[k].address + offset);
      remote[n].iov_len = std::min<size_t>(from[k].size - offset, size - done - want);
      want += remote[n++].iov_len;
      if (done + want == size) break;
    }
    if (n == 0) return Status::Error("made an offer that is shorter than its transfer");
    iovec local{dst + done, want};
    ssize_t got = process_vm_readv(pid_, &local, 1, remote, n, 0);
    if (got < 0 && errno == ESRCH) return Status::Error(Format("is lost (its process, pid %d, has ended)", pid_));
    if (got <= 0)
      return Status::Error(Format("can't be read in place (the memory of process %d, pid %d): %s", process(), pid_,
                                  got == 0 ? "nothing came" : strerror(errno)));
    done += static_cast<size_t>(got);
    for (auto left = static_cast<size_t>(got); left > 0;) {
      size_t here = std::min<size_t>(from[i].size - skip, left);
      skip += here;
      left -= here;
      if (skip == from[i].size) {
        ++i;
        skip = 0;
      }
    }
  }
  return {};
}

bool ShmLink::Withdrawn(const OpKey& key, uint64_t since) const { return theirs_->withdrawals.Has(key, since); }

uint64_t ShmLink::withdrawals() const { return transport_->mine_->withdrawals.count(); }

Slab* ShmLink::slab() { return &transport_->slab_; }

void ShmLink::Lend(uint64_t block) { transport_->slab_.Lend(block, place_); }

void ShmLink::PeerGone() {
  transport_->slab_.Gone(place_);
  std::lock_guard<std::mutex> lock(mu_);
  gone_ = true;
  pending_.clear();
  held_ = 0;
  has_pending_ = false;
}

const void* ShmLink::Posted(const RemoteSpan& block) {
  bool inside = block.size <= kSlabLimitMany && block.address >= SlabHeadBytes(transport_->places_) &&
                block.address % kLine == 0 && block.address <= kSlabBytes - block.size;
  return inside ? SlabBase(theirs_) + block.address : nullptr;
}

void ShmLink::ReleasePosted(const RemoteSpan& block) {
  if (Posted(block) != nullptr)
    HeadOf(SlabBase(theirs_), block.address, transport_->places_)
        ->held[transport_->place_]
        .fetch_sub(1, std::memory_order_release);
}

size_t ShmTransport::SegmentBytes(int places) { return RoundUp(RingsBytes(places), 4096) + kSlabBytes; }

ShmTransport::ShmTransport(ShmSegment* mine, int places, int place)
    : mine_(mine), places_(places), place_(place), slab_(SlabBase(mine), places, place) {}

Status ShmTransport::Create(int fd, int places, int place, std::unique_ptr<ShmTransport>* out) {
  if (places < 1 || places > kMaxPlaces || place < 0 || place >= places)
    return Status::Error(Format("shared memory: place %d of %d processes", place, places));
  ShmSegment* segment = nullptr;
  JC_RETURN_IF_ERROR(MapSegment(fd, SegmentBytes(places), &segment));
  // A fresh memfd is zero: rings and bells start right.
  segment->layout = kLayout;
  segment->places = static_cast<uint32_t>(places);
  segment->ring_bytes = kRingBytes;
  segment->probe_value = 0x6a617863636f6c6cull ^ static_cast<uint64_t>(getpid());
  segment->probe_address = reinterpret_cast<uint64_t>(&segment->probe_value);
  segment->magic = kSegmentMagic;
  out->reset(new ShmTransport(segment, places, place));
  return {};
}

ShmTransport::~ShmTransport() {
  Stop();
  for (ShmSegment* s : mapped_) munmap(s, SegmentBytes(places_));
  munmap(mine_, SegmentBytes(places_));
}

Status ShmTransport::AddPeer(int fd, int process, int place, pid_t pid, bool allow_read,
                             std::unique_ptr<ShmLink>* out) {
  if (place < 0 || place >= places_ || place == place_)
    return Status::Error(Format("shared memory: place %d of %d is no peer", place, places_));
  ShmSegment* theirs = nullptr;
  JC_RETURN_IF_ERROR(MapSegment(fd, SegmentBytes(places_), &theirs));
  if (theirs->magic != kSegmentMagic || theirs->layout != kLayout || theirs->ring_bytes != kRingBytes ||
      theirs->places != static_cast<uint32_t>(places_)) {
    munmap(theirs, SegmentBytes(places_));
    return Status::Error(
        Format("shared memory: the segment of process %d has another layout; the jaxcoll versions differ?", process));
  }
  mapped_.push_back(theirs);
  bool can_read = false;
  if (allow_read) {
    uint64_t value = 0;
    iovec local{&value, sizeof(value)}, remote{reinterpret_cast<void*>(theirs->probe_address), sizeof(value)};
    can_read = process_vm_readv(pid, &local, 1, &remote, 1, 0) == sizeof(value) && value == theirs->probe_value;
  }
  *out = std::make_unique<ShmLink>(this, process, place, pid, theirs, &theirs->rings[place_], &mine_->rings[place],
                                   can_read);
  theirs->rings[place_].reads.store(can_read ? 1 : 0, std::memory_order_relaxed);
  links_.push_back(out->get());
  return {};
}

void ShmTransport::Run(LinkSink* sink, bool thread) {
  sink_ = sink;
  if (thread) thread_ = std::thread([this] { ServiceLoop(); });
}

void ShmTransport::Stop() {
  if (stopping_.exchange(true)) return;
  {
    std::lock_guard<std::mutex> lock(wait_mu_);
  }
  wait_cv_.notify_all();
  mine_->bell.fetch_add(1);
  Futex(&mine_->bell, FUTEX_WAKE, 64, nullptr);
  if (thread_.joinable()) thread_.join();
}

bool ShmTransport::Drain(ShmLink* link) {
  ShmRing* ring = link->in_;
  bool any = false;
  uint64_t tail = ring->tail.load(std::memory_order_relaxed);
  while (true) {
    uint64_t head = ring->head.load(std::memory_order_acquire);
    if (head == tail) break;
    size_t at = tail % kRingBytes;
    RecordHead record;
    memcpy(&record, ring->data + at, sizeof(record));
    // The other side is trusted to be ours, not to be free of faults: a record must lie inside what was written.
    if (head - tail > kRingBytes || record.size < sizeof(record) || record.size > head - tail ||
        record.size > kRingBytes - at || (record.kind == kMessage && record.size < sizeof(record) + sizeof(Header))) {
      sink_->OnLinkDown(link, "its messages are damaged");
      ring->tail.store(head, std::memory_order_release);
      return true;
    }
    if (record.kind == kMessage) {
      Header h;
      memcpy(&h, ring->data + at + sizeof(record), sizeof(h));
      const uint8_t* payload = ring->data + at + sizeof(record) + sizeof(h);
      if (h.magic == Header::kMagic && h.payload <= record.size - sizeof(record) - sizeof(h)) {
        any = true;
        if (h.type == MessageType::kData) {
          std::vector<MutableSpan> target = sink_->OnData(link, h);
          int64_t begin = NowNs();
          size_t offset = 0;
          for (const MutableSpan& s : target) {
            memcpy(s.data, payload + offset, s.size);
            offset += s.size;
          }
          int64_t end = NowNs();
          if (!target.empty()) sink_->OnLanded(link, h, {h.payload, end - begin, end});
        } else {
          sink_->OnMessage(link, h, payload);
        }
      } else {
        sink_->OnLinkDown(link, "its messages are damaged");
      }
    }
    tail += record.size;
    ring->tail.store(tail, std::memory_order_seq_cst);
    if (ring->writer_waits.load(std::memory_order_seq_cst) != 0 && ring->writer_waits.exchange(0) != 0)
      RingBell(link->theirs_);
  }
  return any;
}

bool ShmTransport::Poll() {
  if (!AnyInbound() && !AnyWork()) return false;
  std::unique_lock<std::mutex> lock(poll_mu_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  bool any = false;
  for (ShmLink* link : links_) {
    any = Drain(link) || any;
    if (!link->has_pending_.load(std::memory_order_relaxed)) continue;
    std::vector<uint64_t> sent;
    {
      std::lock_guard<std::mutex> link_lock(link->mu_);
      size_t before = link->pending_.size();
      link->has_pending_ = !link->Flush(&sent);
      any = any || link->pending_.size() != before;
    }
    RingBell(link->theirs_);
    for (uint64_t token : sent) sink_->OnSent(link, token);
  }
  return any;
}

void ShmTransport::Polling(int delta) {
  if (pollers_.fetch_add(delta) + delta == 0 && (busy_ || AnyWork())) Kick();
}

void ShmTransport::SetBusy(bool busy) {
  busy_ = busy;
  if (busy && pollers_ == 0) Kick();
}

void ShmTransport::Withdraw(const OpKey& key) { mine_->withdrawals.Add(key); }

bool ShmTransport::AnyWork() const {
  for (const ShmLink* link : links_)
    if (link->has_pending_.load(std::memory_order_relaxed)) return true;
  return false;
}

bool ShmTransport::AnyRoom() const {
  for (const ShmLink* link : links_)
    if (link->has_pending_ && link->out_->writer_waits.load(std::memory_order_seq_cst) == 0) return true;
  return false;
}

void ShmTransport::Kick() {
  RingBell(mine_, true);  // who sleeps in the kernel has work
  if (pollers_ > 0 || !thread_.joinable()) return;
  {
    std::lock_guard<std::mutex> lock(wait_mu_);
  }
  wait_cv_.notify_one();
}

void ShmTransport::Wait(uint32_t messages, int64_t timeout_ns, const std::atomic<bool>& over) {
  // What has come since the bell was read is found by the poll, or by the futex, whose value has then changed. So is
  // room in a full ring, whose reader rings once for it; and an end, after which Wake() rings.
  uint32_t bell = mine_->bell.load(std::memory_order_seq_cst);
  if (over || AnyInbound() || AnyRoom()) return;
  Sleep(bell, bell + (AnyWork() ? 1 : messages), timeout_ns);
}

void ShmTransport::Wake() { RingBell(mine_, true); }

void ShmTransport::Sleep(uint32_t bell, uint32_t wake_at, int64_t timeout_ns) {
  {
    // Of several sleepers the most impatient decides.
    std::lock_guard<std::mutex> lock(sleep_mu_);
    bool first = mine_->sleeping.load(std::memory_order_relaxed) == 0;
    if (first || static_cast<int32_t>(wake_at - mine_->wake_at.load(std::memory_order_relaxed)) < 0)
      mine_->wake_at.store(wake_at, std::memory_order_seq_cst);
    mine_->sleeping.fetch_add(1, std::memory_order_seq_cst);
  }
  timespec timeout{static_cast<time_t>(timeout_ns / 1000000000), static_cast<long>(timeout_ns % 1000000000)};
  Futex(&mine_->bell, FUTEX_WAIT, bell, &timeout);
  mine_->sleeping.fetch_sub(1, std::memory_order_seq_cst);
}

bool ShmTransport::AnyInbound() const {
  for (const ShmLink* link : links_)
    if (link->in_->head.load(std::memory_order_acquire) != link->in_->tail.load(std::memory_order_relaxed)) return true;
  return false;
}

void ShmTransport::ServiceLoop() {
  int idle = 0;
  while (!stopping_) {
    {
      std::unique_lock<std::mutex> lock(wait_mu_);
      wait_cv_.wait(lock, [&] { return stopping_ || (pollers_ == 0 && (busy_ || AnyWork())); });
    }
    uint32_t bell = mine_->bell.load(std::memory_order_seq_cst);
    if (Poll()) {
      sink_->Work();
      idle = 0;
      continue;
    }
    // Not at once to sleep: on a busy machine the peer's next message is often a few microseconds away.
    if (++idle < 4) {
      std::this_thread::yield();
      continue;
    }
    if (pollers_ == 0 && !stopping_) Sleep(bell, bell + 1, 50 * 1000 * 1000);
  }
}

}  // namespace jaxcoll
