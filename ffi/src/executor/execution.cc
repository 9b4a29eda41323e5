// Events and state of an operation: what has come, what may run next, what is to be sent.
#include "executor/execution.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "executor/engine.h"
#include "executor/pages.h"

namespace jaxcoll {
namespace {

constexpr uint32_t kMaxLanes = 4096;
constexpr size_t kLargeResult = size_t{3} << 20;

// The pieces one behind the other, `bytes` together.
std::unique_ptr<uint8_t[]> Gather(const std::vector<Span>& pieces, size_t bytes) {
  std::unique_ptr<uint8_t[]> whole(new uint8_t[bytes]);
  size_t at = 0;
  for (const Span& s : pieces) {
    memcpy(whole.get() + at, s.data, s.size);
    at += s.size;
  }
  return whole;
}

}  // namespace

Execution::Execution(Engine* engine, OpRequest req, Completion completion)
    : request(std::move(req)),
      done(std::move(completion)),
      started_ns(NowNs()),
      engine_(engine),
      plan_(*request.plan),
      program_(*plan_.program),
      element_size_(ElementSize(request.dtype)) {
  int64_t n = request.input.leaves.empty() ? request.output.block_elements : request.input.block_elements;
  signature_ =
      (uint64_t{static_cast<uint8_t>(program_.kind)} << 60) | (uint64_t{static_cast<uint8_t>(request.reduce)} << 56) |
      (uint64_t{static_cast<uint8_t>(request.dtype)} << 48) | ((static_cast<uint64_t>(n) & 0xffffffffffull) << 8) |
      (Mix64(program_.id ^ (plan_.table->version << 32)) & 0xff);
  empty_ = n == 0;
  size_t largest = 0;
  for (uint32_t c = 0; c < program_.chunks.size(); ++c) {
    ranges_.push_back(program_.ChunkRange(c, n));
    largest = std::max(largest, static_cast<size_t>(ranges_.back().size()) * element_size_);
  }
  large_ = static_cast<size_t>(n) * static_cast<size_t>(program_.output_blocks()) * element_size_ >= kLargeResult;
  if (large_) AdviseLargePages(request.output, program_.output_blocks());
  bool local = true;
  for (int r = 0; r < request.group->size(); ++r) local = local && Local(r);
  // Among local ranks a lane is reduced and copied on while it is in the cache.
  size_t lane_bytes = local ? engine_->options_.lane_bytes / 2 : engine_->options_.lane_bytes;
  size_t least = std::min<size_t>(static_cast<size_t>(program_.pipeline), kMaxLanes);
  lanes_ = static_cast<uint32_t>(std::clamp<size_t>((largest + lane_bytes - 1) / lane_bytes, least, kMaxLanes));
  bool pull = true;
  for (const Incoming& i : plan_.incoming) pull = pull && (Local(i.peer) || LinkTo(i.peer)->can_read());
  size_t landing =
      std::max<size_t>(1, plan_.max_fan_in) * std::max<size_t>(1, (largest * (plan_.wide ? 2 : 1)) / lanes_);
  window_ = pull ? 16 : static_cast<uint32_t>(std::clamp<size_t>(engine_->options_.landing_bytes / landing, 2, 64));
  window_ = std::max(window_, static_cast<uint32_t>(std::min(program_.pipeline, 16)));
  window_ = std::min(window_, lanes_);

  nodes_left_ = plan_.nodes.size() * lanes_;
  send_index_.resize(plan_.nodes.size());
  for (uint32_t i = 0; i < plan_.nodes.size(); ++i)
    if (plan_.nodes[i].kind == NodeKind::kSend) send_index_[i] = static_cast<uint32_t>(num_sends_++);
  in_.resize(plan_.incoming.size() * lanes_);
  out_.resize(num_sends_ * lanes_);
  deps_.resize(plan_.nodes.size() * lanes_);
  missing_.resize(plan_.nodes.size() * lanes_);
  lane_left_.assign(lanes_, static_cast<uint32_t>(plan_.nodes.size()));
  for (const ScratchSlot& s : plan_.scratch)
    scratch_.emplace_back(
        new uint8_t[static_cast<size_t>(std::max<int64_t>(1, ranges_[s.chunk].size())) * WireSize(s.wide)]);
  heard_.resize(static_cast<size_t>(request.group->size()));
  waits_for_.assign(heard_.size(), -1);
}

Execution::~Execution() {
  for (const PostState& p : posted_)
    if (p.slab != nullptr) p.slab->Release(p.block);
  for (InState& s : in_)
    if (s.posted.size != 0) s.link->ReleasePosted(s.posted);
}

Link* Execution::LinkTo(int rank) const {
  return engine_->links_[static_cast<size_t>(request.group->process[static_cast<size_t>(rank)])];
}
bool Execution::Local(int rank) const {
  return request.group->process[static_cast<size_t>(rank)] == engine_->my_process_;
}

Range Execution::LaneOf(uint32_t chunk, uint32_t lane) const {
  return Program::LaneRange(ranges_[chunk], static_cast<int>(lane), static_cast<int>(lanes_));
}

void Execution::Start() {
  while (next_lane_ < window_ && !failed) StartLane(next_lane_++);
}

void Execution::StartLane(uint32_t lane) {
  for (uint32_t i = 0; i < plan_.nodes.size(); ++i) {
    const Node& node = plan_.nodes[i];
    deps(lane, i) = node.num_deps;
    uint32_t& left = missing(lane, i);
    left = 0;
    if (node.kind != NodeKind::kVertex) continue;
    for (uint32_t k = node.first_in; k < node.first_in + node.num_in; ++k) {
      InState& s = in(lane, k);
      if (s.state == In::kNone && Skipped(TransferBytes(lane, node.chunk, plan_.incoming[k].wide)))
        s.state = In::kInPlace;
      if (s.state == In::kNone || s.state == In::kLanding) ++left;
      if (s.state == In::kNone && !InPlace(node)) Accept(lane, k);
    }
  }
  for (uint32_t root : plan_.roots) DepsMet(lane, root);
}

void Execution::DepsMet(uint32_t lane, uint32_t id) {
  if (failed) return;
  const Node& node = plan_.nodes[id];
  if (node.kind == NodeKind::kSend) return IssueSend(lane, id);
  if (node.kind == NodeKind::kVertex) {
    if (InPlace(node) && in(lane, node.first_in).state == In::kNone) Accept(lane, node.first_in);
    if (missing(lane, id) != 0) return;
  }
  engine_->AddTask(this, lane, id);
}

void Execution::Accept(uint32_t lane, uint32_t i) {
  InState& s = in(lane, i);
  const Incoming& incoming = plan_.incoming[i];
  if (Local(incoming.peer) || s.ready_sent) return;
  Link* link = LinkTo(incoming.peer);
  size_t bytes = IncomingBytes(lane, i);
  if (link->can_read() || bytes <= link->eager_limit()) return;
  s.ready_sent = true;
  Tell(link, MessageType::kReady, incoming.peer, lane, incoming.transfer);
}

Header Execution::MakeHeader(MessageType type, int to, uint32_t lane, uint32_t transfer) const {
  Header h;
  h.type = type;
  h.src = static_cast<uint16_t>(request.rank);
  h.dst = static_cast<uint16_t>(to);
  h.lane = static_cast<uint16_t>(lane);
  h.key = request.key;
  h.transfer = transfer;
  h.signature = signature_;
  return h;
}

void Execution::Tell(Link* link, MessageType type, int to, uint32_t lane, uint32_t transfer, const Span* payload,
                     size_t spans) {
  Tell(link, MakeHeader(type, to, lane, transfer), payload, spans);
}

void Execution::Tell(Link* link, const Header& h, const Span* payload, size_t spans) {
  if (link->Send(h, payload, spans)) return;
  engine_->FailKey(request.key,
                   Format("%s: message %u to rank %u (transfer %u, lane %u) is longer than the link takes, %s; that is "
                          "a fault of jaxcoll, please report it",
                          Describe().c_str(), static_cast<unsigned>(h.type), h.dst, h.transfer, h.lane, link->name()),
                   this);
}

void Execution::IssueSend(uint32_t lane, uint32_t id) {
  const Node& node = plan_.nodes[id];
  OutState& o = out(lane, id);
  o.data_ready = true;
  Range r = LaneOf(node.chunk, lane);
  size_t bytes = static_cast<size_t>(r.size()) * WireSize(node.wide);
  if (Skipped(bytes)) return SendDone(lane, id);
  if (Local(node.peer)) {
    o.offered = true;
    // A rank that has not begun yet will look for itself when it does.
    if (Execution* peer = gang->members[node.peer]; peer != nullptr && !peer->failed)
      OfferLocal(lane, node.transfer, peer);
    return;
  }
  Link* link = LinkTo(node.peer);
  if (Post(link, lane, node, r, bytes)) return SendDone(lane, id);
  std::vector<Span> spans = SlotSpans(node.src, node.chunk, r);
  if (bytes <= link->eager_limit()) {
    // The send ends here, so nothing but this limits what a peer that takes nothing is sent; and waiting for it would
    // be a deadlock, as it may wait for what lies behind.
    if (size_t held = link->held(); held + bytes > engine_->options_.early_bytes)
      return engine_->FailKey(
          request.key,
          engine_->TooFarAhead(request.rank, held, Format("that process %d has yet to take", link->process())), this);
    Tell(link, MessageType::kEager, node.peer, lane, node.transfer, spans.data(), spans.size());
    return SendDone(lane, id);
  }
  if (link->can_read()) return Offer(link, lane, id, std::move(spans), bytes);
  if (o.peer_ready) Stream(lane, id);
}

void Execution::Offer(Link* link, uint32_t lane, uint32_t id, std::vector<Span> spans, size_t bytes) {
  const Node& node = plan_.nodes[id];
  OutState& o = out(lane, id);
  o.offered = true;
  if (spans.size() > link->offer_limit()) {
    o.gathered = Gather(spans, bytes);
    spans = {{o.gathered.get(), bytes}};
  }
  std::vector<RemoteSpan> remote;
  remote.reserve(spans.size());
  for (const Span& s : spans) remote.push_back({reinterpret_cast<uint64_t>(s.data), s.size});
  Span payload{remote.data(), remote.size() * sizeof(RemoteSpan)};
  Header h = MakeHeader(MessageType::kOffer, node.peer, lane, node.transfer);
  h.offset = link->withdrawals();
  Tell(link, h, &payload, 1);
}

void Execution::OfferLocal(uint32_t lane, uint32_t transfer, Execution* to) {
  int32_t id = plan_.send_of_transfer[transfer];
  if (id < 0 || plan_.nodes[static_cast<size_t>(id)].peer != to->request.rank) return;
  const Node& node = plan_.nodes[static_cast<size_t>(id)];
  const OutState& o = out(lane, static_cast<uint32_t>(id));
  if (!o.data_ready || o.done) return;
  Range r = LaneOf(node.chunk, lane);
  Header h;
  h.src = static_cast<uint16_t>(request.rank);
  h.lane = static_cast<uint16_t>(lane);
  h.transfer = transfer;
  int64_t pieces = r.size();
  uint8_t* data = Locate(node.src, node.chunk, r.begin, &pieces);
  if (pieces == r.size()) {
    RemoteSpan one{reinterpret_cast<uint64_t>(data), static_cast<size_t>(r.size()) * WireSize(node.wide)};
    return to->OnOffer(nullptr, h, &one, 1, this);
  }
  std::vector<RemoteSpan> remote;
  for (const Span& s : SlotSpans(node.src, node.chunk, r))
    remote.push_back({reinterpret_cast<uint64_t>(s.data), s.size});
  to->OnOffer(nullptr, h, remote.data(), remote.size(), this);
}

bool Execution::Post(Link* link, uint32_t lane, const Node& node, Range r, size_t bytes) {
  Slab* slab = link->slab();
  uint32_t readers = plan_.value_readers[node.value];
  if (slab == nullptr || bytes == 0 || bytes > slab->limit(readers)) return false;
  if (posted_.empty()) posted_.resize(size_t{lanes_} * plan_.value_readers.size());
  PostState& p = posted_[size_t{lane} * plan_.value_readers.size() + node.value];
  ++p.asked;
  if (p.slab == nullptr) {
    std::vector<Span> spans = SlotSpans(node.src, node.chunk, r);
    p.block = slab->Put(spans.data(), spans.size(), bytes);
    if (p.block == 0) return false;
    p.slab = slab;
  }
  RemoteSpan where{p.block, bytes};
  link->Lend(p.block);
  if (p.asked == readers) {
    p.slab = nullptr;
    slab->Release(p.block);
  }
  Span payload{&where, sizeof(where)};
  Tell(link, MessageType::kPosted, node.peer, lane, node.transfer, &payload, 1);
  return true;
}

void Execution::Stream(uint32_t lane, uint32_t id) {
  const Node& node = plan_.nodes[id];
  OutState& o = out(lane, id);
  if (o.streaming) return;
  o.streaming = true;
  Range r = LaneOf(node.chunk, lane);
  Header h = MakeHeader(MessageType::kData, node.peer, lane, node.transfer);
  h.total = static_cast<uint64_t>(r.size()) * WireSize(node.wide);
  uint64_t token = engine_->next_token_++;
  engine_->streams_[token] = {request.key, request.rank, lane, id};
  LinkTo(node.peer)->Stream(h, SlotSpans(node.src, node.chunk, r), token);
}

Execution::InState* Execution::Awaited(const Header& h, uint32_t* index) {
  if (h.transfer >= plan_.recv_of_transfer.size() || h.lane >= lanes_ || plan_.recv_of_transfer[h.transfer] < 0)
    return nullptr;
  *index = static_cast<uint32_t>(plan_.recv_of_transfer[h.transfer]);
  return plan_.incoming[*index].peer == h.src ? &in(h.lane, *index) : nullptr;
}

Execution::InState* Execution::Expected(const Header& h, uint32_t* index, size_t bytes) {
  heard_[h.src] = true;
  InState* s = Awaited(h, index);
  if (s == nullptr || s->state != In::kNone) return nullptr;
  return bytes == IncomingBytes(h.lane, *index) ? s : nullptr;
}

bool Execution::Sent(const Header& h, uint32_t* id) const {
  if (h.transfer >= plan_.send_of_transfer.size() || h.lane >= lanes_ || plan_.send_of_transfer[h.transfer] < 0)
    return false;
  *id = static_cast<uint32_t>(plan_.send_of_transfer[h.transfer]);
  return plan_.nodes[*id].peer == h.src;
}

// Shared memory loses nothing and repeats nothing, so the sender is at fault, and what it meant to say will not come.
// (What an open connection brings is dropped: nobody who isn't asked can end an operation.)
void Execution::Refuse(Link* link, const Header& h) {
  if (link == nullptr || link->slab() == nullptr) return;
  engine_->FailKey(request.key,
                   Format("%s: rank %u sent something that doesn't belong here (message %u, transfer %u, lane %u, %u "
                          "bytes); is one version of jaxcoll installed everywhere?",
                          Describe().c_str(), h.src, static_cast<unsigned>(h.type), h.transfer, h.lane, h.payload),
                   this);
}

void Execution::OnOffer(Link* link, const Header& h, const RemoteSpan* spans, size_t count, Execution* local_sender) {
  size_t total = 0;
  for (size_t k = 0; k < count; ++k) total += spans[k].size;
  uint32_t i;
  InState* s = Expected(h, &i, total);
  if (s == nullptr || count == 0) return Refuse(link, h);
  s->link = link;
  s->local_sender = local_sender;
  s->offered_at = h.offset;
  s->direct = link == nullptr;
  s->first = spans[0];
  s->more.assign(spans + (count > 1 ? 0 : count), spans + count);
  s->state = In::kOffered;
  Arrived(h.lane, i);
}

void Execution::OnPosted(Link* link, const Header& h, const RemoteSpan& block) {
  uint32_t i;
  const void* data = link->Posted(block);
  InState* s = data == nullptr ? nullptr : Expected(h, &i, block.size);
  if (s == nullptr) {
    link->ReleasePosted(block);
    return Refuse(link, h);
  }
  s->link = link;
  s->direct = true;
  s->posted = block;
  s->first = {reinterpret_cast<uint64_t>(data), block.size};
  s->state = In::kOffered;
  Arrived(h.lane, i);
}

void Execution::OnEager(Link* link, const Header& h, const void* payload) {
  uint32_t i;
  InState* s = Expected(h, &i, h.payload);
  if (s == nullptr) return Refuse(link, h);
  s->link = link;
  s->buffer.reset(new uint8_t[h.payload]);
  if (h.payload > 0) memcpy(s->buffer.get(), payload, h.payload);  // of nothing, also the address is null
  s->state = In::kHeld;
  Arrived(h.lane, i);
}

void Execution::OnReady(Link*, const Header& h) {
  heard_[h.src] = true;
  uint32_t id;
  if (!Sent(h, &id)) return;
  OutState& o = out(h.lane, id);
  if (o.peer_ready || Local(h.src) || LinkTo(h.src)->can_read()) return;
  o.peer_ready = true;
  if (o.data_ready && !o.done) Stream(h.lane, id);
}

std::vector<MutableSpan> Execution::DataTarget(Link* link, const Header& h) {
  heard_[h.src] = true;
  uint32_t i;
  InState* awaited = Awaited(h, &i);
  size_t total = awaited == nullptr ? 0 : IncomingBytes(h.lane, i);
  // Only what was asked for is taken: a peer can't make this process write elsewhere or hold more.
  if (awaited == nullptr || !awaited->ready_sent || h.total != total || h.offset > total ||
      h.payload > total - h.offset || h.payload > total - awaited->promised ||
      (awaited->state != In::kNone && awaited->state != In::kLanding)) {
    Refuse(link, h);
    return {};
  }
  InState& s = *awaited;
  const Node& node = plan_.nodes[plan_.node_of_incoming[i]];
  if (s.state == In::kNone) {
    s.state = In::kLanding;
    s.link = link;
    s.arrive_ns = NowNs();
    if (!InPlace(node)) s.buffer.reset(new uint8_t[total]);
  }
  // Never more than the total, so that all has landed when the total has. A peer that sends one part twice and leaves
  // another out spoils the value that it owes, and nothing else: parts aren't told from each other.
  s.promised += h.payload;
  if (!InPlace(node)) return {{s.buffer.get() + h.offset, h.payload}};
  // Of the elements that the part touches, perhaps half of the first and of the last: there are many parts, and a list
  // of the whole lane's pieces for each would be long.
  std::vector<MutableSpan> target;
  const size_t element = WireSize(plan_.incoming[i].wide);
  const int64_t begin = LaneOf(node.chunk, h.lane).begin;
  Range touched{begin + static_cast<int64_t>(h.offset / element),
                begin + static_cast<int64_t>((h.offset + h.payload + element - 1) / element)};
  size_t skip = h.offset % element, want = h.payload;
  for (const Span& span : SlotSpans(node.dst, node.chunk, touched)) {
    size_t take = std::min(span.size - skip, want);
    target.push_back({static_cast<uint8_t*>(const_cast<void*>(span.data)) + skip, take});
    skip = 0;
    want -= take;
  }
  return target;
}

void Execution::OnLanded(Link*, const Header& h, const Timed& timed) {
  uint32_t i;
  InState* landing = Awaited(h, &i);
  if (landing == nullptr || landing->state != In::kLanding) return;
  InState& s = *landing;
  if (timed.bytes > 0) {
    int64_t begin = timed.end_ns - timed.ns;
    s.begin_ns = s.timed == 0 ? begin : std::min(s.begin_ns, begin);
    s.end_ns = std::max(s.end_ns, timed.end_ns);
    s.timed += timed.bytes;
    s.transfer_ns += timed.ns;
  }
  s.received += h.payload;
  if (s.received < h.total) return;
  s.done_ns = NowNs();
  s.state = s.buffer ? In::kHeld : In::kInPlace;
  Arrived(h.lane, i);
}

void Execution::Arrived(uint32_t lane, uint32_t i) {
  InState& s = in(lane, i);
  if (s.arrive_ns == 0) s.arrive_ns = NowNs();
  if (lane >= next_lane_) return;  // StartLane will count it
  uint32_t id = plan_.node_of_incoming[i];
  if (--missing(lane, id) == 0 && deps(lane, id) == 0 && !failed) engine_->AddTask(this, lane, id);
}

void Execution::OnAck(const Header& h) {
  uint32_t id;
  // Only an offer ends with an acknowledgement: what streams is still being read from our memory.
  if (Sent(h, &id) && out(h.lane, id).offered) SendDone(h.lane, id);
}

void Execution::SendDone(uint32_t lane, uint32_t id) {
  OutState& o = out(lane, id);
  if (o.done || failed) return;
  o.done = true;
  o.gathered.reset();
  NodeDone(lane, id);
}

void Execution::NodeDone(uint32_t lane, uint32_t id) {
  const Node& node = plan_.nodes[id];
  --nodes_left_;
  for (uint32_t k = node.first_next; k < node.first_next + node.num_next; ++k) {
    uint32_t next = plan_.next[k];
    if (--deps(lane, next) == 0) DepsMet(lane, next);
  }
  if (--lane_left_[lane] == 0 && next_lane_ < lanes_ && !failed) StartLane(next_lane_++);
  if (nodes_left_ == 0) engine_->Retire(this);
}

void Execution::PinSenders(uint32_t lane, uint32_t id, int delta) {
  const Node& node = plan_.nodes[id];
  if (node.kind != NodeKind::kVertex) return;
  for (uint32_t k = node.first_in; k < node.first_in + node.num_in; ++k)
    if (Execution* sender = in(lane, k).local_sender) sender->running += delta;
}

void Execution::NodeRan(uint32_t lane, uint32_t id) {
  const Node& node = plan_.nodes[id];
  if (node.kind == NodeKind::kVertex) {
    int64_t now = 0;
    for (uint32_t k = node.first_in; k < node.first_in + node.num_in; ++k) {
      InState& s = in(lane, k);
      s.buffer.reset();
      if (s.state != In::kOffered) continue;
      if (now == 0) now = NowNs();
      s.done_ns = s.end_ns = now;
      s.begin_ns = s.arrive_ns;
      if (s.transfer_ns > 0) s.timed = IncomingBytes(lane, k);
      if (s.posted.size != 0) {
        s.link->ReleasePosted(s.posted);
        s.posted.size = 0;
        s.state = In::kInPlace;
        continue;
      }
      s.state = In::kInPlace;
      uint32_t transfer = plan_.incoming[k].transfer;
      if (Execution* sender = std::exchange(s.local_sender, nullptr))
        sender->SendDone(lane, static_cast<uint32_t>(sender->plan_.send_of_transfer[transfer]));
      else
        Tell(s.link, MessageType::kAck, plan_.incoming[k].peer, lane, transfer);
    }
  }
  NodeDone(lane, id);
}

}  // namespace jaxcoll
