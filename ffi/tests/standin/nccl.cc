// NCCL's communicators, groups and point-to-point calls (collectives.cc: its collectives). Kept of the real one: a
// group is one launch per communicator, which begins when all its streams have come to it and the communicator's
// earlier launches are over; its calls progress independently, those to one peer in order; calls match in order,
// without tags; connections are made at the first transfer; non-blocking communicators answer "in progress".
#include "nccl.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>

namespace standin {
namespace {

struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};

struct Delayed {
  Transfer *send, *receive;
  int64_t due_ns;
};

// Never destroyed, as the device is not: its thread still looks at them while a process ends.
auto& cliques = *new std::map<std::string, std::shared_ptr<Clique>>;  // by unique id
auto& comms = *new std::unordered_set<CommState*>;
auto& delays = *new std::map<std::pair<int, int>, int64_t>;  // (device, device)
auto& delayed = *new std::vector<Delayed>;
uint64_t next_id = 1;
int64_t created = 0;
thread_local int depth = 0;
thread_local std::vector<Transfer> pending;
thread_local std::vector<Part> pending_parts;

Device& D() { return Device::Get(); }

}  // namespace

CommState* Find(void* handle, const char* what, bool may_be_busy) {
  auto* c = static_cast<CommState*>(handle);
  if (comms.count(c) == 0) {
    D().Breach(std::string(what) + ": a communicator that was never made");
    return nullptr;
  }
  if (c->gone) {
    D().Breach(std::string(what) + ": a communicator after its abort or end");
    return nullptr;
  }
  if (!may_be_busy && c->status() == kInProgress)
    D().Breach(std::string(what) + ": a communicator that is still in progress");
  return c;
}

int64_t DelayOf(int from, int to) {
  for (auto pair : {std::make_pair(from, to), std::make_pair(-1, -1)})
    if (auto it = delays.find(pair); it != delays.end()) return it->second;
  return 0;
}

