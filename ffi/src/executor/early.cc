#include "executor/early.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace jaxcoll {
namespace {

uint64_t ShapeOf(uint64_t signature) { return signature >> 8; }

}  // namespace

void EarlyMessages::Keep(Link* link, const Header& header, const void* payload, int64_t now) {
  auto [it, fresh] = by_key_.try_emplace(header.key);
  if (fresh)
    it->second = ops_.insert(ops_.end(), Op{header.key, {}});
  else
    ops_.splice(ops_.end(), ops_, it->second);
  const auto* p = static_cast<const uint8_t*>(payload);
  it->second->messages.push_back({link, header, std::vector<uint8_t>(p, p + header.payload), now});
  bytes_ += Cost(header.payload);
  Count(header, +1);
}

std::vector<Early> EarlyMessages::Take(const OpKey& key, int rank) {
  auto it = by_key_.find(key);
  if (it == by_key_.end()) return {};
  std::vector<Early>& all = it->second->messages;
  auto theirs =
      std::stable_partition(all.begin(), all.end(), [&](const Early& m) { return int{m.header.dst} != rank; });
  if (theirs == all.begin()) return Take(key);
  std::vector<Early> taken(std::make_move_iterator(theirs), std::make_move_iterator(all.end()));
  all.erase(theirs, all.end());
  return Gone(std::move(taken));
}

std::vector<Early> EarlyMessages::Take(const OpKey& key) {
  auto it = by_key_.find(key);
  if (it == by_key_.end()) return {};
  std::vector<Early> taken = std::move(it->second->messages);
  ops_.erase(it->second);
  by_key_.erase(it);
  return Gone(std::move(taken));
}

std::vector<Early> EarlyMessages::TakeStale(int64_t before_ns) {
  if (ops_.empty() || ops_.front().messages.back().kept_ns >= before_ns) return {};
  const OpKey key = ops_.front().key;
  return Take(key);
}

const Early* EarlyMessages::FindOther(uint64_t comm, uint64_t site, uint64_t signature,
                                      const std::function<bool(const Early&)>& wanted) const {
  auto shapes = shapes_.find(Site(comm, site));
  if (shapes == shapes_.end() || std::none_of(shapes->second.begin(), shapes->second.end(), [&](const Shape& s) {
        return s.count > 0 && s.shape != ShapeOf(signature);
      }))
    return nullptr;
  for (const Op& op : ops_) {
    if (op.key.comm != comm || op.key.site != site) continue;
    for (const Early& m : op.messages)
      if (ShapeOf(m.header.signature) != ShapeOf(signature) && wanted(m)) return &m;
  }
  return nullptr;
}

void EarlyMessages::Count(const Header& header, int change) {
  std::vector<Shape>& shapes = shapes_[Site(header.key.comm, header.key.site)];
  const uint64_t shape = ShapeOf(header.signature);
  auto same = std::find_if(shapes.begin(), shapes.end(), [&](const Shape& s) { return s.shape == shape; });
  if (same == shapes.end()) {
    same = std::find_if(shapes.begin(), shapes.end(), [](const Shape& s) { return s.count == 0; });
    if (same == shapes.end()) same = shapes.insert(shapes.end(), Shape{});
    same->shape = shape;
  }
  same->count += static_cast<size_t>(change);
}

std::vector<Early> EarlyMessages::Gone(std::vector<Early> taken) {
  for (const Early& m : taken) {
    bytes_ -= Cost(m.header.payload);
    Count(m.header, -1);
  }
  return taken;
}

}  // namespace jaxcoll
