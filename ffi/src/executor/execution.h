// One operation of one local rank under way: the plan's graph of nodes, once per lane.
// Every method runs under the engine's mutex, except RunNode, which moves bytes.
#ifndef JAXCOLL_EXECUTOR_EXECUTION_H_
#define JAXCOLL_EXECUTOR_EXECUTION_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "executor/span_cursor.h"
#include "executor/view.h"
#include "program/plan.h"
#include "reduce/combine.h"
#include "telemetry/record.h"
#include "transport/link.h"

namespace jaxcoll {

class Engine;

// A communicator as the executor sees it.
struct Group {
  uint64_t id = 0;
  std::vector<int> process;  // [rank] the process that drives it
  std::string name;          // for messages
  int size() const { return static_cast<int>(process.size()); }
};

struct OpRequest {
  OpKey key;
  std::shared_ptr<const Group> group;
  int rank = 0;
  std::shared_ptr<const Plan> plan;
  DType dtype = DType::kF32;
  Reduction reduce = Reduction::kNone;
  View input, output;
};

using Completion = std::function<void(const Status&)>;

class Execution;

// The local ranks' executions of one operation, by rank; null where none is open.
struct Gang {
  std::vector<Execution*> members;
  int open = 0;
};

class Execution {
 public:
  Execution(Engine* engine, OpRequest request, Completion done);
  ~Execution();

  void Start();
  // Messages for this operation.
  void OnOffer(Link* link, const Header& h, const RemoteSpan* spans, size_t count, Execution* local_sender);
  // A send to local rank `to`, which has begun just now, if its data are ready.
  void OfferLocal(uint32_t lane, uint32_t transfer, Execution* to);
  uint32_t lanes() const { return lanes_; }
  void OnPosted(Link* link, const Header& h, const RemoteSpan& block);
  void OnEager(Link* link, const Header& h, const void* payload);
  void OnReady(Link* link, const Header& h);
  std::vector<MutableSpan> DataTarget(Link* link, const Header& h);
  void OnLanded(Link* link, const Header& h, const Timed& timed);
  void OnAck(const Header& h);
  void OnWaiting(const Header& h);
  void SendDone(uint32_t lane, uint32_t node);

  Status RunNode(uint32_t lane, uint32_t node);  // without the mutex
  void NodeRan(uint32_t lane, uint32_t node);    // afterwards, with it
  void PinSenders(uint32_t lane, uint32_t node, int delta);

  bool over() const { return nodes_left_ == 0; }
  bool heard(int rank) const { return heard_[static_cast<size_t>(rank)]; }
  uint64_t signature() const { return signature_; }
  Header MakeHeader(MessageType type, int to, uint32_t lane, uint32_t transfer) const;
  std::string Describe() const;  // "all_reduce sum f32[1024] of rank 3 in data(8)"
  // Which edge is waited for, and who is to blame for it. `rank`: whose turn it is as seen from here, -1: this rank's
  // own.
  std::string Missing(int* rank) const;
  // Whether something is still to come from that rank, or to be taken by it.
  bool WaitsFor(int rank) const;
  // The edge that this process still has to serve, empty if this operation can end without it.
  std::string Needs(int process) const;
  std::string Where(uint32_t incoming) const;  // " at step 2, edge 1->3 of graph 0 (schedule ring)"
  static std::string DescribeSignature(uint64_t signature);
  size_t TaskBytes(uint32_t lane, uint32_t node) const;
  // How many more messages must come before this operation can go on: a waiter need not be woken for fewer.
  uint32_t Expecting() const;
  void AddRecords(RecordBuffer* records, size_t* held) const;

  OpRequest request;
  Gang* gang = nullptr;
  Completion done;
  int64_t started_ns;
  int64_t told_ns = 0;  // when the peers were last told whom we wait for
  bool warned = false;
  bool failed = false;
  std::string failure;
  int running = 0;  // tasks of ours that run now, and reads of our memory by local peers
  // The caller may still be inside Engine::Start(): then completion is reported by its return value.
  struct Caller {
    bool inside = true;
    std::atomic<bool> over{false};
    std::thread::id driver;  // the thread that polls for this operation and may sleep meanwhile, if there is one
    Status status;
  };
  std::shared_ptr<Caller> caller = std::make_shared<Caller>();

 private:
  enum class In : uint8_t { kNone, kOffered, kLanding, kHeld, kInPlace };
  struct InState {
    In state = In::kNone;
    bool ready_sent = false;
    Link* link = nullptr;
    Execution* local_sender = nullptr;
    bool direct = false;      // kOffered: the addresses are this process's own (a local sender, or a peer's slab)
    RemoteSpan posted{0, 0};  // the block of the peer's slab, size 0: none
    RemoteSpan first{0, 0};
    uint64_t offered_at = 0;  // kOffered: how many operations its sender had withdrawn by then
    std::vector<RemoteSpan> more;
    std::unique_ptr<uint8_t[]> buffer;
    size_t received = 0, promised = 0;
    // For the record: when it began to come and when all was there; between begin_ns and end_ns it went at the speed of
    // `timed` bytes in transfer_ns.
    int64_t arrive_ns = 0, done_ns = 0;
    size_t timed = 0;
    int64_t transfer_ns = 0, begin_ns = 0, end_ns = 0;
    // kOffered: where the bytes lie.
    const RemoteSpan* spans() const { return more.empty() ? &first : more.data(); }
    size_t num_spans() const { return more.empty() ? 1 : more.size(); }
  };
  struct OutState {
    bool data_ready = false, peer_ready = false, done = false, streaming = false, offered = false;
    std::unique_ptr<uint8_t[]> gathered;  // what is offered, where it lay in too many pieces
  };

