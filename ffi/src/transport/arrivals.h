// How long the bytes of a connection were under way, as far as the reader can know.
//
// Reading has little to do with it: a message often comes in one piece (a kernel hands on up to 64 KiB at once), and a
// reader that got no core for a while finds several in the socket; what it times is a copy. So the stream is sampled:
// "at `ns`, `arrived` bytes had come". The time from one piece to the next is the price of the larger of the two: a
// token bucket lets a large one through and then holds back the next, and what a late reader finds as one piece was
// several. It is known only if the second had set out by then, which its sender says.
#ifndef JAXCOLL_TRANSPORT_ARRIVALS_H_
#define JAXCOLL_TRANSPORT_ARRIVALS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/link.h"

namespace jaxcoll {

// Of one link: when the last piece came, on whichever connection, and its bytes.
struct Came {
  int64_t ns = 0;
  uint64_t bytes = 0;
};

// Of one connection; of the thread that reads it.
class Arrivals {
 public:
  // At `ns`, `arrived` bytes of the stream had come; `before` is what the link brought last, and is moved on.
  void Saw(Came* before, int64_t ns, uint64_t arrived) {
    Sample& last = samples_.back();
    if (arrived <= last.arrived) return;
    uint64_t own = arrived - last.arrived;
    bool unknown = before->ns == 0 || ns <= before->ns || gap_end_ > last.arrived;
    Sample s{ns, ns - before->ns, std::max(before->bytes, own), arrived, unknown};
    if (ns > before->ns)
      *before = {ns, own};
    else
      before->bytes += own;
    if (samples_.size() < kMost) return samples_.push_back(s);
    last = {ns, last.took + s.took, last.paid + s.paid, arrived, last.unknown || s.unknown};  // coarser
  }

  // Nothing was under way when the byte at `position` was sent.
  void Gap(uint64_t position) {
    gap_end_ = position + 1;
    for (size_t i = samples_.size(); i-- > 1 && samples_[i].arrived > position;)
      if (samples_[i - 1].arrived <= position) samples_[i].unknown = true;
  }

  // The time of the bytes [begin, end) of the stream, all of which have been read.
  Timed Of(uint64_t begin, uint64_t end) const {
    Timed timed;
    double ns = 0, bytes = 0;
    for (size_t i = 1; i < samples_.size() && samples_[i - 1].arrived < end; ++i) {
      const Sample& s = samples_[i];
      uint64_t from = samples_[i - 1].arrived, first = std::max(begin, from), last = std::min(end, s.arrived);
      if (first >= last || s.unknown) continue;
      double part = static_cast<double>(last - first) / static_cast<double>(s.arrived - from);
      ns += part * static_cast<double>(s.took);
      bytes += part * static_cast<double>(s.paid);
      timed.end_ns = s.ns;
    }
    timed.ns = static_cast<int64_t>(ns);
    timed.bytes = static_cast<uint64_t>(bytes);
    return timed;
  }

  // Nobody will ask for what lies before `position`.
  void Forget(uint64_t position) {
    size_t keep = 0;
    while (keep + 1 < samples_.size() && samples_[keep + 1].arrived <= position) ++keep;
    samples_.erase(samples_.begin(), samples_.begin() + static_cast<ptrdiff_t>(keep));
  }

 private:
  // The piece up to `arrived` came at `ns`, `took` after the one before it: the time of `paid` bytes.
  struct Sample {
    int64_t ns, took;
    uint64_t paid, arrived;
    bool unknown;  // it may have set out at any time
  };
  static constexpr size_t kMost = 64;

  std::vector<Sample> samples_{{0, 0, 0, 0, true}};
  uint64_t gap_end_ = 0;  // of the last one
};

}  // namespace jaxcoll

#endif  // JAXCOLL_TRANSPORT_ARRIVALS_H_
