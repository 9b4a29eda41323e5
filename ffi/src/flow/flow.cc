#include "flow.h"

#include <algorithm>
#include <new>
#include <vector>

#include "network.h"

namespace {

using jaxcoll::flow::FindCuts;
using jaxcoll::flow::Network;
using jaxcoll::flow::Shortage;

bool InRange(int32_t count, const int32_t* nodes, int32_t limit) {
  if (count < 0) return false;
  for (int32_t i = 0; i < count; ++i) {
    if (nodes[i] < 0 || nodes[i] >= limit) return false;
  }
  return true;
}

}  // namespace

struct jc_flow {
  Network network;
};

extern "C" {

int32_t jc_flow_abi(void) { return JC_FLOW_ABI; }

jc_flow* jc_flow_new(int32_t nodes, int32_t arcs, const int32_t* tail, const int32_t* head) {
  if (nodes < 1 || !InRange(arcs, tail, nodes) || !InRange(arcs, head, nodes)) return nullptr;
  try {
    return new jc_flow{Network(nodes, arcs, tail, head)};
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void jc_flow_free(jc_flow* flow) { delete flow; }

int32_t jc_flow_cuts(jc_flow* flow, const int64_t* capacity, const int64_t* demand, int32_t groups,
                     const int64_t* group_amount, const int32_t* group_start, const int32_t* group_nodes,
                     int32_t nsources, const int32_t* sources, int32_t nsinks, const int32_t* sinks, int32_t ntargets,
                     const int32_t* targets, int64_t limit, int32_t max_cuts, int64_t* value, int32_t* target,
                     uint8_t* side) {
  if (flow == nullptr || groups < 0 || max_cuts < 1 || limit < 0 || limit >= JC_FLOW_INFINITE) return -1;
  Network& net = flow->network;
  const int32_t nodes = net.nodes();
  if (!InRange(nsources, sources, nodes) || !InRange(nsinks, sinks, nodes) || !InRange(ntargets, targets, nodes))
    return -1;
  if (groups > 0 && !InRange(group_start[groups], group_nodes, nodes)) return -1;
  try {
    net.Build(capacity, demand, groups, group_amount, group_start, group_nodes);
    for (int32_t i = 0; i < nsources; ++i) net.OpenSource(sources[i]);
    const std::vector<Shortage> found = FindCuts(&net, std::vector<int32_t>(sinks, sinks + nsinks),
                                                 std::vector<int32_t>(targets, targets + ntargets), limit, max_cuts);
    for (size_t i = 0; i < found.size(); ++i) {
      value[i] = found[i].value;
      target[i] = found[i].target;
      std::copy(found[i].side.begin(), found[i].side.end(), side + static_cast<int64_t>(i) * nodes);
    }
    return static_cast<int32_t>(found.size());
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // extern "C"