  struct PostState {
    Slab* slab = nullptr;  // set: we hold the block
    uint64_t block = 0;
    uint32_t asked = 0;  // sends that have come for it
  };

  InState& in(uint32_t lane, uint32_t i) { return in_[size_t{lane} * plan_.incoming.size() + i]; }
  const InState& in(uint32_t lane, uint32_t i) const { return in_[size_t{lane} * plan_.incoming.size() + i]; }
  OutState& out(uint32_t lane, uint32_t node) { return out_[size_t{lane} * num_sends_ + send_index_[node]]; }
  uint32_t& deps(uint32_t lane, uint32_t node) { return deps_[size_t{lane} * plan_.nodes.size() + node]; }
  uint32_t& missing(uint32_t lane, uint32_t node) { return missing_[size_t{lane} * plan_.nodes.size() + node]; }

  void StartLane(uint32_t lane);
  void DepsMet(uint32_t lane, uint32_t node);
  void IssueSend(uint32_t lane, uint32_t node);
  void Offer(Link* link, uint32_t lane, uint32_t node, std::vector<Span> spans, size_t bytes);
  // Sends a message about a transfer. One that its link can't take at all fails the operation.
  void Tell(Link* link, MessageType type, int to, uint32_t lane, uint32_t transfer, const Span* payload = nullptr,
            size_t spans = 0);
  void Tell(Link* link, const Header& h, const Span* payload, size_t spans);
  // Sends a value by putting it into the slab, once for all its readers. False: it is too large, or there is no room.
  bool Post(Link* link, uint32_t lane, const Node& node, Range r, size_t bytes);
  // The transfer that a message names, if there is one from its sender; and if it fits and nothing of it has come.
  InState* Awaited(const Header& h, uint32_t* index);
  InState* Expected(const Header& h, uint32_t* index, size_t bytes);
  // The send that a message answers, if it is one to the message's sender.
  bool Sent(const Header& h, uint32_t* id) const;
  void Stream(uint32_t lane, uint32_t node);
  void Accept(uint32_t lane, uint32_t i);  // tells a push sender that it may send
  void Arrived(uint32_t lane, uint32_t i);
  void NodeDone(uint32_t lane, uint32_t node);
  bool InPlace(const Node& node) const { return !node.reduce && node.num_in == 1; }
  Range LaneOf(uint32_t chunk, uint32_t lane) const;
  Range Cleared(uint32_t lane) const;  // what a kZero node clears: it has no chunk
  size_t WireSize(bool wide) const { return wide ? sizeof(float) : element_size_; }
  size_t TransferBytes(uint32_t lane, uint32_t chunk, bool wide) const {
    return static_cast<size_t>(LaneOf(chunk, lane).size()) * WireSize(wide);
  }
  size_t IncomingBytes(uint32_t lane, uint32_t i) const {
    const Incoming& incoming = plan_.incoming[i];
    return TransferBytes(lane, plan_.nodes[plan_.node_of_incoming[i]].chunk, incoming.wide);
  }
  Link* LinkTo(int rank) const;
  bool Local(int rank) const;
  std::vector<Span> SlotSpans(const Slot& slot, uint32_t chunk, Range r) const;
  uint8_t* Locate(const Slot& slot, uint32_t chunk, int64_t at, int64_t* elements) const;
  std::string EdgeText(uint32_t edge, int from, int to) const;
  int Culprit(int rank) const;
  bool Begun(int rank) const;
  bool Skipped(size_t bytes) const { return bytes == 0 && !empty_; }  // nothing of this transfer travels
  void Refuse(Link* link, const Header& h);                           // a message that this operation has no use for
  Status Unreadable(const Status& status, uint32_t incoming) const;
  Status CopyIn(uint32_t lane, const Node& node);
  Status ReduceIn(uint32_t lane, const Node& node);
  // Reads bytes [at, at + size) of an offer out of the peer's memory.
  Status Fetch(const InState& s, SpanCursor* cursor, size_t at, size_t size, uint8_t* to) const;
  // How many of `most` elements from `at` (of the lane) on lie in one piece in every source that is read in place;
  // `cursors`: one for each incoming value.
  int64_t InOnePiece(uint32_t lane, const Node& node, int64_t at, int64_t most, SpanCursor* cursors) const;
  void CopyBytes(void* dst, const void* src, size_t bytes) const;
  Status CopySlot(const Node& node, Range r);

  Engine* const engine_;
  const Plan& plan_;
  const Program& program_;
  size_t element_size_;
  uint64_t signature_;
  bool large_ = false;  // the result is larger than the caches
  bool empty_ = false;  // no elements: messages without bytes travel all the same, for the ranks may disagree on that
  uint32_t lanes_ = 1, window_ = 1, next_lane_ = 0;
  size_t num_sends_ = 0;
  size_t nodes_left_;
  std::vector<Range> ranges_;         // [chunk]
  std::vector<uint32_t> send_index_;  // [node]
  std::vector<InState> in_;
  std::vector<OutState> out_;
  std::vector<uint32_t> deps_, missing_;
  std::vector<uint32_t> lane_left_;
  std::vector<std::unique_ptr<uint8_t[]>> scratch_;
  std::vector<PostState> posted_;  // [lane * values + value]
  std::vector<bool> heard_;        // [rank] some message of this operation came from it
  std::vector<int> waits_for_;     // [rank] whom it said it waits for, -1: nobody yet
};

}  // namespace jaxcoll

#endif  // JAXCOLL_EXECUTOR_EXECUTION_H_
