// A plan in the order in which a GPU's queues are filled: per step the flows (TEN edges at this rank) and then the
// local nodes.
//
// Every rank issues its flows in one global order (wave, lane, graph, edge), and every wait, on an event, on a stream
// that two flows share, or for the peer, points backwards in it. So the first unfinished flow of that order can always
// run: no deadlock, whatever the table.
#ifndef JAXCOLL_GPU_LAUNCH_PLAN_H_
#define JAXCOLL_GPU_LAUNCH_PLAN_H_

#include <cstdint>
#include <memory>
#include <vector>

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
};

struct LocalNode {
  uint32_t node;
  uint16_t stream;
  std::vector<uint32_t> after;
  uint32_t mark;  // kNoMark: nothing waits for it
};

constexpr uint32_t kNoMark = UINT32_MAX;

struct LaunchStep {
  std::vector<Flow> flows;       // by (graph, edge)
  std::vector<LocalNode> nodes;  // vertices that reduce
};

struct LaunchPlan {
  std::shared_ptr<const Plan> plan;
  std::vector<LaunchStep> steps;
  std::vector<LocalNode> last;        // copies into the result
  std::vector<uint16_t> mark_stream;  // [marks] the stream on which it is recorded
  std::vector<bool> in_place;         // [incoming] lands where it belongs; else in a landing buffer
  uint32_t num_flows = 0;
  uint16_t num_streams = 1;
  std::vector<uint16_t> send_to, receive_from;  // ranks, sorted: the pairs that must be connected
};

// Streams: one for each slot (as many slots as a graph has flows at one step) of each graph, shared beyond
// `max_streams`.
std::shared_ptr<const LaunchPlan> MakeLaunchPlan(std::shared_ptr<const Plan> plan, int max_streams);

}  // namespace gpu
}  // namespace jaxcoll

#endif  // JAXCOLL_GPU_LAUNCH_PLAN_H_
