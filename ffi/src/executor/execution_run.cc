// Moving and reducing bytes: what runs without the engine's mutex.
#include <algorithm>
#include <cstring>

#include "executor/execution.h"

namespace jaxcoll {
namespace {

// Of a remote source per pass: the bounce buffers of a fan-in stay in the L2 cache.
constexpr int64_t kBounceElements = 16 << 10;
// Between them: sources a power of two apart would share the few ways of one set of the L1 cache.
constexpr size_t kBounceGap = 5 * 64;
constexpr size_t kAroundFrom = size_t{32} << 10;

// Memory of this thread for one pass: kept for the next, and touched only as far as it is used.
uint8_t* Bounce(size_t bytes) {
  static thread_local std::unique_ptr<uint8_t[]> buffer;
  static thread_local size_t capacity = 0;
  if (bytes > capacity) {
    buffer.reset(new uint8_t[bytes]);
    capacity = bytes;
  }
  return buffer.get();
}

Status TooShort() { return Status::Error("made an offer that is shorter than its transfer"); }

}  // namespace

Status Execution::Unreadable(const Status& status, uint32_t incoming) const {
  if (status.ok()) return status;
  return Status::Error(
      Format("rank %u %s%s", plan_.incoming[incoming].peer, status.message().c_str(), Where(incoming).c_str()));
}

uint8_t* Execution::Locate(const Slot& slot, uint32_t chunk, int64_t at, int64_t* elements) const {
  if (slot.kind == SlotKind::kScratch)
    return scratch_[slot.scratch].get() + static_cast<size_t>(at - ranges_[chunk].begin) * WireSize(slot.wide);
  const View& view = slot.kind == SlotKind::kInput ? request.input : request.output;
  return view.At(slot.block, at, elements);
}

std::vector<Span> Execution::SlotSpans(const Slot& slot, uint32_t chunk, Range r) const {
  std::vector<Span> spans;
  if (slot.kind == SlotKind::kScratch) {
    int64_t m = r.size();
    spans.push_back({Locate(slot, chunk, r.begin, &m), static_cast<size_t>(r.size()) * WireSize(slot.wide)});
    return spans;
  }
  const View& view = slot.kind == SlotKind::kInput ? request.input : request.output;
  view.ForEach(slot.block, r.begin, r.end,
               [&](uint8_t* p, int64_t, int64_t m) { spans.push_back({p, static_cast<size_t>(m) * element_size_}); });
  return spans;
}

size_t Execution::TaskBytes(uint32_t lane, uint32_t id) const {
  const Node& node = plan_.nodes[id];
  Range r = node.kind == NodeKind::kZero ? Cleared(lane) : LaneOf(node.chunk, lane);
  return static_cast<size_t>(r.size()) * element_size_ * (1 + node.num_in);
}

Range Execution::Cleared(uint32_t lane) const {
  return Program::LaneRange({0, request.output.block_elements}, static_cast<int>(lane), static_cast<int>(lanes_));
}

Status Execution::RunNode(uint32_t lane, uint32_t id) {
  const Node& node = plan_.nodes[id];
  switch (node.kind) {
    case NodeKind::kVertex:
      return node.reduce ? ReduceIn(lane, node) : CopyIn(lane, node);
    case NodeKind::kCopy:
      return CopySlot(node, LaneOf(node.chunk, lane));
    case NodeKind::kZero:
      for (const Span& s : SlotSpans(node.dst, 0, Cleared(lane))) memset(const_cast<void*>(s.data), 0, s.size);
      return {};
    default:
      return {};
  }
}

void Execution::CopyBytes(void* dst, const void* src, size_t bytes) const {
  if (large_ && bytes >= kAroundFrom)
    CopyAround(dst, src, bytes);
  else
    memcpy(dst, src, bytes);
}

Status Execution::CopySlot(const Node& node, Range r) {
  for (int64_t at = r.begin; at < r.end;) {
    int64_t m = r.end - at;
    uint8_t* to = Locate(node.dst, node.chunk, at, &m);
    uint8_t* from = Locate(node.src, node.chunk, at, &m);
    if (to != from && node.dst.wide == node.src.wide)
      CopyBytes(to, from, static_cast<size_t>(m) * WireSize(node.dst.wide));
    else if (to != from)
      Convert(request.dtype, to, node.dst.wide, from, node.src.wide, static_cast<size_t>(m));
    at += m;
  }
  return {};
}

Status Execution::CopyIn(uint32_t lane, const Node& node) {
  InState& s = in(lane, node.first_in);
  if (s.state == In::kInPlace) return {};
  Range r = LaneOf(node.chunk, lane);
  int64_t begin_ns = NowNs();
  size_t at = 0;
  SpanCursor cursor(s.spans(), s.num_spans());
  for (const Span& to : SlotSpans(node.dst, node.chunk, r)) {
    auto* dst = static_cast<uint8_t*>(const_cast<void*>(to.data));
    if (s.state == In::kHeld) {
      memcpy(dst, s.buffer.get() + at, to.size);
    } else if (s.direct) {
      for (size_t got = 0; got < to.size;) {
        size_t left = 0;
        const uint8_t* from = cursor.At(at + got, &left);
        size_t take = std::min(left, to.size - got);
        if (from == nullptr) return Unreadable(TooShort(), node.first_in);
        CopyBytes(dst + got, from, take);
        got += take;
      }
    } else {
      JC_RETURN_IF_ERROR(Unreadable(Fetch(s, &cursor, at, to.size, dst), node.first_in));
    }
    at += to.size;
  }
  if (s.state == In::kOffered) s.transfer_ns = NowNs() - begin_ns;
  return {};
}

Status Execution::Fetch(const InState& s, SpanCursor* cursor, size_t at, size_t size, uint8_t* to) const {
  if (s.more.empty()) {
    RemoteSpan one{s.first.address + at, size};
    JC_RETURN_IF_ERROR(s.link->Read(&one, 1, to, size));
  } else {
    std::vector<RemoteSpan> part = cursor->Part(at, size);
    JC_RETURN_IF_ERROR(s.link->Read(part.data(), part.size(), to, size));
  }
  // Its sender may have failed meanwhile, or before this rank began: the memory then holds anything.
  return s.link->Withdrawn(request.key, s.offered_at) ? Status::Error("has given up this operation") : Status();
}

int64_t Execution::InOnePiece(uint32_t lane, const Node& node, int64_t at, int64_t most, SpanCursor* cursors) const {
  for (uint32_t k = 0; k < node.num_in; ++k) {
    const InState& s = in(lane, node.first_in + k);
    if (s.state != In::kOffered || !s.direct) continue;
    size_t left = 0, wire = WireSize(plan_.incoming[node.first_in + k].wide);
    cursors[k].At(static_cast<size_t>(at) * wire, &left);
    most = std::min(most, static_cast<int64_t>(left / wire));
  }
  return most;
}

Status Execution::ReduceIn(uint32_t lane, const Node& node) {
  Range r = LaneOf(node.chunk, lane);
  if (r.size() == 0) return {};
  bool has_own = node.src.kind != SlotKind::kNone, remote = false;
  size_t widest = 0;
  static thread_local std::vector<SpanCursor> cursors;
  cursors.clear();
  for (uint32_t k = 0; k < node.num_in; ++k) {
    const InState& s = in(lane, node.first_in + k);
    cursors.emplace_back(s.spans(), s.num_spans());
    remote = remote || (s.state == In::kOffered && !s.direct);
    widest = std::max(widest, WireSize(plan_.incoming[node.first_in + k].wide));
  }
  static thread_local std::vector<Source> sources;
  const int64_t block = remote ? std::min(kBounceElements, r.size()) : r.size();
  const size_t stride = static_cast<size_t>(block) * widest + kBounceGap;
  uint8_t* const bounce = remote ? Bounce(stride * node.num_in) : nullptr;
  for (int64_t at = r.begin; at < r.end;) {
    int64_t m = std::min(block, r.end - at);
    uint8_t* dst = Locate(node.dst, node.chunk, at, &m);
    uint8_t* own = has_own ? Locate(node.src, node.chunk, at, &m) : nullptr;
    m = InOnePiece(lane, node, at - r.begin, m, cursors.data());
    if (m <= 0) return Unreadable(TooShort(), node.first_in);
    sources.clear();
    for (uint32_t k = 0; k < node.num_in; ++k) {
      if (has_own && k == node.own_place) sources.push_back({own, node.src.wide});
      InState& s = in(lane, node.first_in + k);
      bool wide = plan_.incoming[node.first_in + k].wide;
      size_t offset = static_cast<size_t>(at - r.begin) * WireSize(wide), left;
      if (s.state == In::kHeld) {
        sources.push_back({s.buffer.get() + offset, wide});
      } else if (s.direct) {
        sources.push_back({cursors[k].At(offset, &left), wide});
      } else {
        uint8_t* to = bounce + stride * k;
        int64_t begin = NowNs();
        JC_RETURN_IF_ERROR(
            Unreadable(Fetch(s, &cursors[k], offset, static_cast<size_t>(m) * WireSize(wide), to), node.first_in + k));
        s.transfer_ns += NowNs() - begin;
        sources.push_back({to, wide});
      }
    }
    if (has_own && node.own_place >= node.num_in) sources.push_back({own, node.src.wide});
    int64_t begin = NowNs();
    Combine(request.dtype, request.reduce, dst, node.dst.wide, sources.data(), static_cast<int>(sources.size()),
            static_cast<size_t>(m));
    // One pass read all sources together: those that it read in place get their share of the time.
    int64_t share = (NowNs() - begin) / static_cast<int64_t>(sources.size());
    for (uint32_t k = 0; k < node.num_in; ++k)
      if (InState& s = in(lane, node.first_in + k); s.state == In::kOffered && s.direct) s.transfer_ns += share;
    at += m;
  }
  return {};
}

}  // namespace jaxcoll
