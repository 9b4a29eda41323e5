// A value of many pieces, read from its beginning to its end: finding the next byte costs no walk from the first piece.
#ifndef JAXCOLL_EXECUTOR_SPAN_CURSOR_H_
#define JAXCOLL_EXECUTOR_SPAN_CURSOR_H_

#include <algorithm>
#include <vector>

#include "transport/link.h"

namespace jaxcoll {

class SpanCursor {
 public:
  SpanCursor(const RemoteSpan* spans, size_t count) : spans_(spans), count_(count) {}

  // Where byte `at` lies, and how many bytes follow it there; null behind the end. Never before a byte asked for
  // earlier.
  const uint8_t* At(size_t at, size_t* left) {
    if (!MoveTo(at)) {
      *left = 0;
      return nullptr;
    }
    *left = spans_[i_].size - (at - begin_);
    return reinterpret_cast<const uint8_t*>(spans_[i_].address) + (at - begin_);
  }

  // Bytes [at, at + size) as a list, a shorter one where there aren't so many.
  std::vector<RemoteSpan> Part(size_t at, size_t size) {
    std::vector<RemoteSpan> part;
    while (size > 0 && MoveTo(at)) {
      size_t take = std::min<size_t>(spans_[i_].size - (at - begin_), size);
      part.push_back({spans_[i_].address + (at - begin_), take});
      at += take;
      size -= take;
    }
    return part;
  }

 private:
  // False: there is no such byte.
  bool MoveTo(size_t at) {
    for (; i_ < count_ && at - begin_ >= spans_[i_].size; ++i_) begin_ += spans_[i_].size;
    return i_ < count_;
  }

  const RemoteSpan* spans_;
  size_t count_, i_ = 0, begin_ = 0;  // spans_[i_] begins with byte `begin_`
};

}  // namespace jaxcoll

#endif  // JAXCOLL_EXECUTOR_SPAN_CURSOR_H_
