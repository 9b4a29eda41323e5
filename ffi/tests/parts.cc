// Parts of the library by themselves: what no operation of a test's size shows.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "executor/completers.h"
#include "executor/early.h"
#include "reduce/combine.h"
#include "transport/descriptor.h"
#include "transport/shm.h"
#include "transport/shm_layout.h"
#include "transport/shm_slab.h"
#include "transport/silence.h"
#include "transport/tcp.h"

namespace {

using namespace jaxcoll;  // NOLINT: a test

[[noreturn]] void Fail(const std::string& what) {
  fprintf(stderr, "parts: %s\n", what.c_str());
  abort();
}

void Check(bool ok, const char* what) {
  if (!ok) Fail(what);
}

// ---------------------------------------------------------------- the slab by itself

// Wherever the last block ended, an empty slab takes the largest one: about the middle it fits on neither side.
void LargestBlock() {
  std::vector<uint8_t> memory(kSlabBytes + kLine), data(kSlabLimitMany);
  auto* base = reinterpret_cast<uint8_t*>(RoundUp(reinterpret_cast<uintptr_t>(memory.data()), kLine));
  for (size_t size = kSlabLimitMany - 4096; size <= kSlabLimitMany; size += kLine) {
    ShmSlab slab(base, 1, 0);
    for (size_t bytes : {size, kSlabLimitMany}) {
      Span span{data.data(), bytes};
      uint64_t block = slab.Put(&span, 1, bytes);
      Check(block != 0, "an empty slab has no room");
      slab.Release(block);
    }
  }
}

// What a process holds that has ended is free; what others hold is not. Also where the heads take several lines.
void LostReader(int places) {
  constexpr size_t kBytes = 100 << 10;
  std::vector<uint8_t> memory(kSlabBytes + kLine), data(kBytes);
  auto* base = reinterpret_cast<uint8_t*>(RoundUp(reinterpret_cast<uintptr_t>(memory.data()), kLine));
  ShmSlab slab(base, places, 0);
  std::vector<uint64_t> blocks;
  Span span{data.data(), kBytes};
  while (uint64_t block = slab.Put(&span, 1, kBytes)) {
    slab.Lend(block, 1);
    slab.Lend(block, places - 1);
    slab.Release(block);
    blocks.push_back(block);
  }
  Check(blocks.size() >= 18 && blocks.back() + kBytes <= kSlabBytes, "blocks in the slab");
  auto read = [&](uint64_t block) { HeadOf(base, block, places)->held[places - 1].fetch_sub(1); };
  read(blocks[0]);
  Check(slab.Put(&span, 1, kBytes) == 0, "a block was given away that a living process holds");
  slab.Gone(1);
  Check(slab.Put(&span, 1, kBytes) == blocks[0], "a lost process keeps its block");
  Check(slab.Put(&span, 1, kBytes) == 0, "a block was given away after another process's end");
}

// ---------------------------------------------------------------- a ring by itself

struct Heard final : LinkSink {
  void OnMessage(Link*, const Header& header, const void*) override { bytes += header.payload; }
  std::vector<MutableSpan> OnData(Link*, const Header&) override { return {}; }
  void OnLanded(Link*, const Header&, const Timed&) override {}
  void OnSent(Link*, uint64_t) override {}
  void OnLinkDown(Link*, const std::string& why) override { Fail(why); }
  void Work() override {}
  size_t bytes = 0;
};

// Two processes of one host; 0 sends to 1. Nobody polls but the test.
struct Pair {
  std::array<std::unique_ptr<ShmTransport>, 2> ends;
  std::array<std::unique_ptr<ShmLink>, 2> links;
  Heard heard;
  std::vector<uint8_t> data = std::vector<uint8_t>(kRingBytes);