namespace {

int CheckConfig(const Config* c) {
  int version = 0;
  if (const char* text = getenv("JAXCOLL_STANDIN_NCCL"))
    version = atoi(text);
  else
    version = 22907;
  bool fits = c != nullptr && c->magic == 0xcafebeef &&
              ((c->size == 48 && c->version < 22700) || (c->size == 72 && c->version >= 22700)) &&
              static_cast<int>(c->version) <= version;
  if (!fits) D().Breach("a config whose size or version this NCCL doesn't know");
  return fits ? 0 : kInvalidArgument;
}

CommState* NewComm() {
  auto* c = new CommState;
  c->device = CurrentDevice();
  comms.insert(c);
  ++created;
  return c;
}

void Finish(Transfer* send, Transfer* receive) {
  D().Touch(send->data, send->bytes, "a send");
  D().Touch(receive->data, receive->bytes, "a receive");
  if (!send->comm->gone && !receive->comm->gone) memcpy(receive->data, send->data, send->bytes);
  --send->launch->left;
  --receive->launch->left;
}

bool Match(Clique* clique, std::pair<int, int> pair) {
  auto &sends = clique->sends[pair], &receives = clique->receives[pair];
  bool moved = false;
  while (!sends.empty() && !receives.empty()) {
    Transfer *s = sends.front(), *r = receives.front();
    sends.pop_front();
    receives.pop_front();
    moved = true;
    if (s->bytes != r->bytes) {
      D().Breach("a send of " + std::to_string(s->bytes) + " bytes met a receive of " + std::to_string(r->bytes));
      s->comm->error = r->comm->error = kInvalidUsage;
      continue;  // neither ends, as on a device
    }
    int64_t delay =
        DelayOf(clique->devices[static_cast<size_t>(pair.first)], clique->devices[static_cast<size_t>(pair.second)]);
    if (delay == 0)
      Finish(s, r);
    else
      delayed.push_back({s, r, NowNs() + delay});
  }
  return moved;
}

bool PollDelayed() {
  bool moved = PollMeetings();
  for (size_t i = 0; i < delayed.size();) {
    if (NowNs() < delayed[i].due_ns) {
      ++i;
      continue;
    }
    Delayed d = delayed[i];
    delayed.erase(delayed.begin() + static_cast<ptrdiff_t>(i));
    Finish(d.send, d.receive);
    moved = true;
  }
  return moved;
}

// A stream's head has come to the launch.
bool Arrive(const std::shared_ptr<Launch>& launch, StreamState* stream) {
  CommState* c = launch->comm;
  if (c->gone) return true;  // aborted: the kernel leaves
  launch->arrived.insert(stream);
  if (!launch->started && launch->arrived.size() == launch->streams.size() && c->launches.front() == launch &&
      c->error == 0) {
    launch->started = true;
    for (Part& p : launch->parts) Meet(c->clique.get(), &p);
    for (Transfer& t : launch->transfers) {
      std::pair<int, int> pair = t.send ? std::make_pair(c->rank, t.peer) : std::make_pair(t.peer, c->rank);
      (t.send ? c->clique->sends : c->clique->receives)[pair].push_back(&t);
      Match(c->clique.get(), pair);
    }
  }
  if (!launch->over()) return false;
  if (!c->launches.empty() && c->launches.front() == launch) c->launches.pop_front();
  return true;
}

int Flush() {
  int result = 0;
  std::map<CommState*, std::shared_ptr<Launch>> launches;
  std::vector<CommState*> order;
  auto launch_of = [&](CommState* c, StreamState* s) {
    auto& launch = launches[c];
    if (launch == nullptr) {
      launch = std::make_shared<Launch>();
      launch->comm = c;
      order.push_back(c);
    }
    launch->streams.insert(s);
    return launch;
  };
  for (Transfer& t : pending) launch_of(t.comm, t.stream)->transfers.push_back(t);
  for (Part& p : pending_parts) launch_of(p.comm, p.stream)->parts.push_back(p);
  pending.clear();
  pending_parts.clear();
  for (CommState* c : order) {
    auto launch = launches[c];
    launch->left = launch->transfers.size() + launch->parts.size();
    for (Transfer& t : launch->transfers) {
      t.launch = launch.get();
      std::pair<int, int> pair = t.send ? std::make_pair(c->rank, t.peer) : std::make_pair(t.peer, c->rank);
      c->clique->asked[pair] |= t.send ? 1 : 2;
      c->asked.insert(pair);
    }
    for (Part& p : launch->parts) {
      p.launch = launch.get();
      p.turn = c->collectives++;
      c->clique->callers.insert(c->rank);
    }
    if (c->status() == kInProgress) result = kInProgress;
    c->launches.push_back(launch);
    std::string what =
        (launch->parts.empty() ? "transfers of rank " : "a collective of rank ") + std::to_string(c->rank);
    for (StreamState* s : launch->streams) D().Push(s, {what, [launch, s] { return Arrive(launch, s); }, {}});
  }
  return result;
}

int PointToPoint(bool send, void* data, size_t count, int type, int peer, void* handle, void* stream) {
  std::lock_guard<std::mutex> lock(D().mu);
  CommState* c = Find(handle, send ? "ncclSend" : "ncclRecv");
  StreamState* s = D().Stream(stream);
  if (c == nullptr || s == nullptr) return kInvalidUsage;
  if (type != 0 || peer < 0 || peer >= c->clique->ranks) return kInvalidArgument;
  if (peer == c->rank && depth == 0) D().Breach("a transfer to the rank itself outside a group");
  if (CurrentDevice() != c->device) D().Breach("a transfer while another device is current");
  if (s->device != c->device) D().Breach("a transfer on another device's stream");
  pending.push_back({send, peer, static_cast<char*>(data), count, c, s});
  if (depth == 0) return Flush();
  return 0;
}

// All ranks have called: colours become cliques, keys the order in them.
void Complete(Split* split, const Clique& parent) {
  std::set<int> colors;
  for (auto [color, key] : split->keys)
    if (color >= 0) colors.insert(color);
  for (int color : colors) {
    std::vector<int> members;
    for (int r = 0; r < parent.ranks; ++r)
      if (split->keys[static_cast<size_t>(r)].first == color) members.push_back(r);
    std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
      return split->keys[static_cast<size_t>(a)].second < split->keys[static_cast<size_t>(b)].second;
    });
    auto clique = std::make_shared<Clique>();
    clique->ranks = clique->joined = static_cast<int>(members.size());
    for (size_t i = 0; i < members.size(); ++i) {
      CommState* child = split->children[static_cast<size_t>(members[i])];
      child->clique = clique;
      child->rank = static_cast<int>(i);
      clique->devices.push_back(child->device);
    }
  }
}

