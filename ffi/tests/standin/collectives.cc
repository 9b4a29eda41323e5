// NCCL's collectives, of the types that jaxcoll asks for. Kept of the real ones: ranks meet by the order of their calls
// alone; nobody's part ends before all have come; a ReduceScatter adds up in the order of a ring, its owner last, which
// is not the order of an edge-by-edge schedule. Unlike the real ones they say so where ranks disagree, or where operand
// and result overlap but for the in-place form.
#include <algorithm>
#include <cstring>

#include "nccl.h"
#include "reduce/combine.h"

namespace standin {
namespace {

// By communicator and turn: met, and slowed down by standin_delay.
auto& late = *new std::vector<std::pair<std::shared_ptr<Clique>, size_t>>;

constexpr jaxcoll::DType kTypes[] = {jaxcoll::DType::kS8,      jaxcoll::DType::kU8,  jaxcoll::DType::kS32,
                                     jaxcoll::DType::kU32,     jaxcoll::DType::kS64, jaxcoll::DType::kU64,
                                     jaxcoll::DType::kInvalid, jaxcoll::DType::kF32, jaxcoll::DType::kF64};
constexpr jaxcoll::Reduction kOps[] = {jaxcoll::Reduction::kSum, jaxcoll::Reduction::kProd, jaxcoll::Reduction::kMax,
                                       jaxcoll::Reduction::kMin};

jaxcoll::DType TypeOf(const Part& p) { return kTypes[static_cast<size_t>(p.type)]; }
size_t Bytes(const Part& p) { return p.count * jaxcoll::ElementSize(TypeOf(p)); }
size_t Ranks(const Part& p) { return static_cast<size_t>(p.comm->clique->ranks); }
size_t FromBytes(const Part& p) { return Bytes(p) * (p.what == Collective::kReduceScatter ? Ranks(p) : 1); }
size_t ToBytes(const Part& p) { return Bytes(p) * (p.what == Collective::kAllGather ? Ranks(p) : 1); }

void CheckOverlap(const Part& p) {
  size_t own = static_cast<size_t>(p.comm->rank) * Bytes(p);
  bool in_place = p.what == Collective::kReduceScatter ? p.to == p.from + own
                  : p.what == Collective::kAllGather   ? p.from == p.to + own
                                                       : p.from == p.to;
  if (!in_place && p.from < p.to + ToBytes(p) && p.to < p.from + FromBytes(p))
    Device::Get().Breach("a collective's operand and result overlap");
}

// Adds up the parts' elements at `at`, beginning behind rank `last`.
void AddUp(const std::vector<Part*>& parts, size_t at, size_t last, char* to) {
  std::vector<jaxcoll::Source> sources;
  for (size_t i = 1; i <= parts.size(); ++i) sources.push_back({parts[(last + i) % parts.size()]->from + at, false});
  const Part& p = *parts[0];
  jaxcoll::Combine(TypeOf(p), kOps[p.op], to, false, sources.data(), static_cast<int>(sources.size()), p.count);
}

void Run(std::vector<Part*> parts) {
  std::sort(parts.begin(), parts.end(), [](Part* a, Part* b) { return a->comm->rank < b->comm->rank; });
  size_t bytes = Bytes(*parts[0]);
  for (Part* p : parts) {
    Device::Get().Touch(p->from, FromBytes(*p), "a collective's operand");
    Device::Get().Touch(p->to, ToBytes(*p), "a collective's result");
  }
  std::vector<char> whole(parts[0]->what == Collective::kAllReduce ? bytes : bytes * parts.size());
  for (size_t r = 0; r < parts.size(); ++r) {
    if (parts[0]->what == Collective::kReduceScatter) AddUp(parts, r * bytes, r, whole.data() + r * bytes);
    if (parts[0]->what == Collective::kAllGather && bytes > 0) memcpy(whole.data() + r * bytes, parts[r]->from, bytes);
  }
  if (parts[0]->what == Collective::kAllReduce) AddUp(parts, 0, 0, whole.data());
  for (size_t r = 0; r < parts.size(); ++r) {
    size_t at = parts[0]->what == Collective::kReduceScatter ? r * bytes : 0;
    if (bytes > 0) memcpy(parts[r]->to, whole.data() + at, ToBytes(*parts[r]));
    --parts[r]->launch->left;
  }
}

bool Agree(const std::vector<Part*>& parts) {
  for (Part* p : parts)
    if (p->what != parts[0]->what || p->count != parts[0]->count || p->type != parts[0]->type || p->op != parts[0]->op)
      return false;
  return true;
}

int Ask(Collective what, const void* from, void* to, size_t count, int type, int op, void* handle, void* stream,
        const char* name) {
  Device& d = Device::Get();
  std::lock_guard<std::mutex> lock(d.mu);
  CommState* c = Find(handle, name);
  StreamState* s = d.Stream(stream);
  if (c == nullptr || s == nullptr) return kInvalidUsage;
  if (type < 0 || type >= static_cast<int>(std::size(kTypes)) || op < 0 || op >= static_cast<int>(std::size(kOps)) ||
      kTypes[type] == jaxcoll::DType::kInvalid)
    return kInvalidArgument;
  if (CurrentDevice() != c->device) d.Breach("a collective while another device is current");
  if (s->device != c->device) d.Breach("a collective on another device's stream");
  Part part{what, static_cast<const char*>(from), static_cast<char*>(to), count, type, op, c, s};
  CheckOverlap(part);
  return Join(part);
}

}  // namespace

void Meet(Clique* clique, Part* part) {
  Meeting& meeting = clique->meetings[part->turn];
  meeting.parts.push_back(part);
  if (meeting.parts.size() < static_cast<size_t>(clique->ranks)) return;
  if (!Agree(meeting.parts)) {
    Device::Get().Breach("ranks disagree about a collective, its count, type or reduction");
    for (Part* p : meeting.parts) p->comm->error = kInvalidUsage;  // none ends, as on a device
    return;
  }
  int64_t delay = 0;
  for (int a : clique->devices)
    for (int b : clique->devices)
      if (a != b) delay = std::max(delay, DelayOf(a, b));
  if (delay > 0) {
    meeting.due_ns = NowNs() + delay;
    late.emplace_back(part->comm->clique, part->turn);
    return;
  }
  Run(meeting.parts);
  clique->meetings.erase(part->turn);
}

bool PollMeetings() {
  bool moved = false;
  for (size_t i = 0; i < late.size();) {
    auto [clique, turn] = late[i];
    auto meeting = clique->meetings.find(turn);
    if (meeting != clique->meetings.end() && NowNs() < meeting->second.due_ns) {
      ++i;
      continue;
    }
    late.erase(late.begin() + static_cast<ptrdiff_t>(i));
    if (meeting == clique->meetings.end()) continue;
    Run(meeting->second.parts);
    clique->meetings.erase(meeting);
    moved = true;
  }
  return moved;
}

// What it has not ended never ends, for the others neither.
void Forget(CommState* gone) {
  if (gone->clique == nullptr) return;
  auto& meetings = gone->clique->meetings;
  for (auto it = meetings.begin(); it != meetings.end();) {
    std::vector<Part*>& parts = it->second.parts;
    size_t before = parts.size();
    parts.erase(std::remove_if(parts.begin(), parts.end(), [&](Part* p) { return p->comm == gone; }), parts.end());
    it = parts.size() == before ? std::next(it) : meetings.erase(it);
  }
}

}  // namespace standin

using standin::Collective;

#define ENTER() \
  if (int injected = standin::Device::Get().Enter(__func__); injected != 0) return injected

extern "C" {

int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, void* comm, void* stream) {
  ENTER();
  return standin::Ask(Collective::kAllReduce, from, to, count, type, op, comm, stream, __func__);
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, void* comm, void* stream) {
  ENTER();
  return standin::Ask(Collective::kReduceScatter, from, to, count, type, op, comm, stream, __func__);
}
int ncclAllGather(const void* from, void* to, size_t count, int type, void* comm, void* stream) {
  ENTER();
  return standin::Ask(Collective::kAllGather, from, to, count, type, 0, comm, stream, __func__);
}

}  // extern "C"
