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
    size_t i = 0;
    if (leaves.size() > 1)
      i = static_cast<size_t>(std::upper_bound(leaves.begin(), leaves.end(), begin,
                                               [](int64_t v, const Leaf& l) { return v < l.begin; }) -
                              leaves.begin()) -
          1;
    for (; i < leaves.size() && begin < end; ++i) {
      const Leaf& leaf = leaves[i];
      int64_t stop = std::min(end, leaf.begin + leaf.count);
      if (stop <= begin) continue;
      f(leaf.base + static_cast<size_t>(int64_t{block} * leaf.count + begin - leaf.begin) * element_size, begin,
        stop - begin);
      begin = stop;
    }
  }
};

}  // namespace jaxcoll

#endif  // JAXCOLL_EXECUTOR_VIEW_H_