  Pair() {
    std::array<int, 2> fds{};
    for (int p = 0; p < 2; ++p) {
      fds[p] = memfd_create("parts", 0);
      Check(ftruncate(fds[p], static_cast<off_t>(ShmTransport::SegmentBytes(2))) == 0, "ftruncate");
      Check(ShmTransport::Create(fds[p], 2, p, &ends[p]).ok(), "segment");
    }
    for (int p = 0; p < 2; ++p) {
      Check(ends[p]->AddPeer(fds[1 - p], 1 - p, 1 - p, getpid(), false, &links[p]).ok(), "peer");
      ends[p]->Run(&heard, false);
    }
    for (int fd : fds) close(fd);
  }
  bool Send(size_t bytes) {
    Span span{data.data(), bytes};
    return links[0]->Send(Header{}, &span, 1);
  }
  // Until a message waits for room.
  void Fill() {
    while (links[0]->idle()) Send(1000);
  }
};

// A message that would never find room is refused, so that nothing waits behind it; the longest finds room wherever the
// last one ended.
void LongestMessage() {
  constexpr size_t kLongest = kRingBytes / 2 - sizeof(RecordHead) - sizeof(Header);
  Pair pair;
  size_t sent = 0;
  for (size_t i = 0; i < 100; ++i) {
    Check(!pair.Send(kRingBytes) && !pair.Send(kLongest + 1), "a message was taken that may never find room");
    for (size_t bytes : {kLongest, i * 97}) {
      Check(pair.Send(bytes), "a message was refused");
      sent += bytes;
      while (pair.ends[1]->Poll() || pair.ends[0]->Poll()) {
      }
      Check(pair.heard.bytes == sent, "a message found no room in an empty ring");
    }
  }
}

// What waited for a lost process is dropped, and nothing more is kept for it: nobody would poll it away.
void LostPeer() {
  Pair pair;
  pair.Fill();
  pair.links[0]->PeerGone();
  Check(pair.links[0]->idle(), "a message waits for a lost process");
  Check(pair.Send(1000), "a message was refused");
  pair.links[0]->Stream(Header{}, {{pair.data.data(), pair.data.size()}}, 1);
  Check(pair.links[0]->idle(), "a message was kept for a lost process");
  Check(!pair.ends[0]->Poll(), "something moved to a lost process");
}

// Who has nothing else to do sleeps until the reader has made room.
void WaitForRoom() {
  Pair pair;
  pair.Fill();
  std::atomic<bool> reads{false};
  std::thread reader([&] {
    usleep(50000);
    reads = true;
    pair.ends[1]->Poll();
  });
  pair.ends[0]->Poll();
  const std::atomic<bool> over{false};
  pair.ends[0]->Wait(1000, 600 * int64_t{1000000000}, over);  // for more messages than come: it is the room that wakes
  Check(reads, "no wait for room in the ring");
  reader.join();
  Check(pair.ends[0]->Poll() && pair.links[0]->idle(), "no room after a wait for it");
}

// An operation that has failed is known as such by who has read its memory, until so many have come that nobody knows.
void WithdrawnOffers() {
  Pair pair;
  auto key = [](int64_t launch) { return OpKey{1, 2, launch, 0}; };
  auto withdrawn = [&](int64_t launch, uint64_t since) { return pair.links[1]->Withdrawn(key(launch), since); };
  for (int64_t launch = 0; launch < 5000; ++launch) {
    const uint64_t before = pair.links[0]->withdrawals();
    Check(before == static_cast<uint64_t>(launch) && !withdrawn(launch, before), "withdrawn before its time");
    pair.ends[0]->Withdraw(key(launch));
    Check(withdrawn(launch, before) && !withdrawn(launch + 1, before), "which operation is withdrawn");
    Check(!withdrawn(launch, before + 1), "withdrawn before it was offered again");
    Check(withdrawn(launch, launch < 1000 ? 0 : before - 1000), "an operation among many");
    Check(withdrawn(-1, 0) == (launch + 1 >= 1023), "more than are kept");
  }
}

// ---------------------------------------------------------------- descriptors by themselves

// A forked child has none of them, and doesn't touch what has their numbers by then. What is gone isn't closed again.
void ForkedChild() {
  auto open = [](int fd) { return fcntl(fd, F_GETFD) >= 0; };
  auto made = [] { return std::make_unique<Descriptor>(eventfd(0, EFD_CLOEXEC)); };
  std::array<std::unique_ptr<Descriptor>, 4> all{made(), made(), made(), made()};
  const int numbers[] = {*all[0], *all[1], *all[2], *all[3]};
  all[1].reset();
  all[3].reset();
  const int other = eventfd(0, EFD_CLOEXEC);
  Check(other == numbers[1], "the lowest number is taken first");
  const pid_t child = fork();
  if (child == 0) {
    bool fine = *all[0] == -1 && *all[2] == -1 && !open(numbers[0]) && !open(numbers[2]) && open(other);
    const int again = eventfd(0, EFD_CLOEXEC);
    all[0].reset();
    _exit(fine && again == numbers[0] && open(again) ? 7 : 1);
  }
  int status = 0;
  Check(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7, "the forked child");
  Check(*all[0] == numbers[0] && open(numbers[0]) && open(numbers[2]), "the parent has lost a descriptor");
  all[0].reset();
  Check(!open(numbers[0]) && open(other), "closed");
  close(other);
}

// ---------------------------------------------------------------- silent hosts by themselves

// Only who has been sent the same bytes several times, and has answered none of them, is taken for lost.
void SilentHosts() {
  int64_t timeout_ns = 0;
  auto silent = [&](uint32_t unacked, uint8_t again, uint32_t ack_ms, uint32_t sent_ms) {
    tcp_info info{};
    info.tcpi_unacked = unacked;
    info.tcpi_retransmits = again;
    info.tcpi_last_ack_recv = ack_ms;
    info.tcpi_last_data_sent = sent_ms;
    return IsSilent(info, SilenceMs(timeout_ns));
  };
  Check(silent(9, 6, 30000, 4800) && silent(1, 3, 90000, 60000), "a silent host isn't noticed");
  Check(!silent(0, 0, 300000, 300000), "an idle connection is the kernel's");
  Check(!silent(0, 0, 110000, 300000), "a full receiver has answered");
  Check(!silent(9, 6, 29000, 4800), "too early");
  Check(!silent(9, 6, 60000, 900), "the answer is still under way");
  Check(!silent(9, 9, 59990, 60000), "what was sent again has been answered");
  timeout_ns = 300 * int64_t{1000000000};
  Check(!silent(9, 9, 299000, 60000) && silent(9, 9, 300000, 60000), "an outage that a collective would survive");
}

// ---------------------------------------------------------------- sleeping by itself

// The end of an operation wakes its sleeper, whichever of several that is, and whichever of them wakes first.
void EndsWake(Pollable* way) {
  constexpr int kSleepers = 4;
  std::array<std::atomic<bool>, kSleepers> over{};
  std::array<std::atomic<bool>, kSleepers> left{};
  std::vector<std::thread> sleepers;
  for (int i = 0; i < kSleepers; ++i)
    sleepers.emplace_back([&, i] {
      while (!over[i]) way->Wait(1000, 600 * int64_t{1000000000}, over[i]);
      left[i] = true;
    });
  for (int i = 0; i < kSleepers; ++i) {
    usleep(10000);
    Check(!left[i], "left before its end");
    over[i] = true;
    way->Wake();
    for (int waited = 0; !left[i]; ++waited) {
      Check(waited < 3000, "asleep after its end");
      usleep(1000);
    }
  }
  for (std::thread& t : sleepers) t.join();
  way->Wait(1000, 600 * int64_t{1000000000}, over[0]);
}

void EndsWakeEverywhere() {
  Pair pair;
  EndsWake(pair.ends[0].get());
  std::unique_ptr<TcpTransport> tcp;
  Check(TcpTransport::Create(0, &tcp).ok(), "tcp");
  for (int round = 0; round < 10; ++round) EndsWake(tcp.get());
}

// ---------------------------------------------------------------- early messages by themselves

Header Message(int64_t launch, uint16_t dst, uint64_t shape) {
  Header h;
  h.type = MessageType::kEager;
  h.payload = 8;
  h.dst = dst;
  h.key = {1, 2, launch, 0};
  h.signature = shape << 8;
  return h;
}

void EarlyMessagesAreFound() {
  const uint64_t data = 0;
  EarlyMessages early;
  auto others = [&](uint64_t site, uint64_t shape) {
    size_t n = 0;
    early.FindOther(1, site, shape << 8, [&](const Early&) { return ++n == 0; });
    return n;
  };
  for (int64_t launch = 0; launch < 4; ++launch)
    for (uint16_t dst : {0, 1}) early.Keep(nullptr, Message(launch, dst, 5), &data, launch);
  early.Keep(nullptr, Message(0, 1, 6), &data, 9);  // now the operation that had waited for longest has waited least
  Check(early.bytes() == 9 * EarlyMessages::Cost(8), "bytes");
  Check(others(2, 5) == 1 && others(2, 6) == 8 && others(2, 7) == 9 && others(3, 7) == 0, "messages of another shape");
  Check(early.Take(Message(1, 0, 5).key, 2).empty() && early.Take(Message(7, 0, 5).key).empty(), "taken of nothing");
  Check(early.Take(Message(1, 0, 5).key, 1).size() == 1 && early.Take(Message(1, 0, 5).key, 1).empty(), "of one rank");
  Check(early.TakeStale(1).empty(), "stale before its time");
  Check(early.TakeStale(3).front().header.key.launch == 1 && early.TakeStale(3).front().header.key.launch == 2,
        "stale");
  Check(early.TakeStale(3).empty() && early.Take(Message(3, 0, 5).key).size() == 2, "what is left");
  std::vector<Early> last = early.TakeStale(10);
  Check(last.size() == 3 && last[2].header.signature == 6 << 8 && last[2].payload.size() == 8, "in order");
  Check(early.bytes() == 0 && others(2, 7) == 0 && early.TakeStale(10).empty(), "something is left");
}

// ---------------------------------------------------------------- denormal numbers by themselves

#if defined(__SSE2__)
float FromBits(uint32_t bits) {
  float value = 0;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// XLA's threads flush denormal numbers to zero, others don't, and any of them may reduce: the result is the same.
void DenormalsAreKept() {
  constexpr size_t kCount = 100;
  const std::vector<float> tiny(kCount, FromBits(71362));  // 1e-40
  const std::vector<uint16_t> half(kCount, 3);             // 3 * 2^-133 in bf16
  std::vector<uint32_t> sum(kCount), most(kCount), wide(kCount);
  std::vector<uint16_t> narrow(kCount);
  const unsigned before = _mm_getcsr(), flush = before | 0x8040;
  _mm_setcsr(flush);
  const std::array<Source, 2> two{Source{tiny.data(), false}, Source{tiny.data(), false}};
  const std::array<Source, 2> halves{Source{half.data(), false}, Source{half.data(), false}};
  Combine(DType::kF32, Reduction::kSum, sum.data(), false, two.data(), 2, kCount);
  Combine(DType::kF32, Reduction::kMax, most.data(), false, two.data(), 2, kCount);
  Combine(DType::kBF16, Reduction::kSum, narrow.data(), false, halves.data(), 2, kCount);
  Convert(DType::kBF16, wide.data(), true, half.data(), false, kCount);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  Check(after == flush, "the thread rounds otherwise than before");
  for (size_t i = 0; i < kCount; ++i)
    Check(sum[i] == 142724 && most[i] == 71362 && narrow[i] == 6 && wide[i] == 3 << 16, "a denormal number is lost");
}
#else
void DenormalsAreKept() {}
#endif

// ---------------------------------------------------------------- completers by themselves

size_t Threads() {
  auto all = std::filesystem::directory_iterator("/proc/self/task");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

// As many threads as completions block, however quickly these follow each other.
void OneThreadForEach() {
  constexpr size_t kAtOnce = 40;
  for (int round = 0; round < 5; ++round) {
    Completers completers;
    std::atomic<size_t> inside{0};
    std::atomic<bool> go{false};
    size_t before = Threads();
    for (size_t i = 0; i < kAtOnce; ++i)
      completers.Run({[&] {
        ++inside;
        while (!go) usleep(1000);
      }});
    while (inside < kAtOnce) usleep(1000);
    Check(Threads() <= before + kAtOnce, "more threads than completions");
    go = true;
    completers.Stop();
  }
}

}  // namespace

int main() {
  LargestBlock();
  LostReader(3);
  LostReader(100);
  LongestMessage();
  LostPeer();
  WaitForRoom();
  WithdrawnOffers();
  ForkedChild();
  SilentHosts();
  EndsWakeEverywhere();
  EarlyMessagesAreFound();
  DenormalsAreKept();
  OneThreadForEach();
  return 0;
}
