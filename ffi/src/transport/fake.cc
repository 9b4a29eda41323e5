#include "transport/fake.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"

namespace jaxcoll {

// Small limits, so that short messages take every path.
class FakeLink final : public Link {
 public:
  FakeLink(FakeNetwork* net, int from, int to) : Link(to), net_(net), from_(from), to_(to) {}
  const char* name() const override { return "fake"; }
  bool can_read() const override { return net_->can_read_; }
  size_t eager_limit() const override { return 64; }
  size_t offer_limit() const override { return 3; }

  bool Send(const Header& header, const Span* payload, size_t spans) override {
    FakeNetwork::Message m{from_, to_, header, {}};
    for (size_t i = 0; i < spans; ++i) {
      const auto* p = static_cast<const uint8_t*>(payload[i].data);
      m.payload.insert(m.payload.end(), p, p + payload[i].size);
    }
    m.header.payload = static_cast<uint32_t>(m.payload.size());
    net_->messages_.push_back(std::move(m));
    return true;
  }

  void Stream(const Header& header, const std::vector<Span>& payload, uint64_t token) override {
    constexpr size_t kFragment = 96;
    std::vector<uint8_t> all;
    for (const Span& s : payload) {
      const auto* p = static_cast<const uint8_t*>(s.data);
      all.insert(all.end(), p, p + s.size);
    }
    for (size_t at = 0; at < all.size(); at += kFragment) {
      size_t size = std::min(kFragment, all.size() - at);
      FakeNetwork::Message m{from_, to_, header, {}};
      m.payload.assign(all.begin() + static_cast<ptrdiff_t>(at), all.begin() + static_cast<ptrdiff_t>(at + size));
      m.header.payload = static_cast<uint32_t>(size);
      m.header.offset = at;
      m.last_of_stream = at + size == all.size();
      m.token = token;
      net_->messages_.push_back(std::move(m));
    }
  }

  Status Read(const RemoteSpan* from, size_t spans, void* to, size_t size) override {
    if (net_->dead_[static_cast<size_t>(to_)]) return Status::Error("is lost (killed by the test)");
    auto* dst = static_cast<uint8_t*>(to);
    for (size_t i = 0; i < spans && size > 0; ++i) {
      size_t take = std::min<size_t>(from[i].size, size);
      memcpy(dst, reinterpret_cast<const void*>(from[i].address), take);
      dst += take;
      size -= take;
    }
    return size == 0 ? Status() : Status::Error("made an offer that is shorter than its transfer");
  }

  int Forget(const OpKey&, int) override { return 0; }  // streams were copied

 private:
  FakeNetwork* net_;
  int from_, to_;
};

FakeNetwork::FakeNetwork(uint64_t seed, bool can_read) : random_(seed), can_read_(can_read) {}
FakeNetwork::~FakeNetwork() = default;

Link* FakeNetwork::Connect(int from, int to) {
  links_.push_back(std::make_unique<FakeLink>(this, from, to));
  ends_.emplace_back(from, to);
  return links_.back().get();
}

void FakeNetwork::Attach(int process, LinkSink* sink) {
  auto p = static_cast<size_t>(process);
  if (sinks_.size() <= p) {
    sinks_.resize(p + 1);
    dead_.resize(p + 1);
  }
  sinks_[p] = sink;
}

Link* FakeNetwork::Find(int from, int to) const {
  for (size_t i = 0; i < ends_.size(); ++i)
    if (ends_[i] == std::make_pair(from, to)) return links_[i].get();
  return nullptr;
}

bool FakeNetwork::Step() {
  if (messages_.empty()) return false;
  std::swap(messages_[random_() % messages_.size()], messages_.back());
  Message m = std::move(messages_.back());
  messages_.pop_back();
  if (dead_[static_cast<size_t>(m.from)] || dead_[static_cast<size_t>(m.to)]) return true;
  LinkSink* sink = sinks_[static_cast<size_t>(m.to)];
  Link* link = Find(m.to, m.from);
  if (m.header.type == MessageType::kData) {
    std::vector<MutableSpan> target = sink->OnData(link, m.header);
    int64_t begin = NowNs();
    size_t offset = 0;
    for (const MutableSpan& s : target) {
      memcpy(s.data, m.payload.data() + offset, s.size);
      offset += s.size;
    }
    int64_t end = NowNs();
    if (!target.empty()) sink->OnLanded(link, m.header, {m.header.payload, end - begin, end});
    if (m.last_of_stream) sinks_[static_cast<size_t>(m.from)]->OnSent(Find(m.from, m.to), m.token);
  } else {
    sink->OnMessage(link, m.header, m.payload.data());
  }
  return true;
}

void FakeNetwork::Kill(int process) {
  dead_[static_cast<size_t>(process)] = true;
  for (size_t i = 0; i < ends_.size(); ++i)
    if (ends_[i].second == process && !dead_[static_cast<size_t>(ends_[i].first)])
      sinks_[static_cast<size_t>(ends_[i].first)]->OnLinkDown(links_[i].get(), "killed by the test");
}

}  // namespace jaxcoll
