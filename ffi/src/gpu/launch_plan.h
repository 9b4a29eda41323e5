// A plan in the order in which a GPU's queues are filled: per step the flows (TEN edges at this rank) and then the
// local nodes.
//
// Every rank issues its work in one global order (wave, lane, calls inside the host, graph, edge), and every wait, on
// an event, on a stream that two flows share, or for the peer, points backwards in it. So the first unfinished flow or
// call of that order can always run: no deadlock, whatever the table.
#ifndef JAXCOLL_GPU_LAUNCH_PLAN_H_
#define JAXCOLL_GPU_LAUNCH_PLAN_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/host_calls.h"
#include "program/plan.h"

namespace jaxcoll {
namespace gpu {

struct Flow {
  uint32_t edge;
  bool send;
  uint16_t peer;
  uint16_t stream;
  std::vector<uint32_t>
      parts;  // send: nodes of the plan; receive: incoming. In the order of transfers, as at the other end
  std::vector<uint32_t> after;  // marks that must be reached before (numbers of LaunchPlan::marks)
  uint32_t mark;                // reached when the flow is over
  uint32_t timed;               // number of LaunchPlan::timed
};

// One end of a TEN edge as it is timed: of a flow, or of a call that replaces several edges.
struct TimedEdge {
  uint32_t edge;
  bool send, together;
  uint16_t peer;
  uint32_t mark;  // when it is over; its number is that of the event before, too
};

// A step inside the host that is one collective of NCCL (gpu/host_calls.h).
struct LaunchCall {
  HostCall call;
  uint32_t place;  // this rank among call.ranks
  uint16_t stream;
  // [row][place] as call.rows. ReduceScatter: the node that sends the chunk, at one's own place the vertex.
  // AllGather: the incoming value, at one's own place a node that sends the chunk, or the one of `copies`.
  std::vector<std::vector<std::vector<uint32_t>>> parts;
  std::vector<uint32_t> copies;  // of one's own share into the result: earlier than needed, but there it is gathered
  std::vector<uint32_t> after;
  uint32_t mark, done;  // NCCL is through; and the values are where they belong
};

struct LocalNode {
  uint32_t node;
  uint16_t stream;
  std::vector<uint32_t> after;
  uint32_t mark;  // kNoMark: nothing waits for it
};

constexpr uint32_t kNoMark = UINT32_MAX;

struct LaunchStep {
  std::vector<LaunchCall> calls;
  std::vector<Flow> flows;       // by (graph, edge)
  std::vector<LocalNode> nodes;  // vertices that reduce
};

struct LaunchPlan {
  std::shared_ptr<const Plan> plan;
  std::vector<LaunchStep> steps;
  std::vector<LocalNode> last;        // copies into the result
  std::vector<uint16_t> mark_stream;  // [marks] the stream on which it is recorded
  std::vector<bool> in_place;         // [incoming] lands where it belongs; else in a landing buffer
  std::vector<TimedEdge> timed;
  uint32_t num_spans = 0;  // flows and calls: what has an event before; their marks come first
  uint16_t num_streams = 1;
};

// Streams: one for each slot (as many slots as a graph has flows at one step) of each graph, shared beyond
// `max_streams`.
std::shared_ptr<const LaunchPlan> MakeLaunchPlan(std::shared_ptr<const Plan> plan, int max_streams,
                                                 const std::vector<HostCall>& calls);

}  // namespace gpu
}  // namespace jaxcoll

#endif  // JAXCOLL_GPU_LAUNCH_PLAN_H_
