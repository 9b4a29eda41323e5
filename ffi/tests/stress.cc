// Worlds in one process, joined by shared memory and by socket pairs, under load from many threads: what the sanitizers
// look at, without Python in between. Every round runs sums of random sizes and types of schedules, checks every
// element, and the last one loses a process.
//
//   jaxcoll_stress [seconds] [seed]
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "jaxcoll/jaxcoll.h"

namespace {

constexpr int kRanks = 4;
constexpr int64_t kSecond = 1000000000;
constexpr int32_t kAllReduce = 0, kSum = 0, kS32 = 4;

[[noreturn]] void Fail(const std::string& what) {
  fprintf(stderr, "stress: %s (%s)\n", what.c_str(), jc_last_error());
  abort();
}

void Check(bool ok, const char* what) {
  if (!ok) Fail(what);
}

// ---------------------------------------------------------------- two programs, in the library's binary form

struct Bytes {
  std::vector<uint8_t> data;
  template <typename T>
  Bytes& Put(T v) {
    const auto* p = reinterpret_cast<const uint8_t*>(&v);
    data.insert(data.end(), p, p + sizeof(v));
    return *this;
  }
};

uint32_t Crc32(const uint8_t* p, size_t n) {
  uint32_t c = ~0u;
  for (size_t i = 0; i < n; ++i) {
    c ^= p[i];
    for (int k = 0; k < 8; ++k) c = (c & 1) ? 0xedb88320u ^ (c >> 1) : c >> 1;
  }
  return ~c;
}

struct FlatEdge {
  uint16_t step, src, dst;
  uint8_t op;
};

// A program whose graphs each move one chunk.
std::vector<uint8_t> Encode(const char* name, uint16_t steps, uint16_t lanes,
                            const std::vector<std::vector<FlatEdge>>& graphs) {
  uint32_t edges = 0;
  for (const auto& g : graphs) edges += static_cast<uint32_t>(g.size());
  Bytes b;
  b.Put(uint8_t{0})
      .Put(uint8_t{0})
      .Put(uint16_t{kRanks})
      .Put(int16_t{-1})
      .Put(steps)
      .Put(static_cast<uint16_t>(graphs.size()));
  b.Put(lanes).Put(static_cast<uint32_t>(graphs.size())).Put(edges).Put(edges).Put(static_cast<uint16_t>(strlen(name)));
  b.data.insert(b.data.end(), name, name + strlen(name));
  while ((16 + b.data.size()) % 4 != 0) b.Put(uint8_t{0});
  for (size_t i = 0; i < graphs.size(); ++i) b.Put(int16_t{-1}).Put(int16_t{-1}).Put(uint32_t{1});
  uint32_t first = 0;
  for (const auto& g : graphs) {
    b.Put(first).Put(static_cast<uint32_t>(g.size()));
    first += static_cast<uint32_t>(g.size());
  }
  uint32_t ref = 0;
  for (const auto& g : graphs)
    for (const FlatEdge& e : g)
      b.Put(e.step).Put(e.src).Put(e.dst).Put(e.op).Put(uint8_t{0}).Put(ref++).Put(uint32_t{1});
  for (uint32_t c = 0; c < graphs.size(); ++c)
    for (size_t i = 0; i < graphs[c].size(); ++i) b.Put(c);
  Bytes blob;
  blob.data = {'J', 'X', 'C', 'P'};
  blob.Put(uint16_t{1})
      .Put(uint16_t{0})
      .Put(static_cast<uint32_t>(16 + b.data.size()))
      .Put(Crc32(b.data.data(), b.data.size()));
  blob.data.insert(blob.data.end(), b.data.begin(), b.data.end());
  return blob.data;
}

// Each chunk goes once around to be summed, and once more to be known.
std::vector<uint8_t> Ring() {
  std::vector<std::vector<FlatEdge>> graphs(kRanks);
  for (uint16_t c = 0; c < kRanks; ++c)
    for (uint16_t t = 0; t < 2 * (kRanks - 1); ++t)
      graphs[c].push_back({t, static_cast<uint16_t>((c + t) % kRanks), static_cast<uint16_t>((c + t + 1) % kRanks),
                           uint8_t(t < kRanks - 1)});
  return Encode("ring", 2 * (kRanks - 1), 2, graphs);
}

std::vector<uint8_t> OneShot() {
  std::vector<std::vector<FlatEdge>> graphs(1);
  for (uint16_t a = 0; a < kRanks; ++a)
    for (uint16_t b = 0; b < kRanks; ++b)
      if (a != b) graphs[0].push_back({0, a, b, 1});
  return Encode("one_shot", 1, 1, graphs);
}

// ---------------------------------------------------------------- worlds

enum class Join { kShm, kShmRing, kTcp, kMixed };

struct Cluster {
  std::array<jc_world*, kRanks> worlds{};
  std::vector<std::array<int, 3>> ends;  // process, peer, descriptor: kept to cut them
  std::array<std::array<int64_t, 2>, kRanks> programs{};
  std::atomic<int64_t> keys{1};
};

bool Near(Join join, int a, int b) {
  return join == Join::kShm || join == Join::kShmRing || (join == Join::kMixed && a / 2 == b / 2);
}

void JoinShm(Cluster* c, Join join) {
  std::array<int, kRanks> fds{};
  for (int p = 0; p < kRanks; ++p) {
    fds[p] = memfd_create("stress", 0);
    Check(ftruncate(fds[p], static_cast<off_t>(jc_shm_segment_bytes(kRanks))) == 0, "ftruncate");
    Check(jc_world_shm_create(c->worlds[p], fds[p], kRanks, p) == 0, "segment");
  }
  for (int a = 0; a < kRanks; ++a)
    for (int b = 0; b < kRanks; ++b)
      if (a != b && Near(join, a, b))
        Check(jc_world_shm_peer(c->worlds[a], b, fds[b], b, getpid(), join != Join::kShmRing) == 0, "shm peer");
  for (int fd : fds) close(fd);
}

void JoinTcp(Cluster* c, Join join) {
  for (int a = 0; a < kRanks; ++a)
    for (int b = a + 1; b < kRanks; ++b) {
      bool data = !Near(join, a, b);
      int count = data ? 2 : 1;
      std::array<std::array<int, 2>, 2> fds{};
      for (int i = 0; i < count; ++i) {
        int pair[2];
        Check(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
        for (int side = 0; side < 2; ++side) {
          fds[side][i] = pair[side];
          c->ends.push_back({side == 0 ? a : b, side == 0 ? b : a, dup(pair[side])});
        }
      }
      Check(jc_world_tcp_peer(c->worlds[a], b, fds[0].data(), count, data) == 0, "tcp peer");
      Check(jc_world_tcp_peer(c->worlds[b], a, fds[1].data(), count, data) == 0, "tcp peer");
    }
}

void Open(Cluster* c, Join join) {
  jc_options o{};
  o.timeout_ns = 60 * kSecond;
  o.warn_ns = 50 * kSecond;
  o.mismatch_ns = kSecond;
  o.spin_ns = 100000;
  o.helpers = 1;
  o.record = o.threads = 1;
  o.lane_bytes = 16 << 10;
  o.landing_bytes = 256 << 10;
  for (int p = 0; p < kRanks; ++p) {
    c->worlds[p] = jc_world_create(&o, kRanks, p);
    for (int64_t d = 0; d < kRanks; ++d)
      Check(jc_world_add_devices(c->worlds[p], static_cast<int>(d), &d, 1) == 0, "devices");
  }
  if (join != Join::kTcp) JoinShm(c, join);
  JoinTcp(c, join);
  const std::vector<uint8_t> blobs[] = {Ring(), OneShot()};
  for (int p = 0; p < kRanks; ++p) {
    Check(jc_world_start(c->worlds[p]) == 0, "start");
    for (int k = 0; k < 2; ++k) {
      c->programs[p][k] = jc_program_load(c->worlds[p], blobs[k].data(), blobs[k].size());
      Check(c->programs[p][k] >= 0, "program");
    }
  }
}

void Kill(Cluster* c, int process) {
  for (auto [p, peer, fd] : c->ends)
    if (p == process) shutdown(fd, SHUT_RDWR);
}

void Close(Cluster* c) {
  for (jc_world* w : c->worlds) jc_world_stop(w);
  for (jc_world* w : c->worlds) jc_world_free(w);
  for (const auto& end : c->ends) close(end[2]);
}

constexpr int64_t kDevices[kRanks] = {0, 1, 2, 3};

void Define(Cluster* c, int64_t key, int chosen) {
  for (int p = 0; p < kRanks; ++p)
    Check(jc_set_define(c->worlds[p], key, kDevices, kRanks, c->programs[p].data(), 2, chosen) == 0, "set");
}

// ---------------------------------------------------------------- work

struct Sum {
  std::vector<int32_t> in, out;
  jc_op* op = nullptr;
};

void Begin(Cluster* c, int rank, int64_t key, int64_t launch, int64_t site, int64_t n, Sum* s) {
  s->in.resize(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) s->in[static_cast<size_t>(i)] = static_cast<int32_t>(i * (rank + 1) + launch);
  s->out.assign(static_cast<size_t>(n), -1);
  void* in = s->in.data();
  void* out = s->out.data();
  s->op = jc_op_start(c->worlds[rank], rank, launch, kAllReduce, kSum, kS32, site, key, kDevices, kRanks, 1, 1, &in,
                      &out, &n);
}

// Whether it succeeded; a sum that succeeds must be right.
bool End(Sum* s, int64_t launch) {
  int result = jc_op_wait(s->op, 50 * kSecond);
  if (result == 1) Fail("an operation hangs");
  jc_op_free(s->op);
  if (result != 0) return false;
  for (size_t i = 0; i < s->out.size(); ++i) {
    auto want = static_cast<int32_t>(static_cast<int64_t>(i) * (kRanks * (kRanks + 1) / 2) + launch * kRanks);
    if (s->out[i] != want) Fail("a wrong sum at " + std::to_string(i) + ": " + std::to_string(s->out[i]));
  }
  return true;
}

void OnEveryRank(const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r) threads.emplace_back(work, r);
  for (std::thread& t : threads) t.join();
}

void Drain(Cluster* c, int rank) {
  static thread_local std::vector<uint8_t> records(80 * 512);
  uint64_t dropped = 0;
  while (jc_records_drain(c->worlds[rank], records.data(), 512, &dropped) == 512) {
  }
}

// Several sums of one launch in flight, begun in another order by every rank.
void Round(Cluster* c, int64_t launch, const std::vector<int64_t>& sizes, int64_t key) {
  OnEveryRank([&](int rank) {
    std::vector<Sum> sums(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
      size_t site = (i * 3 + static_cast<size_t>(rank)) % sizes.size();
      Begin(c, rank, key, launch, static_cast<int64_t>(site), sizes[site], &sums[site]);
    }
    for (Sum& s : sums) Check(End(&s, launch), "a sum failed");
    Drain(c, rank);
  });
}

// A table comes into force between two launches, on every world at its own time, while the ranks go on.
void Swap(Cluster* c, int64_t key, uint64_t version, int64_t launch) {
  uint64_t group = jc_group_id(kDevices, kRanks);
  std::vector<uint64_t> sites;
  std::vector<int64_t> launches;
  std::vector<uint32_t> indices;
  for (uint64_t s = 0; s < 8; ++s) {
    sites.push_back(s);
    launches.push_back(launch);
    indices.push_back(0);
  }
  for (int p = 0; p < kRanks; ++p)
    Check(jc_set_stage(c->worlds[p], group, key, version, c->programs[p][version % 2], nullptr, 0) == 0, "stage");
  for (int p = 0; p < kRanks; ++p)
    Check(jc_set_propose(c->worlds[p], group, key, version, sites.data(), launches.data(), indices.data(), 8) == 0,
          "propose");
  for (int p = 0; p < kRanks; ++p) Check(jc_set_decide(c->worlds[p], group, key, version, 1) == 0, "decide");
}

void LoseOne(Cluster* c, int64_t key, int64_t launch) {
  std::atomic<int> failed{0};
  std::thread killer([&] {
    usleep(2000);
    Kill(c, kRanks - 1);
  });
  OnEveryRank([&](int rank) {
    if (rank == kRanks - 1) return;  // never begins
    std::vector<Sum> sums(4);
    for (size_t i = 0; i < sums.size(); ++i) Begin(c, rank, key, launch, static_cast<int64_t>(i), 20000, &sums[i]);
    for (Sum& s : sums) failed += End(&s, launch) ? 0 : 1;
  });
  killer.join();
  Check(failed == 4 * (kRanks - 1), "a sum without one of its ranks succeeded");
}

void Run(Join join, double seconds, uint64_t seed) {
  Cluster c;
  Open(&c, join);
  std::mt19937_64 random(seed);
  int64_t key = 7, launch = 1;
  uint64_t version = 0;
  Define(&c, key, 0);
  timespec begin, now;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  do {
    std::vector<int64_t> sizes(8);
    for (int64_t& n : sizes) n = static_cast<int64_t>(random() % 3 == 0 ? random() % 60000 : random() % 700);
    std::thread swapper;
    if (launch > 1) swapper = std::thread([&, at = launch + 1] { Swap(&c, key, ++version, at); });
    Round(&c, launch, sizes, key);
    if (swapper.joinable()) swapper.join();
    ++launch;
    clock_gettime(CLOCK_MONOTONIC, &now);
  } while (static_cast<double>(now.tv_sec - begin.tv_sec) + static_cast<double>(now.tv_nsec - begin.tv_nsec) * 1e-9 <
           seconds);
  LoseOne(&c, key, launch + 1);
  Close(&c);
  printf("join %d: %lld launches, %llu tables\n", static_cast<int>(join), static_cast<long long>(launch - 1),
         static_cast<unsigned long long>(version));
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = argc > 1 ? atof(argv[1]) : 2;
  uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
  for (Join join : {Join::kShm, Join::kShmRing, Join::kTcp, Join::kMixed})
    Run(join, seconds / 4, seed + static_cast<uint64_t>(join));
  return 0;
}
