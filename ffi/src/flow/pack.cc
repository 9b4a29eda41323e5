// The C interface of the packer.
#include "pack.h"

#include <algorithm>
#include <new>
#include <vector>

#include "packer.h"

namespace {

using jaxcoll::flow::Edge;
using jaxcoll::flow::Has;
using jaxcoll::flow::Order;
using jaxcoll::flow::Packer;
using jaxcoll::flow::Put;
using jaxcoll::flow::Tree;
using jaxcoll::flow::Words;

bool Sorted(int32_t ranks, int32_t arcs, const int32_t* tail, const int32_t* head) {
  for (int32_t a = 0; a < arcs; ++a) {
    if (tail[a] < 0 || tail[a] >= ranks || head[a] < 0 || head[a] >= ranks || tail[a] == head[a]) return false;
    if (a > 0 && (tail[a] < tail[a - 1] || (tail[a] == tail[a - 1] && head[a] <= head[a - 1]))) return false;
  }
  return true;
}

}  // namespace

struct jc_pack {
  Packer packer;
};

extern "C" {

jc_pack* jc_pack_new(int32_t ranks, int32_t arcs, const int32_t* tail, const int32_t* head, const int64_t* capacity,
                     int32_t ncuts, const uint8_t* cuts, int32_t max_depth) {
  if (ranks < 1 || arcs < 0 || ncuts < 0 || !Sorted(ranks, arcs, tail, head)) return nullptr;
  try {
    auto* pack = new jc_pack{Packer(ranks, arcs, tail, head, capacity, max_depth)};
    const int32_t bytes = (ranks + 7) / 8;
    for (int32_t c = 0; c < ncuts; ++c) {
      Words cut(pack->packer.words(), 0);
      for (int32_t v = 0; v < ranks; ++v) {
        if (cuts[static_cast<int64_t>(c) * bytes + v / 8] >> (v % 8) & 1) Put(&cut, v);
      }
      pack->packer.AddCut(cut);
    }
    return pack;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void jc_pack_free(jc_pack* pack) { delete pack; }

int32_t jc_pack_run(jc_pack* pack, int32_t orders, const int32_t* root, const int64_t* count, const int32_t* hint_start,
                    const int32_t* hint_tail, const int32_t* hint_head, jc_pack_tick tick) {
  const int32_t ranks = pack->packer.ranks();
  std::vector<Order> list;
  try {
    for (int32_t i = 0; i < orders; ++i) {
      if (root[i] < 0 || root[i] >= ranks || count[i] < 1 || hint_start[i + 1] < hint_start[i]) return JC_PACK_BAD;
      for (int32_t h = hint_start[i]; h < hint_start[i + 1]; ++h) {
        if (hint_tail[h] < 0 || hint_tail[h] >= ranks || hint_head[h] < 0 || hint_head[h] >= ranks) return JC_PACK_BAD;
      }
      list.push_back(
          {root[i], count[i], hint_tail + hint_start[i], hint_head + hint_start[i], hint_start[i + 1] - hint_start[i]});
    }
    return pack->packer.Run(list, tick);
  } catch (const std::bad_alloc&) {
    return JC_PACK_BAD;
  }
}

void jc_pack_stats(const jc_pack* pack, int64_t stats[6]) {
  const Packer& packer = pack->packer;
  stats[0] = 0;
  for (const auto& trees : packer.grown()) stats[0] += static_cast<int64_t>(trees.size());
  stats[1] = static_cast<int64_t>(packer.cuts().size());
  stats[2] = packer.checks();
  stats[3] = packer.rollbacks();
  stats[4] = packer.regrown();
  stats[5] = static_cast<int64_t>(packer.grown().size());
}

void jc_pack_take(const jc_pack* pack, int32_t* root, int64_t* count, int32_t* tail, int32_t* head, uint8_t* cuts) {
  const Packer& packer = pack->packer;
  for (const auto& trees : packer.grown()) {
    for (const Tree& tree : trees) {
      *root++ = tree.root;
      *count++ = tree.count;
      for (const Edge& edge : tree.edges) {
        *tail++ = edge.tail;
        *head++ = edge.head;
      }
    }
  }
  const int32_t bytes = (packer.ranks() + 7) / 8;
  std::fill(cuts, cuts + static_cast<int64_t>(packer.cuts().size()) * bytes, uint8_t{0});
  for (const Words& cut : packer.cuts()) {
    for (int32_t v = 0; v < packer.ranks(); ++v) {
      if (Has(cut, v)) cuts[v / 8] |= static_cast<uint8_t>(1u << (v % 8));
    }
    cuts += bytes;
  }
}

}  // extern "C"
