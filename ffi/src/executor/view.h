// A rank's operand or result: leaves (buffers) that together hold `blocks` equal blocks, each block cut the same way
// over the leaves.
#ifndef JAXCOLL_EXECUTOR_VIEW_H_
#define JAXCOLL_EXECUTOR_VIEW_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace jaxcoll {

struct View {
  struct Leaf {
    uint8_t* base;
    int64_t count;  // elements a block
    int64_t begin;  // first element of the block's numbering
  };
  std::vector<Leaf> leaves;
  int64_t block_elements = 0;
  size_t element_size = 0;

  void Add(void* base, int64_t count) {
    leaves.push_back({static_cast<uint8_t*>(base), count, block_elements});
    block_elements += count;
  }

  // Calls f(pointer, first element, elements) for the contiguous pieces of elements [begin, end) of a block.
  template <typename F>
  void ForEach(int block, int64_t begin, int64_t end, F&& f) const {
    if (begin >= end) return;
    for (size_t i = LeafOf(begin); i < leaves.size() && begin < end; ++i) {
      const Leaf& leaf = leaves[i];
      int64_t stop = std::min(end, leaf.begin + leaf.count);
      if (stop <= begin) continue;
      f(Address(leaf, block, begin), begin, stop - begin);
      begin = stop;
    }
  }

  // Where element `at` of a block lies. `*elements` of them are wanted, and cut to those that lie there in one piece.
  uint8_t* At(int block, int64_t at, int64_t* elements) const {
    uint8_t* found = nullptr;
    for (size_t i = LeafOf(at); i < leaves.size() && found == nullptr && *elements > 0; ++i) {
      const Leaf& leaf = leaves[i];
      int64_t left = leaf.begin + leaf.count - at;
      if (left <= 0) continue;
      *elements = std::min(*elements, left);
      found = Address(leaf, block, at);
    }
    return found;
  }

 private:
  // The last leaf that begins at or before element `at`.
  size_t LeafOf(int64_t at) const {
    if (leaves.size() <= 1) return 0;
    auto after =
        std::upper_bound(leaves.begin(), leaves.end(), at, [](int64_t v, const Leaf& l) { return v < l.begin; });
    return static_cast<size_t>(after - leaves.begin()) - 1;
  }
  uint8_t* Address(const Leaf& leaf, int block, int64_t at) const {
    return leaf.base + static_cast<size_t>(int64_t{block} * leaf.count + at - leaf.begin) * element_size;
  }
};

}  // namespace jaxcoll

#endif  // JAXCOLL_EXECUTOR_VIEW_H_