int End(void* handle, const char* what, bool abort) {
  std::lock_guard<std::mutex> lock(D().mu);
  CommState* c = Find(handle, what, true);
  if (c == nullptr) return kInvalidUsage;
  if (!abort && !c->launches.empty()) D().Breach("ncclCommDestroy while transfers are under way");
  c->gone = true;
  // Nothing may point into its launches any more.
  auto of_c = [&](Transfer* t) { return t->comm == c; };
  if (c->clique != nullptr)
    for (auto* mail : {&c->clique->sends, &c->clique->receives})
      for (auto& [pair, list] : *mail) list.erase(std::remove_if(list.begin(), list.end(), of_c), list.end());
  delayed.erase(
      std::remove_if(delayed.begin(), delayed.end(), [&](const Delayed& x) { return of_c(x.send) || of_c(x.receive); }),
      delayed.end());
  Forget(c);
  D().cv.notify_all();
  return 0;
}

}  // namespace

int Join(Part part) {
  pending_parts.push_back(part);
  return depth == 0 ? Flush() : 0;
}

}  // namespace standin

using namespace standin;  // NOLINT: the exported functions below belong to the stand-in

#define ENTER() \
  if (int injected = D().Enter(__func__); injected != 0) return injected

extern "C" {

struct ncclUniqueId {
  char bytes[128];
};

const char* ncclGetErrorString(int code) { return code == kInProgress ? "in progress" : "an error of the stand-in"; }
const char* ncclGetLastError(void*) { return ""; }

int ncclGetVersion(int* version) {
  ENTER();
  const char* text = getenv("JAXCOLL_STANDIN_NCCL");
  *version = text != nullptr ? atoi(text) : 22907;
  return 0;
}

int ncclGetUniqueId(ncclUniqueId* id) {
  ENTER();
  std::lock_guard<std::mutex> lock(D().mu);
  memset(id->bytes, 0, sizeof(id->bytes));
  snprintf(id->bytes, sizeof(id->bytes), "standin %llu", static_cast<unsigned long long>(next_id++));
  return 0;
}

int ncclCommInitRankConfig(void** out, int ranks, ncclUniqueId id, int rank, void* config) {
  ENTER();
  std::lock_guard<std::mutex> lock(D().mu);
  if (D().pollers.empty()) D().pollers.push_back(PollDelayed);
  if (int bad = CheckConfig(static_cast<Config*>(config)); bad != 0) return bad;
  if (rank < 0 || rank >= ranks) return kInvalidArgument;
  auto& clique = cliques[std::string(id.bytes, sizeof(id.bytes))];
  if (clique == nullptr) {
    clique = std::make_shared<Clique>();
    clique->ranks = ranks;
    clique->devices.assign(static_cast<size_t>(ranks), -1);
  }
  if (clique->devices[static_cast<size_t>(rank)] >= 0) {
    D().Breach("a rank joined twice, or a unique id was used twice");
    return kInvalidUsage;
  }
  CommState* c = NewComm();
  c->clique = clique;
  c->rank = rank;
  clique->devices[static_cast<size_t>(rank)] = c->device;
  ++clique->joined;
  *out = c;
  return c->status();
}

// The blocking form: returns when all ranks are there.
int ncclCommInitRank(void** out, int ranks, ncclUniqueId id, int rank) {
  Config config = {48, 0xcafebeef, 21800, 1};
  int code = ncclCommInitRankConfig(out, ranks, id, rank, &config);
  std::unique_lock<std::mutex> lock(D().mu);
  while (code == kInProgress) {
    D().cv.wait_for(lock, std::chrono::milliseconds(1));
    code = static_cast<CommState*>(*out)->status();
  }
  if (code == 0) static_cast<CommState*>(*out)->blocking = true;
  return code;
}

int ncclCommSplit(void* handle, int color, int key, void** out, void* config) {
  ENTER();
  std::lock_guard<std::mutex> lock(D().mu);
  CommState* c = Find(handle, "ncclCommSplit");
  if (c == nullptr) return kInvalidUsage;
  if (int bad = CheckConfig(static_cast<Config*>(config)); bad != 0) return bad;
  if (depth > 0) D().Breach("ncclCommSplit inside a group");
  size_t turn = c->splits++;
  Clique& clique = *c->clique;
  if (clique.splits.size() <= turn) clique.splits.resize(turn + 1);
  Split& split = clique.splits[turn];
  split.keys.resize(static_cast<size_t>(clique.ranks), {-1, 0});
  split.children.resize(static_cast<size_t>(clique.ranks), nullptr);
  split.keys[static_cast<size_t>(c->rank)] = {color, key};
  CommState* child = color >= 0 ? NewComm() : nullptr;
  split.children[static_cast<size_t>(c->rank)] = child;
  *out = child;
  if (++split.calls == clique.ranks) Complete(&split, clique);
  return c->status();
}

int ncclCommGetAsyncError(void* handle, int* error) {
  ENTER();
  std::lock_guard<std::mutex> lock(D().mu);
  CommState* c = Find(handle, "ncclCommGetAsyncError", true);
  if (c == nullptr) return kInvalidUsage;
  *error = c->status();
  return 0;
}

int ncclCommAbort(void* handle) {
  ENTER();
  return End(handle, "ncclCommAbort", true);
}
int ncclCommDestroy(void* handle) {
  ENTER();
  return End(handle, "ncclCommDestroy", false);
}

int ncclGroupStart() {
  ENTER();
  ++depth;
  return 0;
}
int ncclGroupEnd() {
  // A failing end still closes the group.
  int injected = D().Enter(__func__);
  std::lock_guard<std::mutex> lock(D().mu);
  if (depth == 0) {
    D().Breach("ncclGroupEnd without ncclGroupStart");
    return kInvalidUsage;
  }
  if (--depth > 0) return injected;
  if (injected != 0) {
    pending.clear();
    pending_parts.clear();
    return injected;
  }
  return Flush();
}

int ncclSend(const void* data, size_t count, int type, int peer, void* comm, void* stream) {
  ENTER();
  return PointToPoint(true, static_cast<char*>(const_cast<void*>(data)), count, type, peer, comm, stream);
}
int ncclRecv(void* data, size_t count, int type, int peer, void* comm, void* stream) {
  ENTER();
  return PointToPoint(false, data, count, type, peer, comm, stream);
}

// For tests: the communicators of a device report an error from now on; a transfer between two devices (-1, -1: any
// two that nothing is said of) takes so long, 0: all are quick again; communicators made.
void standin_break(int device) {
  std::lock_guard<std::mutex> lock(D().mu);
  for (CommState* c : comms)
    if (c->device == device && !c->gone) c->error = kSystemError;
}
void standin_delay(int from, int to, int64_t ns) {
  std::lock_guard<std::mutex> lock(D().mu);
  if (ns > 0)
    delays[{from, to}] = ns;
  else
    delays.clear();
}
int64_t standin_communicators() {
  std::lock_guard<std::mutex> lock(D().mu);
  return created;
}

// What was made and not ended.
int64_t standin_left(char* out, int64_t size) {
  std::lock_guard<std::mutex> lock(D().mu);
  auto count = [](const auto& all, auto&& lives) {
    return std::to_string(std::count_if(all.begin(), all.end(), lives));
  };
  std::string text = "communicators " + count(comms, [](const CommState* c) { return !c->gone; }) + "\nstreams " +
                     count(D().streams, [](const StreamState* s) { return !s->destroyed && !s->test; }) + "\nevents " +
                     count(D().events, [](const EventState* e) { return !e->destroyed; }) + "\nblocks " +
                     std::to_string(D().Allocated());
  return CopyText(text, out, size);
}

}  // extern "C"
