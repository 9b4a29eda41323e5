#include "gpu/placement.h"

#include <algorithm>

namespace jaxcoll {
namespace gpu {
namespace {

constexpr size_t kAlign = 256;

}  // namespace

Placement::Placement(const OpRequest& request, const LaunchPlan& launch, uint32_t lanes)
    : r_(request),
      launch_(launch),
      plan_(*launch.plan),
      program_(*plan_.program),
      lanes_(lanes),
      element_(ElementSize(request.dtype)) {
  int64_t n = r_.input.leaves.empty() ? r_.output.block_elements : r_.input.block_elements;
  for (uint32_t c = 0; c < program_.chunks.size(); ++c) ranges_.push_back(program_.ChunkRange(c, n));
  // Scratch slots, then a landing buffer for every incoming value that is reduced. A landing buffer holds the whole
  // chunk, lanes side by side.
  auto chunk_bytes = [&](uint32_t chunk, bool wide) { return static_cast<size_t>(ranges_[chunk].size()) * Wire(wide); };
  for (const ScratchSlot& s : plan_.scratch) scratch_at_.push_back(Take(chunk_bytes(s.chunk, s.wide)));
  landing_at_.resize(plan_.incoming.size());
  for (uint32_t k = 0; k < plan_.incoming.size(); ++k)
    if (!launch_.in_place[k]) landing_at_[k] = Take(chunk_bytes(ChunkOf(k), plan_.incoming[k].wide));
  for (const LaunchStep& step : launch_.steps)
    for (const LaunchCall& call : step.calls) {
      first_row_[&call] = rows_.size();
      for (size_t row = 0; row < call.parts.size(); ++row)
        for (uint32_t lane = 0; lane < lanes_; ++lane) LayOut(call, row, lane);
    }
}

size_t Placement::Take(size_t bytes) {
  size_t here = bytes_;
  bytes_ += (bytes + kAlign - 1) / kAlign * kAlign;
  return here;
}

uint8_t* Placement::Locate(const Slot& slot, uint32_t chunk, int64_t element) const {
  if (slot.kind == SlotKind::kScratch)
    return memory_ + scratch_at_[slot.scratch] + static_cast<size_t>(element - ranges_[chunk].begin) * Wire(slot.wide);
  const View& view = slot.kind == SlotKind::kInput ? r_.input : r_.output;
  uint8_t* found = nullptr;
  view.ForEach(slot.block, element, element + 1, [&](uint8_t* p, int64_t, int64_t) { found = p; });
  return found;
}

uint8_t* Placement::Landing(uint32_t incoming, int64_t element) const {
  return memory_ + landing_at_[incoming] +
         static_cast<size_t>(element - ranges_[ChunkOf(incoming)].begin) * Wire(plan_.incoming[incoming].wide);
}

uint8_t* Placement::Target(uint32_t incoming, int64_t element) const {
  const Node& node = plan_.nodes[plan_.node_of_incoming[incoming]];
  return launch_.in_place[incoming] ? Locate(node.dst, node.chunk, element) : Landing(incoming, element);
}

size_t Placement::EdgeBytes(uint32_t edge, bool send) const {
  const Edge& e = program_.edges[edge];
  size_t bytes = 0;
  for (uint32_t k = 0; k < e.ref_count; ++k) {
    uint32_t transfer = e.first_transfer + k;
    bool wide = send ? plan_.nodes[static_cast<size_t>(plan_.send_of_transfer[transfer])].wide
                     : plan_.incoming[static_cast<size_t>(plan_.recv_of_transfer[transfer])].wide;
    bytes += static_cast<size_t>(ranges_[program_.refs[e.first_ref + k]].size()) * Wire(wide);
  }
  return bytes;
}

std::vector<std::vector<Site>> Placement::Sources(const LaunchCall& call, size_t row) const {
  std::vector<std::vector<Site>> shares;
  for (uint32_t place = 0; place < call.parts[row].size(); ++place) {
    if (!call.call.reduce && place != call.place) continue;
    shares.emplace_back();
    for (uint32_t part : call.parts[row][place]) {
      const Node& node = plan_.nodes[part];  // what is sent, the vertex with one's own value, or a copy made before
      const Slot& slot = node.kind == NodeKind::kCopy ? node.dst : node.src;
      shares.back().push_back({slot, node.chunk, slot.wide});
    }
  }
  return shares;
}

std::vector<std::vector<Site>> Placement::Sinks(const LaunchCall& call, size_t row) const {
  std::vector<std::vector<Site>> shares;
  for (uint32_t place = 0; place < call.parts[row].size(); ++place) {
    bool own = place == call.place;
    if (call.call.reduce && !own) continue;
    shares.emplace_back();
    for (uint32_t part : call.parts[row][place]) {
      if (own) {
        const Node& node = plan_.nodes[part];
        const Slot& slot = node.kind == NodeKind::kSend ? node.src : node.dst;
        shares.back().push_back({slot, node.chunk, slot.wide});
        continue;
      }
      const Node& node = plan_.nodes[plan_.node_of_incoming[part]];
      bool wide = plan_.incoming[part].wide;
      shares.back().push_back({node.dst, node.chunk, wide, launch_.in_place[part] ? -1 : static_cast<int32_t>(part)});
    }
  }
  return shares;
}

void Placement::LayOut(const LaunchCall& call, size_t row, uint32_t lane) {
  RowPlace p;
  auto bytes_of = [&](const std::vector<Site>& share) {
    size_t bytes = 0;
    for (const Site& s : share) bytes += static_cast<size_t>(LaneOf(s.chunk, lane).size()) * Wire(s.wide);
    return bytes;
  };
  auto sources = Sources(call, row), sinks = Sinks(call, row);
  for (const auto* shares : {&sources, &sinks})
    for (const auto& share : *shares) p.block = std::max(p.block, bytes_of(share));
  if (p.block > 0) {
    p.pack = !Contiguous(sources, lane, p.block, &p.from, &p.from_element);
    p.unpack = !Contiguous(sinks, lane, p.block, &p.to, &p.to_element);
    if (p.pack) p.pack_at = Take(p.block * sources.size());
    if (p.unpack) p.unpack_at = Take(p.block * sinks.size());
  }
  rows_.push_back(p);
}

// Every share as long as a block, one behind the other. Scratch slots count only where there is but one: they are no
// neighbours.
bool Placement::Contiguous(const std::vector<std::vector<Site>>& shares, uint32_t lane, size_t block, Site* first,
                           int64_t* element) const {
  uint8_t* next = nullptr;
  bool together = true, scratch = false;
  size_t pieces = 0;
  for (const auto& share : shares) {
    size_t bytes = 0;
    for (const Site& site : share) {
      bool ours = site.landing >= 0 || site.slot.kind == SlotKind::kScratch;
      scratch = scratch || ours;
      Status all = ForEachPiece(site.chunk, lane, [&](int64_t begin, int64_t n) -> Status {
        size_t length = static_cast<size_t>(n) * Wire(site.wide);
        bytes += length;
        if (pieces++ == 0) {
          *first = site;
          *element = begin;
        }
        if (ours) return {};
        uint8_t* here = Locate(site.slot, site.chunk, begin);
        together = together && (next == nullptr || here == next);
        next = here + length;
        return {};
      });
      together = together && all.ok();
    }
    together = together && bytes == block;
  }
  return together && (!scratch || pieces == 1);
}

}  // namespace gpu
}  // namespace jaxcoll
