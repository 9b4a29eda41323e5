// The stand-in's NCCL: what its two files share. Everything here is used with the device's mutex held.
#ifndef JAXCOLL_STANDIN_NCCL_H_
#define JAXCOLL_STANDIN_NCCL_H_

#include "device.h"

namespace standin {

constexpr int kInProgress = 7, kInvalidArgument = 4, kInvalidUsage = 5, kSystemError = 2;

struct Launch;
struct CommState;

struct Transfer {
  bool send;
  int peer;
  char* data;
  size_t bytes;
  CommState* comm;
  StreamState* stream;
  Launch* launch = nullptr;
};

enum class Collective { kAllReduce, kReduceScatter, kAllGather };

// One rank's part in a collective. count: elements, of the block that every rank has to itself.
struct Part {
  Collective what;
  const char* from;
  char* to;
  size_t count;
  int type, op;
  CommState* comm;
  StreamState* stream;
  size_t turn = 0;  // which of the communicator's collectives
  Launch* launch = nullptr;
};

struct Meeting {
  std::vector<Part*> parts;  // that have come
  int64_t due_ns = 0;
};

struct Launch {
  CommState* comm = nullptr;
  std::vector<Transfer> transfers;
  std::vector<Part> parts;
  std::set<StreamState*> streams, arrived;
  bool started = false;
  size_t left = 0;
  bool over() const { return started && left == 0; }
};

struct Split {
  int calls = 0;
  std::vector<std::pair<int, int>> keys;  // [rank] (color, key)
  std::vector<CommState*> children;       // [rank]
};

struct Clique {
  int ranks = 0, joined = 0;
  std::vector<int> devices;
  std::map<std::pair<int, int>, std::deque<Transfer*>> sends, receives;  // (src, dst)
  std::map<std::pair<int, int>, int> asked;                              // bit 0 sender, bit 1 receiver; 3: connected
  std::vector<Split> splits;
  std::map<size_t, Meeting> meetings;  // collectives by their number
  std::set<int> callers;               // of any collective; all of them: connected
};

struct CommState {
  std::shared_ptr<Clique> clique;  // null: a split that is not through
  int rank = 0, device = 0;
  bool gone = false;      // aborted or destroyed
  bool blocking = false;  // never "in progress" after its calls: it would have waited
  int error = 0;
  size_t splits = 0, collectives = 0;
  std::set<std::pair<int, int>> asked;
  std::deque<std::shared_ptr<Launch>> launches;

  int status() const {
    if (error != 0) return error;
    if (clique == nullptr || clique->joined < clique->ranks) return kInProgress;
    for (size_t i = 0; i < splits; ++i)
      if (clique->splits[i].calls < clique->ranks) return kInProgress;
    if (!blocking && collectives > 0 && clique->callers.size() < static_cast<size_t>(clique->ranks)) return kInProgress;
    for (auto pair : asked)
      if (clique->asked.at(pair) != 3) return kInProgress;
    return 0;
  }
};

CommState* Find(void* handle, const char* what, bool may_be_busy = false);
int64_t DelayOf(int from, int to);  // ns, of devices
// Takes part: at once, or with the group that is open.
int Join(Part part);
// All that a stream's head has come to: the collective runs when all parts are there.
void Meet(Clique* clique, Part* part);
bool PollMeetings();           // true: one has ended
void Forget(CommState* gone);  // its parts take no part any more

}  // namespace standin

#endif  // JAXCOLL_STANDIN_NCCL_H_
