// Time and small hashes. Durations are steady nanoseconds; WallNs() is for records only.
#ifndef JAXCOLL_BASE_CLOCK_H_
#define JAXCOLL_BASE_CLOCK_H_

#include <cstdint>
#include <ctime>

namespace jaxcoll {

inline int64_t NowNs() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
}

inline int64_t WallNs() {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
}

// The wall clock minus the steady clock, read once: steady + offset orders records of several hosts roughly.
inline int64_t WallOffsetNs() {
  static const int64_t offset = WallNs() - NowNs();
  return offset;
}

// splitmix64's finaliser: a good mixer for hash tables and ids, no secret.
inline uint64_t Mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace jaxcoll

#endif  // JAXCOLL_BASE_CLOCK_H_
